"""Sessions that decode in an engine stepped by this thread, and prompts that arrive beside them under a chosen policy."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamamg import Batch, Guard, Sequence, StepState, hookimpl, plugin
from llamamg.engine import Engine
from llamamg.plugins.options import Options
from llamamg.request import Event, Failed, Finished, Request, SamplingParams
from llamamg_plugins.prefill_gate import PrefillGate

from . import interrupt
from .errors import BenchError

STUCK_S = 120.0


@dataclass(frozen=True, slots=True)
class Policy:
    """Options of prefill-gate, or none of it."""

    text: str
    options: dict[str, str] | None

    @classmethod
    def parse(cls, text: str) -> Policy:
        """`off`, or NAME=VALUE pairs with commas. Raises BenchError."""
        if text == "off":
            return cls(text, None)
        pairs = [part.partition("=") for part in text.split(",") if part]
        known = _declared()
        for name, equals, _ in pairs:
            if not equals or name not in known.declared:
                raise BenchError(f"--policy {text}: {name!r} is not one of {', '.join(known.declared)} (or use: off)")
        return cls(text, {name: value for name, _, value in pairs})

    def gate(self) -> PrefillGate | None:
        """A new instance with these options."""
        if self.options is None:
            return None
        declared = _declared().declared
        values = {name.replace("-", "_"): declared[name].parse(value) for name, value in self.options.items()}
        return PrefillGate(**values)


def _declared() -> Options:
    options = Options("prefill-gate")
    PrefillGate().register_options(options)
    return options


@plugin(name="bench-gate", summary="the policy under test", helps="-", hurts="-", guard=Guard.same_tokens())
class Switched:
    """Forwards to the gate of the moment, and stamps every step."""

    gate: PrefillGate | None = None
    stamps: list[tuple[float, int, int]] = []  # noqa: RUF012  (end, decode rows, prompt tokens): one bench a process

    @hookimpl
    def order_prefills(self, state: StepState, waiting: list[Sequence]) -> list[Sequence] | None:
        """The gate's, if there is one."""
        return self.gate.order_prefills(state, waiting) if self.gate else None

    @hookimpl
    def prefill_budget(self, state: StepState) -> int | None:
        """The gate's, if there is one."""
        return self.gate.prefill_budget(state) if self.gate else None

    @hookimpl
    def batch_done(self, batch: Batch, elapsed_s: float) -> None:
        """Stamp the step; the gate learns from it too."""
        n_prompt = sum(len(row) for row in batch.rows if row.is_prompt)
        self.stamps.append((time.perf_counter(), sum(not row.is_prompt for row in batch.rows), n_prompt))
        if self.gate:
            self.gate.batch_done(batch, elapsed_s)


