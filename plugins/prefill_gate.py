"""Keep prompts from stalling everybody else: few per batch, few long ones at once, small chunks beside decoders."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llamamg import Batch, Config, Guard, Options, Sequence, StepState, Unavailable, hookimpl, plugin
from llamamg_plugins.chunk_choice import Limits
from llamamg_plugins.prefill_budgets import Budgets


@plugin(
    name="prefill-gate",
    summary="limits how many prompts, and how much of them, one step computes",
    helps="streams that go on while prompts arrive; several long prompts at once",
    hurts="time to first token of a long prompt beside decoders; bursts of very short prompts",
    guard=Guard.same_tokens(),
    toggle="step",
    effect="steps limited",
)
class PrefillGate:
    """Prompts go in arrival order; a short one may pass longer ones, in every second step, so each one's wait is bounded."""

    def __init__(
        self,
        max_partial: int = 1,
        long_threshold: int = 8192,
        max_long: int = 1,
        chunk: int = 256,
        max_with_decode: int = 1,
        itl_target_ms: float = 0.0,
        itl_ratio: float = 2.0,
        min_share: float = 0.2,
        pass_threshold: int = 512,
        pass_ratio: int = 4,
    ) -> None:
        self.max_partial = max_partial
        self.long_threshold = long_threshold
        self.max_long = max_long
        self.chunk = chunk
        self.max_with_decode = max_with_decode
        self.pass_threshold, self.pass_ratio = pass_threshold, pass_ratio
        self.limits: Limits | None = None
        if itl_target_ms > 0 or itl_ratio > 0:
            self.limits = Limits(itl_target_ms / 1e3, 0.0 if itl_target_ms else itl_ratio, min_share)
        self.effect = 0
        self._passed = False  # a short prompt went first in the last step in which it had to pass one
        self._budgets: Budgets | None = None

    @hookimpl
    def register_options(self, options: Options) -> None:
        """Names and defaults of the three flags and two variables are those of llama.cpp-multigpu."""
        options.add(
            "max-partial",
            type=int,
            default=1,
            minimum=1,
            help="how many prompts one batch may hold parts of; the others wait",
            aliases=("--prefill-max-partial",),
            env=("LLAMA_ARG_PREFILL_MAX_PARTIAL",),
        )
        options.add(
            "long-threshold",
            type=int,
            default=8192,
            minimum=0,
            help="a prompt with more tokens than this left to compute is long",
            aliases=("--prefill-long-threshold",),
            env=("LLAMA_ARG_PREFILL_LONG_THRESHOLD",),
        )
        options.add(
            "max-long",
            type=int,
            default=1,
            minimum=1,
            help="how many long prompts are computed at once; the others wait in arrival order",
            aliases=("--prefill-max-long",),
            env=("LLAMA_ARG_PREFILL_MAX_LONG",),
        )
        options.add(
            "chunk",
            type=int,
            default=256,
            minimum=0,
            help="most prompt tokens per step while anybody decodes; 0 sets no limit, and an itl-target-ms replaces it",
            env=("LLAMA_SERVER_PREFILL_CHUNK",),
        )
        options.add(
            "max-with-decode",
            type=int,
            default=1,
            minimum=1,
            help="like max-partial, while anybody decodes; the smaller one counts",
            env=("LLAMA_SERVER_PREFILL_MAX_WITH_DECODE",),
        )
        options.add(
            "itl-target-ms",
            type=float,
            default=0.0,
            minimum=0,
            help="how long a step with prompt tokens may take beside decoders, learned from the steps before; 0: no target",
            aliases=("--itl-target-ms",),
        )
        options.add(
            "itl-ratio",
            type=float,
            default=2.0,
            minimum=0,
            help="the same as a multiple of a step without prompt tokens; 0: no such limit",
            aliases=("--itl-ratio",),
        )
        options.add(
            "min-share",
            type=float,
            default=0.2,
            minimum=0,
            help="part of its solo rate that a prompt keeps beside decoders, even where that breaks the target",
            aliases=("--prefill-min-share",),
        )
        options.add(
            "pass-threshold",
            type=int,
            default=512,
            minimum=0,
            help="a prompt with at most this many tokens left may pass longer ones, in every second step",
            aliases=("--prefill-pass-threshold",),
        )
        options.add(
            "pass-ratio",
            type=int,
            default=4,
            minimum=0,
            help="a prompt may pass one with this many times as many tokens left, in every second step; 0: only short ones pass",
            aliases=("--prefill-pass-ratio",),
        )

    @hookimpl
    def configure(self, config: Config) -> None:
        """One slot has nothing to gate."""
        if config.context.n_parallel == 1:
            raise Unavailable("there is one slot, so no prompt meets another sequence (use --parallel 2 or more)")
        self.learn(config.context.n_ubatch)

    @hookimpl
    def order_prefills(self, state: StepState, waiting: list[Sequence]) -> list[Sequence] | None:
        """The prompts of this step in arrival order, at most `max_partial`, of which at most `max_long` long ones."""
        if len(waiting) == 1 and not state.decoding:
            return None
        budget = self.prefill_budget(state)
        arrived = sorted(waiting, key=_arrival)
        n_most = min(self.max_partial, self.max_with_decode) if state.decoding else self.max_partial
        chosen: list[Sequence] = []
        n_long = 0
        for sequence in (
            arrived if budget == 0 else self._in_turn(arrived)
        ):  # a step without prompt tokens is nobody's turn
            is_long = sequence.n_prompt_left > self.long_threshold
            if is_long and n_long == self.max_long:
                continue  # a later short prompt may use the room this one cannot
            chosen.append(sequence)
            n_long += is_long
            if len(chosen) == n_most:
                break
        room = state.n_batch - len(state.decoding)
        if _shares(waiting, room) != _shares(chosen, room if budget is None else min(room, budget)):
            self.effect += 1
        return chosen

    @hookimpl
    def prefill_budget(self, state: StepState) -> int | None:
        """While anybody waits for its next token: what fits into the latency target, at most `chunk`."""
        if self._budgets is None:
            self.learn(state.n_ubatch)
        assert self._budgets is not None
        return self._budgets.budget(state)

    @hookimpl
    def batch_submitted(self, batch: Batch) -> None:
        """Remember what is computed together."""
        if self._budgets is not None:
            self._budgets.submitted(batch)

    @hookimpl
    def batch_done(self, batch: Batch, elapsed_s: float) -> None:
        """Learn what steps take."""
        if self._budgets is not None:
            self._budgets.done(batch, elapsed_s)

    @hookimpl
    def batch_failed(self, batch: Batch) -> None:
        """Nothing is to be learned from it."""
        if self._budgets is not None:
            self._budgets.ended(batch)

    @property
    def report(self) -> dict[str, Any]:
        """What it decided last, and whether the share or the latency did."""
        return self._budgets.report if self._budgets is not None else {}

    def learn(self, n_ubatch: int, solo_tps: float = 0.0, solo_depth: float = 0.0) -> None:
        """Look at what steps take from now on. `solo_tps`: a prompt's rate by itself, at a mean position of `solo_depth`."""
        self._budgets = Budgets(n_ubatch, self.limits, self.chunk)
        self._budgets.solo.tps, self._budgets.solo.depth = solo_tps, solo_depth

    def _in_turn(self, arrived: list[Sequence]) -> list[Sequence]:
        """Arrival order; in every second step that has both, short prompts before the longer ones that came earlier."""
        short = [sequence for sequence in arrived if self._may_pass(sequence, arrived[0])]
        if not short or arrived[: len(short)] == short:
            return arrived
        self._passed = not self._passed
        if not self._passed:
            return arrived
        return short + [sequence for sequence in arrived if not self._may_pass(sequence, arrived[0])]

    def _may_pass(self, sequence: Sequence, first: Sequence) -> bool:
        """Whether it is short, or much shorter than the one whose turn it is and no less urgent."""
        if sequence.n_prompt_left <= self.pass_threshold:
            return True
        if sequence is first or not self.pass_ratio:
            return False
        is_shorter = self.pass_ratio * sequence.n_prompt_left <= first.n_prompt_left
        return is_shorter and sequence.request.priority <= first.request.priority


def _arrival(sequence: Sequence) -> tuple[int, float, int]:
    request = sequence.request
    return (request.priority, request.arrival, request.id)


def _shares(sequences: Iterable[Sequence], room: int) -> dict[int, int]:
    """How many tokens each request gets when the sequences fill `room` one after the other."""
    shares = {}
    for sequence in sequences:
        n = min(sequence.n_prompt_left, room)
        if n > 0:
            shares[sequence.request.id] = n
            room -= n
    return shares
