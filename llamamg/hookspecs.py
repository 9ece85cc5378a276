"""Every hook a plugin may implement. The docstring of a hook is its contract; docs/hooks.md is generated from here.

Rules for all of them:

* Hooks run on the engine thread unless they say otherwise. A step is about 20 ms long and a hook called in every step
  should take less than 50 µs: no I/O, no waiting, no logging per call. Longer work goes to a thread of the plugin's own
  or to `idle`.
* There is no hook per token: `step_done` gets all outputs of a step in one call.
* Take any subset of the arguments, by name. Everything is read-only except what "May change" lists.
* Plugins are called in this order: third-party ones by name, then shipped ones by name. `hookimpl(tryfirst=True)` and
  `hookimpl(trylast=True)` move a function before or behind all others. Wrappers are refused.
* A hook marked "first result" stops at the first answer that is not None; None leaves the decision to the next one.
* A hook that raises puts its plugin in quarantine: it is off from then on and the step goes on without it.
* Installing a package enables nothing: `--enable NAME` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from llamamg.batch import Batch, Plan, StepState
    from llamamg.config import Config
    from llamamg.decisions import Admit, Defer, Fail, PrefixHit, Reject, Retry, Shrink
    from llamamg.engine import Engine
    from llamamg.kept import KeptState
    from llamamg.plugins.options import Options
    from llamamg.request import FinishReason, Request, Timings
    from llamamg.sequence import Sequence
    from llamamg.slot import Slot

hookspec = pluggy.HookspecMarker("llamamg")
hookimpl = pluggy.HookimplMarker("llamamg")


# ---- once ------------------------------------------------------------------------------------------------------------


@hookspec
def register_options(options: Options) -> None:
    """Declare the plugin's options with `options.add(name, type=…, default=…, help=…)`.

    When: before the command line is parsed, on an instance made without arguments, enabled or not.
    Thread: main.
    May change: `options`, by `add` only. Each option becomes `--PLUGIN-NAME`, a key of `[plugins.PLUGIN]` in the
    configuration file, and a keyword of the constructor (with `_` for `-`).
    Must not: do anything else; the instance is thrown away.
    """


@hookspec
def configure(config: Config, devices: Seq[Any]) -> Config | None:
    """Say whether the plugin applies here, and change the context if it needs to.

    When: once, after the options are parsed and before the model is loaded; or, for a plugin that was not enabled at
    the start, when it is first switched on.
    Thread: main; engine when switched on later.
    May change: values of `config.context` named in the plugin's documentation, by returning a changed Config
    (`dataclasses.replace`). A plugin that does so cannot be switched on later, only at the start.
    Must not: load anything.
    Raise: `Unavailable(reason)` to stay off. A shipped plugin then stays off by itself; one enabled by name stops the
    start with the reason. `PluginError(sentence)` where an option asks for what cannot be: it stops the start.
    """
    raise NotImplementedError


@hookspec
def native_switches(config: Config, devices: Seq[Any]) -> Mapping[str, int]:
    """Values of the native library's run-time switches this plugin wants while it is on.

    When: before the context is created and again at each toggle of any plugin.
    Thread: main, then engine.
    Result: switch name -> value. A switch that no enabled plugin names has the library's default. Two plugins wanting
    different values of one switch is an error that stops the start or the toggle.
    Must not: depend on anything but its arguments and the plugin's options.
    """
    raise NotImplementedError


@hookspec
def engine_start(engine: Engine) -> None:
    """The context is ready: make threads, files and streams of the plugin's own.

    When: once per plugin, before its first per-request or per-step hook.
    Thread: engine.
    Must not: submit batches.
    Raise: as in `configure`, for what only the context shows. Then `engine_stop` is not called.
    """


@hookspec
def engine_stop(engine: Engine) -> None:
    """The engine has drained: give everything back that `engine_start` made.

    When: once, for every plugin whose `engine_start` ran, also if it is off by then.
    Thread: engine.
    Must not: submit batches or wait longer than a second.
    """


@hookspec
def register_metrics(metrics: Any) -> None:
    """Add counters of the plugin's own to the registry behind /metrics (a `prometheus_client.CollectorRegistry`).

    When: once, after `engine_start`. `llamamg:plugin_effect` is exported for every plugin already.
    Thread: engine.
    Must not: use names that do not begin with `llamamg:PLUGIN_` (with `_` for `-`).
    """


@hookspec
def register_routes() -> Seq[Any]:
    """HTTP routes of the plugin's own (`starlette.routing.Route`), mounted under /plugins/PLUGIN/.

    When: once, after `engine_start`. The routes answer 404 while the plugin is off.
    Thread: engine; the endpoints themselves run on the event loop, and reach the engine by `engine.call`.
    Result: the routes; those of all plugins are taken.
    """
    raise NotImplementedError


# ---- per request -----------------------------------------------------------------------------------------------------


@hookspec
def request_arrived(request: Request) -> None:
    """A request has reached the engine and is not queued yet.

    When: once per request.
    May change: `request.priority` (lower goes first) and `request.tags`.
    Must not: change tokens or sampling.
    """


@hookspec(firstresult=True)
def admit(request: Request, state: StepState) -> Admit | Defer | Reject | None:
    """Decide whether the request at the head of the queue may take a slot.

    When: while a slot is free and a request waits, once per request and step.
    Result: first result of Admit, Defer or Reject(reason). Default: Admit.
    Must not: reorder other requests (`request.priority` in `request_arrived` does that).
    """


@hookspec(firstresult=True)
def select_slot(request: Request, slots: Seq[Slot]) -> Slot | None:
    """Choose the slot of an admitted request that does not name one itself.

    When: on admission; `slots` are all slots, busy ones included.
    Result: first result. Default: the idle slot with the longest common prefix if it is longer than
    `--slot-prompt-similarity` of the prompt, else the one unused for the longest time.
    Must not: return a busy slot (that quarantines the plugin).
    """


@hookspec(firstresult=True)
def find_prefix(request: Request, slot: Slot) -> PrefixHit | None:
    """Offer computed state for the beginning of the prompt, better than what the slot holds itself.

    When: after the slot is chosen, before its own prefix is used.
    Result: first result, a PrefixHit. It is taken if it has more tokens than the slot can reuse by itself, and the request
    waits until it is ready, at most 30 s. Where more of the slot than stays is still being copied (`slot.copying`), the
    request lets that end, at most 5 s, and is asked for again. Default: the common prefix of prompt and slot.
    Must not: claim more tokens than match.
    """


@hookspec
def slot_released(slot: Slot, sequence: Sequence, reason: FinishReason) -> None:
    """A sequence has left its slot; the slot still holds its tokens.

    When: once per sequence, before the slot is given to anybody else.
    May change: nothing of the slot but `slot.copying`: start saving its state by a Transfer, which the engine cuts before the
    slot's memory changes, whether the plugin is on by then or not. One that is there is the new one's `earlier`.
    Must not: keep the slot from its next user. The engine does, for at most 5 s: until the copy has what the next user would
    overwrite in its first batch, or all of it where all would be cut at once.
    """


@hookspec(firstresult=True)
def take_state(slot: Slot) -> KeptState | None:
    """Keep what cannot be cut back of a slot's memory (recurrent state, sliding window) as it is now.

    When: at each checkpoint of a prompt, between two batches.
    Result: first result, a KeptState. Default: the state is copied to main memory while everybody waits.
    Must not: wait for the copy.
    """


@hookspec
def slot_changing(slot: Slot, n_kept: int) -> None:
    """What the slot holds behind its first `n_kept` tokens is about to be overwritten or given up.

    When: before an idle slot's memory is cut, cleared, restored or moved; `n_kept` tokens stay as and where they are.
    Must not: wait longer than a millisecond. What is being copied of those cells (`slot.copying`) is cut afterwards.
    """


@hookspec(firstresult=True)
def is_stored(slot: Slot) -> bool | None:
    """Say whether `find_prefix` could give back all that an idle slot holds.

    When: before `arrange_slots` and `balance_groups`, for idle slots that hold something.
    Result: first result; True frees the slot's place for other sequences. Default: False, and the slot `stays` if its
    content is too large to be moved aside.
    Must not: take longer than a millisecond.
    """


@hookspec
def request_finished(request: Request, timings: Timings) -> None:
    """A request is over: after its last event, after a cancel and after an error alike.

    When: once per request that arrived.
    May change: the plugin's own statistics.
    """


# ---- per step --------------------------------------------------------------------------------------------------------


@hookspec(firstresult=True)
def batches_in_flight(state: StepState) -> int | None:
    """Say how many batches may be computed at the same time, each in a context of its own.

    When: once a step if `config.context` asked for several contexts at the start.
    Result: first result, 1 or more; there is at most one batch per context. Default: 1, so contexts take turns.
    """


@hookspec(firstresult=True)
def balance_groups(state: StepState) -> list[tuple[int, int]] | None:
    """Move busy sequences to idle places of other decode groups.

    When: in a step after a sequence began or ended or was moved, if there are several contexts. `state.groups` are the
    sequence ids of each group, `slot.home` is the id that a slot has in its group, `slot.group` the number of that.
    Result: first result, a list of (home of a busy slot, home of an idle slot of another group). The engine performs the
    moves when neither group has a batch in flight, beside the other groups; what the idle slot held goes the other way
    if it is small, else it is given up. Left out: a move whose slots are just moving, and one to a slot that `stays`; the
    hook is asked again later.
    Must not: name an id twice.
    """


@hookspec(firstresult=True)
def arrange_slots(state: StepState) -> list[tuple[int, int]] | None:
    """Move busy sequences to other sequence ids of the KV cache.

    When: in the step after the set of busy slots changed, with no batch in flight and before rows are chosen. With several
    decode groups, for each group by itself: `state.slots` are those that are there.
    Result: first result, a list of (busy seq_id, idle seq_id). The engine performs the moves in order: the sequence
    with its cells, recurrent state and checkpoints goes to the idle id; what the idle id held goes the other way if it
    is small enough to copy within a step, else it is given up (`is_stored` says that it is not lost). An answer that names
    a slot that `stays` as a destination is left out as a whole; the hook is asked again later. Slot numbers shown to
    clients stay. An empty list: no move now, and the hook is called again before the next step; None: not until the next
    change. Default: no move.
    Must not: name an id twice as a destination, or a destination that is busy when its turn comes.
    """


@hookspec(firstresult=True)
def order_prefills(state: StepState, waiting: list[Sequence]) -> list[Sequence] | None:
    """Choose which prompts are computed in this step, and in what order.

    When: once a step if any sequence has prompt tokens left; `waiting` are those, in the order of their sequence ids.
    Result: first result, a list made of members of `waiting`; the first one fills the budget first. Those left out
    wait. Default: all of them in the order given.
    Must not: add sequences, or return an empty list while nobody decodes (the step would do nothing).
    """


@hookspec(firstresult=True)
def prefill_budget(state: StepState) -> int | None:
    """Limit the prompt tokens of this step.

    When: once a step if any sequence has prompt tokens left; with several contexts, in each step of one that has.
    Result: first result, tokens over all prompts of the step; 0 means decode only, and where the decoders have other
    contexts that these prompts wait until the hook is asked again, after any batch ended. Default: what the decode rows
    leave of `n_batch`.
    Must not: exceed `state.n_batch` (it is clamped), or return 0 while nobody decodes (`state.n_decoding`).
    """


@hookspec(firstresult=True)
def spec_limit(state: StepState) -> int | None:
    """Limit the tokens drafted per sequence in this step.

    When: once a step if any sequence decodes.
    Result: first result, tokens per sequence; 0 means no drafts. Default: the width set at the start.
    """


@hookspec(firstresult=True)
def draft(sequence: Sequence, limit: int) -> list[int] | None:
    """Propose the next tokens of a sequence; the engine verifies them in the same batch as its sampled token.

    When: per decoding sequence and step while the limit is above 0.
    Result: first result, at most `limit` token ids. Default: none.
    Must not: change the sequence, or scan its whole history in each call (keep an index).
    """


@hookspec
def plan_step(state: StepState, plan: Plan) -> None:
    """Rearrange the rows chosen for this step.

    When: once a step that has rows, before anything is submitted.
    May change: `plan.split(batch, groups)`, `plan.move(row, batch)`, `plan.reorder(batch, key)`, `batch.switches`.
    Must not: add or drop rows, or change tokens or positions: `plan.check()` runs after each plugin, and a failure puts
    it in quarantine and restores the plan.
    """


@hookspec
def batch_submitted(batch: Batch) -> None:
    """A batch was handed to the library.

    When: once per batch.
    May change: the plugin's own bookkeeping.
    """


@hookspec
def batch_done(batch: Batch, elapsed_s: float) -> None:
    """The results of a batch are there; `elapsed_s` counts from its submission.

    When: once per batch that did not fail.
    May change: the plugin's own bookkeeping.
    Must not: touch logits.
    """


@hookspec
def draft_verified(sequence: Sequence, proposed: int, accepted: int) -> None:
    """Of `proposed` drafted tokens the model agreed with the first `accepted`.

    When: once per sequence and step that had a draft.
    May change: the plugin's own statistics.
    """


@hookspec
def step_done(state: StepState, outputs: Seq[Any]) -> None:
    """All tokens of the step are sampled and not sent yet; `outputs` has one entry per sequence that got tokens.

    When: once per step that sampled anything.
    May change: the plugin's own statistics.
    Must not: change tokens.
    """


@hookspec
def idle(state: StepState) -> bool | None:
    """Nothing to run: at most 1 ms of housekeeping.

    When: when no sequence runs, before the engine sleeps; again at once while any plugin returns True.
    Result: True to be called again, anything else to let the engine sleep.
    """


# ---- faults ----------------------------------------------------------------------------------------------------------


@hookspec(firstresult=True)
def batch_failed(batch: Batch, error: Exception) -> Retry | Fail | Shrink | None:
    """The library could not compute a batch.

    When: once per failed batch, before anything is retried.
    Result: first result of Retry(n_parts), Fail() or Shrink(n_tokens). Default: retry once in two halves, then fail the
    sequences of this batch only.
    """


@hookspec
def plugin_quarantined(name: str, reason: str) -> None:
    """Another plugin was switched off because of an error or a broken promise.

    When: after it is off, for every plugin that is on.
    May change: the plugin's own state, if it relied on the other one.
    """