class Stage:
    """Decoders in the first slots, prompts in the ones behind, a short prompt in the last."""

    def __init__(
        self, engine: Engine, n_decoders: int, depth: int, n_prompt: int, n_prompts: int, n_short: int
    ) -> None:
        self.engine, self.n_decoders, self.n_prompts, self.n_short = engine, n_decoders, n_prompts, n_short
        self.depth, self.n_prompt = depth, n_prompt
        self._rng = np.random.default_rng(7)
        self._finished: dict[int, float] = {}
        self._decoders: list[Request] = []
        engine.deliver = self._arrived
        engine.plugins.start(engine)

    def solo(self) -> float:
        """The prompt's rate while nobody decodes, tokens/s."""
        self._set(None)
        self._prefill(min(256, self.n_prompt))  # kernels are loaded
        begin = time.perf_counter()
        self._prefill(self.n_prompt)
        return self.n_prompt / (time.perf_counter() - begin)

    def begin_decoding(self) -> None:
        """Compute the sessions' prompts and let them decode from now on."""
        room = self.engine.n_ctx_slot - self.depth - 2
        self._decoders = [self._request(self.depth, room, slot) for slot in range(self.n_decoders)]
        for request in self._decoders:
            self.engine.submit(request)
        self._until(lambda: len(self.engine.scheduler.state.decoding) == self.n_decoders)

    def alone(self, n_steps: int) -> list[float]:
        """Milliseconds of steps without a prompt."""
        self._step(8)
        return self._gaps(lambda: self._step(n_steps))

    def steps_of(self, chunks: list[int], n_steps: int) -> list[dict[str, Any]]:
        """t(c): median over `n_steps` steps with c prompt tokens each, two more going before them untimed."""
        rows = []
        for chunk in chunks:
            if chunk * (n_steps + 4) >= self.n_prompt:
                continue
            self._set(Policy("", {"chunk": str(chunk), "itl-ratio": "0"}))
            request = self._request(self.n_prompt, 1, self.n_decoders)
            self.engine.submit(request)
            self._step(3)
            first = len(Switched.stamps) - 1
            self._step(n_steps)
            stamps = Switched.stamps[first:]
            # Where the engine takes a checkpoint a step is cut short.
            wanted = [n_rows == self.n_decoders and n == chunk for _, n_rows, n in stamps[1:]]
            if 2 * sum(wanted) < n_steps:
                sizes = sorted({(n_rows, n) for _, n_rows, n in stamps[1:]})
                raise BenchError(f"steps of {chunk} prompt tokens came out as {sizes}: use a larger -b")
            gaps = (1e3 * np.diff([t for t, _, _ in stamps]))[wanted]
            rows.append({"chunk": chunk, "t_ms": float(np.median(gaps)), "n_steps": len(gaps)})
            self._cancel([request])
        return rows

    def under(self, policy: Policy) -> dict[str, Any]:
        """Gaps of the decoders while the prompts are computed, their joint rate, and the short prompt's time to first token."""
        self._set(policy)
        self._step(24)  # the gate sees steps without a prompt
        prompts = [self._request(self.n_prompt, 1, self.n_decoders + i) for i in range(self.n_prompts)]
        short: Request | None = None
        t_short = 0.0
        begin, first = time.perf_counter(), len(Switched.stamps) - 1
        for request in prompts:
            self.engine.submit(request)
        while not all(request.id in self._finished for request in prompts):
            self._step(1)
            n_done = sum(n for _, _, n in Switched.stamps[first + 1 :])
            if self.n_short and short is None and 2 * n_done >= self.n_prompt:
                short = self._request(self.n_short, 1, self.n_decoders + self.n_prompts)
                t_short = time.perf_counter()
                self.engine.submit(short)
        end = max(self._finished[request.id] for request in prompts)
        stamps = [t for t, n_rows, _ in Switched.stamps[first:] if n_rows == self.n_decoders]
        if short is not None:
            waiting = short
            self._until(lambda: waiting.id in self._finished)
        n_tokens = self.n_prompt * self.n_prompts + (self.n_short if short else 0)
        row: dict[str, Any] = {
            "gaps_ms": (1e3 * np.diff(stamps)).tolist(),
            "prefill_tps": n_tokens / (end - begin),
            "wall_s": end - begin,
        }
        if short is not None:
            row["short_ttft_ms"] = 1e3 * (self._finished[short.id] - t_short)
        return row

    # -- inside

    def _set(self, policy: Policy | None) -> None:
        Switched.gate = gate = policy.gate() if policy else None
        if gate:
            gate.learn(self.engine.runner.n_ubatch)

    def _request(self, n_prompt: int, n_predict: int, slot: int) -> Request:
        n_vocab = self.engine.vocab.n_vocab
        prompt = self._rng.integers(min(1000, n_vocab // 2), min(5000, n_vocab), n_prompt, dtype=np.int32)
        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        return Request(prompt, sampling, n_predict=n_predict, id_slot=slot, cache_prompt=False)

    def _prefill(self, n: int) -> None:
        request = self._request(n, 1, self.n_decoders)
        self.engine.submit(request)
        self._until(lambda: request.id in self._finished)

    def _cancel(self, requests: list[Request]) -> None:
        for request in requests:
            self.engine.cancel(request.id)
        self._step(2)

    def _gaps(self, do: Any) -> list[float]:
        first = len(Switched.stamps) - 1
        do()
        return (1e3 * np.diff([t for t, _, _ in Switched.stamps[first:]])).tolist()

    def _step(self, n: int) -> None:
        goal = len(Switched.stamps) + n
        self._until(lambda: len(Switched.stamps) >= goal)

    def _until(self, done: Any) -> None:
        since = time.monotonic()
        while not done():
            interrupt.check()
            if self.engine.step():
                since = time.monotonic()
            elif time.monotonic() - since > STUCK_S:
                raise BenchError(f"nothing happened for {STUCK_S:.0f} s")

    def _arrived(self, pairs: list[tuple[int, Event]]) -> None:
        decoding = {request.id for request in self._decoders}
        for id_, event in pairs:
            if isinstance(event, Failed):
                raise BenchError(f"a request failed: {event.message}")
            if isinstance(event, Finished):
                if id_ in decoding:
                    raise BenchError("a session ran out of room before the prompts were computed: use a larger -c")
                self._finished[id_] = time.perf_counter()
