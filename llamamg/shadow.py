"""Idle shadow replay: one in N finished requests is computed again without plugins while nothing else runs.

It has a sequence of its own, so slots and the prompts they hold are never touched. One small batch is computed each time
the engine finds nothing to do, so a request that arrives waits for one of them at most.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from llamamg.config import Config
from llamamg.guard import Divergence, Guard, GuardKind, GuardViolation
from llamamg.kvcache import KVCache
from llamamg.model import is_unified
from llamamg.plugins import PluginSet
from llamamg.replay_alone import Alone, forbidden, other_cuts, still_there
from llamamg.request import FinishReason, Tokens
from llamamg.sampler import Sampler
from llamamg.sequence import Sequence
from llamamg.vocab import Vocabulary

log = logging.getLogger(__name__)
N_WAITING_MAX = 4
N_TRIES = 3  # how often a replay that gave its cells to a new request begins again
SLICE_S = 0.03  # a slice of a prompt is made to take about this long
N_SLICE_MIN = 16
N_FOR_SHARE = 5  # a promised share is judged once this many misses would be allowed
DONE = (FinishReason.EOS, FinishReason.LIMIT, FinishReason.WORD)


@dataclass(slots=True)
class Job:
    """A finished request. `acted` are the plugins that did something while it ran."""

    request: int
    prompt: Tokens
    given: Tokens
    never: Tokens
    acted: dict[str, dict[str, int]]  # plugin -> the native switches it had set
    n_tries: int = 0


@dataclass(slots=True)
class Run:
    """One pass over a job: all plugins off, cut as `cut` says, or with the switches of one plugin on (`plugin`)."""

    job: Job
    alone: Alone
    cut: int
    plugin: str | None = None
    found: list[Divergence] = field(default_factory=list)


@dataclass(slots=True)
class Inquiry:
    """What is left to ask about a job whose tokens differ: other cuts first, then each plugin with native switches."""

    left: list[Divergence]
    ties: int
    cuts: deque[int]
    plugins: deque[str]
    guilty: list[str] = field(default_factory=list)


class Computes(Protocol):
    """What is needed of the runner."""

    n_ubatch: int

    @property
    def context(self) -> Any: ...


class Shadow:
    """Chooses, replays and judges; all of it on the engine thread."""

    def __init__(
        self,
        config: Config,
        llama: Any,
        runner: Computes,
        kv: KVCache,
        vocab: Vocabulary,
        plugins: PluginSet,
        seq_id: int,
    ) -> None:
        self.every, self.seq_id = config.plugins.guard_replay, seq_id
        self.skipped: Counter[str] = Counter()  # reason -> requests that could not be replayed
        self.n_unexplained = 0  # differences that no plugin was near
        self._llama, self._runner, self._kv, self._vocab, self._plugins = llama, runner, kv, vocab, plugins
        self._shared_cells = is_unified(config.context)
        self._before: dict[int, dict[str, int]] = {}  # request -> effects when it began
        self._n_seen = 0
        self._waiting: deque[Job] = deque()
        self._run: Run | None = None
        self._inquiry: Inquiry | None = None
        self._slice = N_SLICE_MIN
        self._forbidden: dict[bool, Tokens] = {}

    # -- told by the scheduler

    def began(self, sequence: Sequence) -> None:
        """A request got a slot. Cells that it may need are given back."""
        self._before[sequence.request.id] = self._effects()
        if self._run is not None and self._shared_cells:
            self._begin_again()

    def released(self, sequence: Sequence, reason: FinishReason) -> None:
        """A request left its slot, which still holds its tokens."""
        before = self._before.pop(sequence.request.id, {})
        if reason not in DONE or sequence.n_decoded == 0:
            return
        why = self._unfit(sequence)
        if why is not None:
            self.skipped[why] += 1
            return
        self._n_seen += 1
        if self._n_seen % self.every:
            return
        if len(self._waiting) >= N_WAITING_MAX:
            self.skipped["too many wait"] += 1
            return
        text, n = sequence.slot.tokens.view(), sequence.n_prompt
        given = [*(int(t) for t in text[n:]), sequence.last_token]
        names = [name for name, effect in self._effects().items() if effect != before.get(name, 0)]
        acted = {name: self._plugins.switches_of(name) for name in names}
        never = self._never(sequence.request.sampling.ignore_eos)
        self._waiting.append(Job(sequence.request.id, sequence.request.prompt, np.array(given, np.int32), never, acted))

    def _unfit(self, sequence: Sequence) -> str | None:
        params = sequence.request.sampling
        if params.grammar or not Sampler.is_greedy(params, list(params.logit_bias)):
            return "sampled"  # another token would prove nothing
        if sequence.truncated or len(sequence.slot.tokens) + 1 != sequence.n_prompt + sequence.n_decoded:
            return "shifted"  # the beginning of its text is gone
        return None

    # -- called when the engine is idle

    def step(self) -> bool:
        """Compute one small batch; False when there is nothing to do."""
        if self._run is None:
            if not self._waiting:
                return False
            job = self._waiting.popleft()
            self._inquiry = None
            self._start(job, self._runner.n_ubatch)
        run = self._run
        assert run is not None
        began = time.perf_counter()
        n = min(self._slice, run.cut)
        try:
            self._compute(run, n)
        except RuntimeError:
            self._stop("no room")
            return True
        self._adapt(n, time.perf_counter() - began)
        if run.alone.n_left <= 0:
            self._kv.remove(self.seq_id, -1, -1)
            self._run = None
            self._conclude(run)
        return True

    def _compute(self, run: Run, n: int) -> None:
        on = self._plugins.native_switches()
        wanted = run.job.acted[run.plugin] if run.plugin else {}
        switched = on != wanted and self._plugins.apply_switches is not None
        try:
            if switched:
                self._plugins.apply_switches(wanted)  # type: ignore[misc]
            run.found += [d for d in run.alone.compare(n, run.job.request, run.job.never) if d is not None]
        finally:
            if switched:
                self._plugins.apply_switches(on)  # type: ignore[misc]

    def _adapt(self, n: int, elapsed_s: float) -> None:
        if n == self._slice and elapsed_s < SLICE_S / 2:
            self._slice = min(2 * self._slice, self._runner.n_ubatch)
        elif n == self._slice and elapsed_s > 2 * SLICE_S:
            self._slice = max(self._slice // 2, N_SLICE_MIN)

    def _start(self, job: Job, cut: int, plugin: str | None = None) -> None:
        self._kv.remove(self.seq_id, -1, -1)
        context, n_vocab = self._runner.context, self._vocab.n_vocab
        alone = Alone(self._llama, context, self._kv.local(self.seq_id), job.prompt, job.given, n_vocab)
        self._run = Run(job, alone, cut, plugin)

    def _begin_again(self) -> None:
        assert self._run is not None
        job = self._run.job
        job.n_tries += 1
        self._stop("interrupted" if job.n_tries >= N_TRIES else None)
        if job.n_tries < N_TRIES:
            self._waiting.appendleft(job)

    def _stop(self, reason: str | None) -> None:
        self._kv.remove(self.seq_id, -1, -1)
        self._run = self._inquiry = None
        if reason is not None:
            self.skipped[reason] += 1

    # -- judging

    def _conclude(self, run: Run) -> None:
        job, inquiry = run.job, self._inquiry
        if inquiry is None:
            left = [d for d in run.found if not d.tie]
            switching = deque(name for name, switches in job.acted.items() if switches)
            inquiry = Inquiry(left, len(run.found) - len(left), deque(other_cuts(len(job.prompt))), switching)
        elif run.plugin is None:
            left = still_there(inquiry.left, run.found)
            inquiry.ties += len(inquiry.left) - len(left)
            inquiry.left = left
        elif len(still_there(inquiry.left, run.found)) < len(inquiry.left):
            inquiry.guilty.append(run.plugin)  # with its switches on the model does give these tokens
        self._inquiry = inquiry
        if inquiry.left and inquiry.cuts:
            self._start(job, inquiry.cuts.popleft())
        elif inquiry.left and inquiry.plugins:
            self._start(job, self._runner.n_ubatch, inquiry.plugins.popleft())
        else:
            self._inquiry = None
            self._book(job, inquiry)

    def _book(self, job: Job, inquiry: Inquiry) -> None:
        """Count the replay for every plugin that acted; accuse those that explain what is left."""
        guards = self._plugins.guards()
        for name in job.acted:
            counts = self._plugins.guard_counts(name)
            counts.n_replays += 1
            counts.n_positions += len(job.given)
            counts.n_ties += inquiry.ties
        if not inquiry.left:
            return
        accused = inquiry.guilty or [name for name, switches in job.acted.items() if not switches]
        if not accused:
            self.n_unexplained += 1
            log.warning("request %d is answered differently when it is replayed, and no plugin had acted", job.request)
        for name in accused:
            self._accuse(name, guards[name], job, inquiry.left)

    def _accuse(self, name: str, guard: Guard, job: Job, left: list[Divergence]) -> None:
        counts = self._plugins.guard_counts(name)
        counts.n_missed += len(left)
        if guard.kind is GuardKind.CLOSE:
            allowed = (1.0 - (guard.top1 or 0.0)) * counts.n_positions
            if counts.n_missed <= max(allowed, N_FOR_SHARE):
                return
        counts.n_violations += 1
        d = left[0]
        others = len([other for other in job.acted if other != name])
        sentence = (
            f"it promises {guard}; token {d.position} of request {job.request} was {d.given} and a replay without plugins "
            f"chooses {d.best}" + (f" ({others} other plugins had acted, too)" if others else "")
        )
        self._plugins.quarantine(name, GuardViolation(sentence))

    # -- small

    def _effects(self) -> dict[str, int]:
        return {view.name: view.effect for view in self._plugins.views() if view.enabled}

    def _never(self, ignore_eos: bool) -> Tokens:
        if ignore_eos not in self._forbidden:
            self._forbidden[ignore_eos] = forbidden(self._vocab, ignore_eos)
        return self._forbidden[ignore_eos]
