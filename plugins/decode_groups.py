"""Batches in flight together: slots are shared out over several contexts of the model, prompts have one more.

On a layer split one device works while the others wait. With a context and a thread for each group of sequences, one
group is at the second device while the next one is at the first; and a prompt, in a context of its own, stops nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from llamamg import (
    Batch,
    Config,
    Guard,
    Options,
    Request,
    SequenceState,
    Slot,
    StepState,
    Unavailable,
    has_patch,
    has_room,
    has_switch,
    hookimpl,
    n_stages,
    only_gpus,
    plugin,
    set_switch,
)

AUTO = "auto"
PREFILL_SMS = "prefill-sms"  # native switch, option and route
WAIT_ONCE = "wait-once"  # native switch: a group's host thread hands the next device its part while one computes
MAX_SMS = 1024  # more than any device has
_ONE_DEVICE = "one device holds all layers, so batches could not overlap (--decode-groups-groups 2 insists)"
N_PREFILL_AUTO = 2  # a long prompt and a short one that passes it
N_LEFT_MIN = 16  # a sequence that ends sooner than this is not worth a move


def number_or_auto(text: str) -> int | str:
    """A value of the options `groups` and `prefill-slots`."""
    value = text.strip().lower()
    if value != AUTO and int(value) < 0:
        raise ValueError(text)
    return value if value == AUTO else int(value)


number_or_auto.__name__ = "a whole number of at least 0, or auto"


@plugin(
    name="decode-groups",
    summary="decodes groups of sequences in contexts of their own, and prompts in another, all in flight together",
    helps="models split over several devices, two sessions or more; on one GPU too, answers that go on beside a prompt",
    hurts="memory: each context has compute buffers, the prompts' one a KV stream too; decoding in groups on one device",
    guard=Guard.same_tokens(),
    toggle="step",
    effect="overlapping batches",
)
class DecodeGroups:
    """Chooses slots so that groups stay of one size, and moves sequences when they are not."""

    def __init__(
        self,
        groups: int | str = AUTO,
        prefill_slots: int | str = AUTO,
        ubatch: int = 16,
        local_prompt: int = 32,
        pipeline: int = 1,
        prefill_sms: int = 0,
    ) -> None:
        self.groups, self.prefill_slots = groups, prefill_slots
        self.ubatch, self.local_prompt, self.pipeline = ubatch, local_prompt, pipeline
        self.prefill_sms = prefill_sms
        self.n_contexts = 1
        self.n_flights = 0  # asked for while the server runs; 0: all
        self.effect = 0
        self.similarity = 0.10  # as in seq-compact; `configure` sets it
        self._flying: set[int] = set()  # groups with a batch in flight

    @hookimpl
    def register_options(self, options: Options) -> None:
        """`groups` and `pipeline` have the variables of llama.cpp-multigpu."""
        options.add(
            "groups",
            type=number_or_auto,
            default=AUTO,
            help="decode groups, each a context of its own; auto: one for each device that holds layers, and one more "
            "where two devices or more have over two slots each; 0: none of this",
            env=("LLAMA_SERVER_GROUPS",),
        )
        options.add(
            "prefill-slots",
            type=number_or_auto,
            default=AUTO,
            help="prompts that the context for prompts has room for; 0: each group computes its own; auto: beside several groups, "
            "and on one CUDA device that holds all layers and has memory for it: 2 where memory has room for them, else 1",
        )
        options.add(
            "ubatch",
            type=int,
            default=16,
            minimum=1,
            help="ubatch of the groups' contexts where prompts have their own; raised to what one step of a group needs",
        )
        options.add(
            "local-prompt",
            type=int,
            default=32,
            minimum=0,
            help="a prompt with no more tokens than this left to compute stays in its group",
        )
        options.add(
            "pipeline",
            type=int,
            default=1,
            minimum=0,
            help="0 leaves the plugin off, like groups 0",
            env=("LLAMA_DECODE_PIPELINE",),
        )
        options.add(
            PREFILL_SMS,
            type=int,
            default=0,
            minimum=0,
            help="SMs of each CUDA device that the context for prompts may use, so that the others are free for answers; 0: all",
            aliases=("--prefill-sms",),
        )

    @hookimpl
    def configure(self, config: Config, devices: Seq[Any]) -> Config:
        """Changes `n_groups`, `n_prefill_slots`, `n_ubatch_decode` and `n_prompt_local` of the context."""
        context = config.context
        if self.groups == 0 or self.pipeline == 0:
            raise Unavailable("it was told so (groups or pipeline is 0)")
        if context.n_parallel == 1:
            raise Unavailable("there is one slot, so there is one group (use --parallel 2 or more)")
        if context.kv_unified or (context.kv_unified is None and context.n_parallel < 0):
            raise Unavailable("all slots share one KV cache, and a context cannot share it (use --parallel N)")
        if config.model.rpc and not has_patch("graph-check-and-send"):
            raise Unavailable(
                "with this native build contexts on one rpc-server get each other's results: run `llamamg build`"
            )
        n_groups = self._n_groups(config, devices)
        changed = replace(context, n_groups=n_groups, n_ubatch_decode=self.ubatch, n_prompt_local=self.local_prompt)
        n_prefill, why = self._n_prefill_slots(replace(config, context=changed), devices)
        if n_groups == 1 and n_prefill == 0:
            raise Unavailable(why)
        if self.prefill_sms and not n_prefill:
            raise Unavailable("prefill-sms bounds a context for prompts, and there is none (prefill-slots is 0)")
        self.n_contexts = n_groups + bool(n_prefill)
        self.similarity = config.generation.slot_prompt_similarity
        return replace(config, context=replace(changed, n_prefill_slots=n_prefill))

    def _n_prefill_slots(self, config: Config, devices: Seq[Any]) -> tuple[int, str]:
        """How many, and where none are wanted with one group why not."""
        context = config.context
        none = "one group is asked for, and no context for prompts" if self.groups == 1 else _ONE_DEVICE
        if not isinstance(self.prefill_slots, str):
            return min(self.prefill_slots, context.n_parallel), none
        holders = [device.backend for device in only_gpus(config, devices)]
        # On one device of another kind streams have no priority, and a prompt would hold up answers.
        if context.n_groups == 1 and (holders != ["CUDA"] or not has_switch("stream-priority")):
            return 0, none
        for n in range(min(N_PREFILL_AUTO, max(1, context.n_parallel)), 0, -1):
            if holders and has_room(replace(config, context=replace(context, n_prefill_slots=n)), devices):
                return n, ""
        if context.n_groups > 1:
            return 1, ""
        return 0, "the GPU has no room for a context for prompts (--decode-groups-prefill-slots 1 insists)"

    def _n_groups(self, config: Config, devices: Seq[Any]) -> int:
        n_parallel = config.context.n_parallel
        n = _n_auto(n_stages(config, devices), n_parallel) if isinstance(self.groups, str) else self.groups
        return max(1, min(n, n_parallel))

    @hookimpl
    def batches_in_flight(self) -> int:
        """One in every context, or as many as were asked for over HTTP."""
        return min(self.n_flights or self.n_contexts, self.n_contexts)

    @hookimpl
    def native_switches(self) -> Mapping[str, int]:
        """What an older library lacks is asked of it only where it was asked for."""
        switches = {WAIT_ONCE: 1} if has_switch(WAIT_ONCE) else {}
        return {**switches, PREFILL_SMS: self.prefill_sms} if self.prefill_sms else switches

    @hookimpl
    def register_routes(self) -> list[Any]:
        """`in-flight`: how many batches may be computed at once; `prefill-sms`: as the option. Both to read and to set."""
        from starlette.routing import Route

        methods = ["GET", "POST"]
        return [
            Route("/in-flight", self._in_flight, methods=methods),
            Route(f"/{PREFILL_SMS}", self._prefill_sms, methods=methods),
        ]

    async def _in_flight(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        if request.method == "POST":
            try:
                n = int((await request.json())["in_flight"])
            except (ValueError, TypeError, KeyError):
                n = 0
            if not 1 <= n <= self.n_contexts:
                sentence = f'send {{"in_flight": N}} with N from 1 to {self.n_contexts}, the number of contexts'
                return JSONResponse({"error": {"code": 400, "message": sentence}}, 400)
            self.n_flights = n
        return JSONResponse({"in_flight": self.batches_in_flight(), "contexts": self.n_contexts})

    async def _prefill_sms(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        if request.method == "POST":
            try:
                n_sms = int((await request.json())["prefill_sms"])
            except (ValueError, TypeError, KeyError):
                n_sms = -1
            sentence = ""
            if not 0 <= n_sms <= MAX_SMS:
                sentence = f'send {{"prefill_sms": N}} with N from 0 to {MAX_SMS}; 0: all SMs'
            elif not set_switch(PREFILL_SMS, n_sms):
                sentence = "this native build cannot do it: run `llamamg build`"
            if sentence:
                return JSONResponse({"error": {"code": 400, "message": sentence}}, 400)
            self.prefill_sms = n_sms
        return JSONResponse({"prefill_sms": self.prefill_sms})

    @hookimpl
    def batch_submitted(self, batch: Batch) -> None:
        """A batch beside others is what this is about."""
        self.effect += bool(self._flying - {batch.group})
        self._flying.add(batch.group)

    @hookimpl
    def batch_done(self, batch: Batch) -> None:
        """It is not in flight any more."""
        self._flying.discard(batch.group)

    @hookimpl
    def batch_failed(self, batch: Batch) -> None:
        """Neither is this one."""
        self._flying.discard(batch.group)

    @hookimpl
    def select_slot(self, request: Request, slots: Seq[Slot]) -> Slot | None:
        """For a request that no idle slot holds a useful prefix of: a slot of the group with the fewest busy ones."""
        idle = [slot for slot in slots if not slot.busy]
        if len({slot.group for slot in slots}) < 2 or not idle or self._has_prefix(request, idle):
            return None
        n_busy = _n_busy(slots)
        fewest = min(n_busy[slot.group] for slot in idle)
        busy = {(slot.group, slot.home) for slot in slots if slot.busy}
        candidates = [slot for slot in idle if n_busy[slot.group] == fewest]
        return min(candidates, key=lambda slot: (not _is_beside(slot, busy), slot.t_last_used, slot.home))

    def _has_prefix(self, request: Request, idle: Seq[Slot]) -> bool:
        if not request.cache_prompt:
            return False
        useful = self.similarity * len(request.prompt)
        return any(slot.tokens.common_prefix(request.prompt) > useful for slot in idle)

    @hookimpl
    def balance_groups(self, state: StepState) -> list[tuple[int, int]] | None:
        """While one group has two sequences more than another one, its shortest one goes there: ceil(busy / groups) at most."""
        slots: Seq[Slot] = state.slots
        n_busy = _n_busy(slots)
        most, fewest = max(n_busy, key=lambda g: n_busy[g]), min(n_busy, key=lambda g: n_busy[g])
        if n_busy[most] - n_busy[fewest] < 2:
            return None
        movable = [slot for slot in slots if slot.group == most and _may_move(slot)]
        places = [slot for slot in slots if slot.group == fewest and not slot.busy and not slot.stays]
        if not movable or not places:
            return None
        source = min(movable, key=lambda slot: len(slot.tokens))
        busy = {(slot.group, slot.home) for slot in slots if slot.busy}
        target = min(places, key=lambda slot: (len(slot.tokens), not _is_beside(slot, busy), slot.home))
        return [(source.home, target.home)]


def _n_auto(n_stages: int, n_slots: int) -> int:
    """A group for each stage, and one more with over two slots each: on two H200 a third filled the gaps of two."""
    return n_stages + (n_stages > 1 and n_slots > 2 * n_stages)


def _n_busy(slots: Seq[Slot]) -> dict[int, int]:
    n_busy = {slot.group: 0 for slot in slots}
    for slot in slots:
        n_busy[slot.group] += slot.busy
    return n_busy


def _is_beside(slot: Slot, busy: set[tuple[int, int]]) -> bool:
    """Whether a busy id of its group is next to it: only then one ubatch takes both."""
    return (slot.group, slot.home - 1) in busy or (slot.group, slot.home + 1) in busy


def _may_move(slot: Slot) -> bool:
    sequence = slot.sequence
    if sequence is None or slot.moving or slot.seq_id != slot.home:
        return False
    return sequence.state is SequenceState.DECODE and sequence.n_remaining >= N_LEFT_MIN
