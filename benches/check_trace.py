"""Requests that make every shipped plugin act, run through an engine and recorded: what was computed, what was answered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llamamg.batch import Batch
from llamamg.engine import Engine
from llamamg.replay import Logits, Recording, record
from llamamg.request import Event, Failed, Finished, Request, SamplingParams, Tokens

from .errors import BenchError
from .loads import words

N_SESSIONS = 5
N_SLOTS = N_SESSIONS + 1
ENDS_EARLY = (1, 3)  # these sessions leave gaps between the busy slots
N_EARLY = 4
N_STEPS_MAX = 20_000


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens: what a long session generates, and each of the two prompts that arrive meanwhile."""

    n_tokens: int = 24
    n_prompt: int = 320

    @property
    def n_ctx_slot(self) -> int:
        """Context a slot needs."""
        return -(-(max(self.n_prompt, 128) + 3 * self.n_tokens + 80) // 256) * 256


@dataclass(slots=True)
class Row:
    """One row of a decode: whose it is, and where its logits begin among those of the decode."""

    request: int
    pos0: int
    tokens: list[int]
    n_logits: int


@dataclass(slots=True)
class Trace:
    """A recorded run. `rows[i]` and `logits[i]` belong to the i-th decode; logits are kept only where asked for."""

    recording: Recording
    prompts: dict[int, Tokens] = field(default_factory=dict)
    answers: dict[int, list[int]] = field(default_factory=dict)
    rows: list[list[Row]] = field(default_factory=list)
    logits: list[Logits] = field(default_factory=list)
    effects: dict[str, int] = field(default_factory=dict)

    def number(self, request: int) -> int:
        """Which request of the run it was, from 0."""
        return list(self.prompts).index(request)

    def text(self, request: int) -> list[int]:
        """Prompt and answer."""
        return [int(t) for t in self.prompts[request]] + self.answers[request]


def trace(engine: Engine, sizes: Sizes, keep_logits: bool, told: Callable[[int], None] = lambda n: None) -> Trace:
    """Run the load in an engine that was not started. `told` gets the number of tokens computed since the last call.

    Raises BenchError when a request fails or nothing moves any more.
    """
    out = Trace(Recording("", {}))

    def watch(batch: Batch, logits: Logits) -> None:
        out.rows.append(
            [Row(r.sequence.request.id, r.pos0, [int(t) for t in r.tokens], r.n_logits) for r in batch.rows]
        )
        if keep_logits:
            out.logits.append(logits)
        told(batch.n_tokens)

    out.recording = record(engine, watch)

    def arrived(pairs: list[tuple[int, Event]]) -> None:
        for id_, event in pairs:
            if isinstance(event, Failed):
                raise BenchError(f"the engine refused a request of the check: {event.message}")
            if isinstance(event, Finished):
                out.answers[id_] = list(event.tokens)

    engine.deliver = arrived
    engine.plugins.start(engine)
    _first_round(engine, sizes, out)
    _second_round(engine, sizes, out)
    lost = [view for view in engine.plugins.views() if view.quarantined is not None]
    if lost:
        raise BenchError(f"plugin {lost[0].name} was switched off by an error: {lost[0].quarantined}")
    out.effects = {view.name: view.effect for view in engine.plugins.views()}
    return out


def _first_round(engine: Engine, sizes: Sizes, out: Trace) -> None:
    """Five sessions, two of which end at once; then two prompts at the same time beside the three that go on."""
    random = np.random.default_rng(11)
    for i in range(N_SESSIONS):
        prompt = words(engine.vocab, random, (24, 40, 32, 56, 96)[i])
        if i == N_SESSIONS - 1:
            prompt = np.resize(prompt[:32], 96).astype(np.int32)  # a text that repeats itself: something to draft from
        _submit(engine, out, prompt, N_EARLY if i in ENDS_EARLY else 2 * sizes.n_tokens, i)
    _steps(engine, lambda: len(out.answers) >= len(ENDS_EARLY))
    for _ in range(2):
        _submit(engine, out, words(engine.vocab, random, sizes.n_prompt), sizes.n_tokens // 2)
    _steps(engine, lambda: False)


def _second_round(engine: Engine, sizes: Sizes, out: Trace) -> None:
    """Three sessions go on: what their slots hold is used again."""
    random = np.random.default_rng(12)
    for id_ in sorted(out.answers)[:N_SESSIONS:2]:
        more = words(engine.vocab, random, 16)
        _submit(engine, out, np.array([*out.text(id_), *more], np.int32), sizes.n_tokens // 2)
    _steps(engine, lambda: False)


def _submit(engine: Engine, out: Trace, prompt: Tokens, n_predict: int, id_slot: int = -1) -> None:
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, seed=1)
    request = Request(prompt, sampling, n_predict, id_slot=id_slot, return_tokens=True)
    out.prompts[request.id] = prompt
    engine.submit(request)


def _steps(engine: Engine, enough: Callable[[], bool]) -> None:
    """Step until `enough`, or until nothing is left to do."""
    for _ in range(N_STEPS_MAX):
        if enough():
            return
        if not engine.step():
            calls: Any = engine.calls
            if engine.queue_len() or engine.scheduler.running:
                raise BenchError("nothing happens any more: a plugin holds the requests back")
            if calls.hooks.idle:
                calls.each("idle", engine.scheduler.state)
            return
    raise BenchError(f"the requests are not done after {N_STEPS_MAX} steps")
