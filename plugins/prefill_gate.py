"""Keep prompts from stalling everybody else: few per batch, few long ones at once, small chunks beside decoders."""

from __future__ import annotations

from collections.abc import Iterable

from llamamg import Config, Guard, Options, Sequence, StepState, Unavailable, hookimpl, plugin


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
    """Prompts go in arrival order, so each one waits at most for those that came before it."""

    def __init__(
        self,
        max_partial: int = 1,
        long_threshold: int = 8192,
        max_long: int = 1,
        chunk: int = 256,
        max_with_decode: int = 1,
    ) -> None:
        self.max_partial = max_partial
        self.long_threshold = long_threshold
        self.max_long = max_long
        self.chunk = chunk
        self.max_with_decode = max_with_decode
        self.effect = 0

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
            help="prompt tokens per step while anybody decodes; 0 sets no limit",
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

    @hookimpl
    def configure(self, config: Config) -> None:
        """One slot has nothing to gate."""
        if config.context.n_parallel == 1:
            raise Unavailable("there is one slot, so no prompt meets another sequence (use --parallel 2 or more)")

    @hookimpl
    def order_prefills(self, state: StepState, waiting: list[Sequence]) -> list[Sequence] | None:
        """The prompts of this step in arrival order, at most `max_partial`, of which at most `max_long` long ones."""
        if len(waiting) == 1 and not state.decoding:
            return None
        n_most = min(self.max_partial, self.max_with_decode) if state.decoding else self.max_partial
        chosen: list[Sequence] = []
        n_long = 0
        for sequence in sorted(waiting, key=_arrival):
            is_long = sequence.n_prompt_left > self.long_threshold
            if is_long and n_long == self.max_long:
                continue  # a later short prompt may use the room this one cannot
            chosen.append(sequence)
            n_long += is_long
            if len(chosen) == n_most:
                break
        room = state.n_batch - len(state.decoding)
        budget = self.prefill_budget(state)
        if _shares(waiting, room) != _shares(chosen, room if budget is None else min(room, budget)):
            self.effect += 1
        return chosen

    @hookimpl
    def prefill_budget(self, state: StepState) -> int | None:
        """`chunk` tokens while anybody waits for its next token."""
        return self.chunk if self.chunk and state.decoding else None


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
