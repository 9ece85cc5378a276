"""Sessions that decode in an engine stepped by this thread, and prompts that arrive beside them under a chosen policy.

Gaps are those of each session by itself, from the times at which its tokens were handed out: with several contexts a batch
of a prompt may end between two of its tokens, and says nothing about them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from llamamg import native_count
from llamamg.engine import Engine
from llamamg.request import Delta, Event, Failed, Finished, Request, SamplingParams

from . import interrupt
from .errors import BenchError
from .gate_outliers import Watch, largest, outliers
from .gate_policy import Policy, Stamp, Switched, bound_prompts

STUCK_S = 120.0
N_SETTLE = 24  # steps without a prompt before each policy
N_BATCHES = 4  # of a prompt, at least, for a rate


class Stage:
    """Decoders in the first slots, prompts in the ones behind, a short prompt in the last."""

    def __init__(self, engine: Engine, n_prompt: int, n_short: int) -> None:
        self.engine, self.n_prompt, self.n_short = engine, n_prompt, n_short
        self.n_decoders = 0
        self.solo_curve: list[tuple[int, float]] = []  # prompt tokens done, seconds since it was sent
        self._rng = np.random.default_rng(7)
        self._finished: dict[int, float] = {}
        self._tokens: dict[int, list[float]] = {}  # times of the tokens of each session
        self._decoders: list[Request] = []
        self.watch = Watch(engine)
        engine.deliver = self._arrived
        engine.plugins.start(engine)

    # -- nobody decodes

    def solo(self, n_tokens: int = 0) -> float:
        """The rate of a prompt while nobody decodes, tokens/s; of its first `n_tokens`, if given."""
        self.use(None)
        n_tokens = min(n_tokens or self.n_prompt, self.n_prompt)
        self.prefill(min(256, n_tokens))  # kernels are loaded
        begin, first = time.perf_counter(), len(Switched.stamps)
        seconds = self.prefill(n_tokens)
        done = 0
        for stamp in Switched.stamps[first:]:
            done += stamp.n_prompt
            self.solo_curve.append((done, stamp.at - begin))
        return n_tokens / seconds

    def solo_rate(self, n_tokens: int) -> float:
        """The rate of a prompt's first `n_tokens` alone: what a part of a prompt is compared with."""
        known = [(n, s) for n, s in self.solo_curve if n <= max(n_tokens, self.solo_curve[-1][0] // 4)]
        n, seconds = known[-1] if known else self.solo_curve[-1]
        return n / seconds

    def prefill(self, n: int) -> float:
        """Compute a prompt of so many tokens; seconds until its first token."""
        request = self._request(n, 1, self.n_decoders)
        begin = time.perf_counter()
        self.engine.submit(request)
        self._until(lambda: request.id in self._finished)
        return self._finished[request.id] - begin

    # -- sessions

    def decode(self, n_decoders: int, depth: int) -> None:
        """Let so many sessions decode from now on, each after a prompt of `depth` tokens."""
        self.use(None)
        room = self.engine.n_ctx_slot - depth - 2
        new = [self._request(depth, room, slot, stream=True) for slot in range(len(self._decoders), n_decoders)]
        self._decoders += new
        self.n_decoders = n_decoders
        for request in new:
            self._tokens[request.id] = []
            self.engine.submit(request)
        self._until(lambda: all(len(self._tokens[request.id]) > 1 for request in new))

    def alone(self, n_steps: int) -> list[float]:
        """Gaps without a prompt, milliseconds."""
        self._tick(8)
        marks = self._marks()
        self._tick(n_steps)
        return self._gaps(marks, time.perf_counter())

    def steps_of(self, chunks: list[int], n_steps: int) -> list[dict[str, Any]]:
        """t(c): gaps while every batch has c prompt tokens, two of them going before the `n_steps` that are timed."""
        rows = []
        for chunk in chunks:
            if chunk * (n_steps + 4) >= self.n_prompt:
                continue
            self.use(Policy("", {"chunk": str(chunk), "itl-ratio": "0"}))
            request = self._request(self.n_prompt, 1, self.n_decoders)
            self.engine.submit(request)
            sent = len(Switched.stamps)
            self._until(lambda sent=sent: any(stamp.n_prompt for stamp in Switched.stamps[sent:]))
            self._tick(3)
            first, marks = len(Switched.stamps), self._marks()
            self._tick(n_steps)
            # Batches of a context of their own may be longer than many steps.
            self._until(
                lambda first=first, id_=request.id: (
                    id_ in self._finished or sum(stamp.n_prompt > 0 for stamp in Switched.stamps[first:]) >= N_BATCHES
                )
            )
            if request.id in self._finished:
                raise BenchError(
                    f"a prompt ended while batches of {chunk} of its tokens were timed: use a longer --prompt"
                )
            end = time.perf_counter()
            stamps = [stamp for stamp in Switched.stamps[first:] if stamp.n_prompt]
            # Where the engine takes a checkpoint a batch is cut short.
            if 2 * sum(stamp.n_prompt == chunk for stamp in stamps) < len(stamps):
                sizes = sorted({(stamp.n_rows, stamp.n_prompt) for stamp in stamps})
                raise BenchError(f"steps of {chunk} prompt tokens came out as {sizes}: use a larger -b")
            gaps = self._gaps(marks, end)
            done = sum(stamp.n_prompt for stamp in stamps[1:])
            tps = done / max(stamps[-1].at - stamps[0].at, 1e-9)
            p50, p99 = (float(v) for v in np.percentile(gaps, (50, 99)))
            rows.append({"chunk": chunk, "t_ms": p50, "p99_ms": p99, "tps": tps, "n_gaps": len(gaps)})
            self._cancel([request])
        return rows

    def under(
        self, policy: Policy, n_prompts: int, *, n_gaps: int = 0, seconds: float = 0.0, solo_tps: float = 0.0
    ) -> dict[str, Any]:
        """Gaps of the sessions while prompts are computed, the prompts' joint rate, and the short prompt's time to first token.

        It ends with the prompts; with `n_gaps`, when each session has so many (prompts that end are followed by others);
        with `seconds`, after so long in any case.
        """
        self.use(policy, solo_tps)
        self._tick(N_SETTLE)  # the gate sees steps without a prompt
        prompts: list[Request] = []
        short: Request | None = None
        t_short = 0.0
        n_limited = native_count("limited")
        begin, first, marks = time.perf_counter(), len(Switched.stamps), self._marks()
        n_begun, since = 0, begin
        while True:
            if n_begun < n_prompts or n_gaps:
                idle = [i for i in range(n_prompts) if len(prompts) <= i or prompts[i].id in self._finished]
                for i in idle:
                    prompts[i : i + 1] = [self._request(self.n_prompt, 1, self.n_decoders + i)]
                    self.engine.submit(prompts[i])
                    n_begun += 1
            since = self._step(since)
            now = time.perf_counter()
            n_had = min(len(self._tokens[id_]) - mark for id_, mark in marks.items())
            part = [now - begin >= 0.5 * seconds] if seconds else []
            part += [2 * n_had >= n_gaps] if n_gaps else []
            if not part:
                part = [2 * sum(stamp.n_prompt for stamp in Switched.stamps[first:]) >= self.n_prompt]
            if self.n_short and short is None and any(part):
                short = self._request(self.n_short, 1, self.n_decoders + n_prompts)
                t_short = now
                self.engine.submit(short)
            is_served = short is None or short.id in self._finished
            if seconds and now - begin >= seconds and (is_served or now - begin >= 2 * seconds):
                break
            if n_gaps and n_had >= n_gaps and is_served:
                break
            if not n_gaps and is_served and all(request.id in self._finished for request in prompts):
                break
        stamps = Switched.stamps[first:]
        end = max((stamp.at for stamp in stamps if stamp.n_prompt), default=begin)
        n_tokens = sum(stamp.n_prompt for stamp in stamps)
        n_had = min(len(self._tokens[id_]) - mark for id_, mark in marks.items())
        gaps = self._gaps(marks, end)
        before = [stamp.n_prompt for stamp in Switched.stamps[:first] if stamp.n_prompt][-1:]
        pairs = self._pairs(marks, end)
        self._cancel([request for request in prompts if request.id not in self._finished])
        row: dict[str, Any] = {
            "gaps_ms": gaps,
            "n_gaps_least": n_had,
            "worst": largest(pairs, begin, stamps),
            "outliers": outliers(pairs, begin, stamps, self.watch.seen, before),
            "chunks": _sizes(stamps),
            "n_tokens": n_tokens,
            "n_prompts_begun": n_begun,
            "prefill_tps": n_tokens / max(end - begin, 1e-9),
            "wall_s": end - begin,
        }
        if policy.n_sms:
            row["prefill_sms"], row["n_limited"] = policy.n_sms, native_count("limited") - n_limited
        if short is not None:
            waiting = short
            self._until(lambda: waiting.id in self._finished)
            row["short_ttft_ms"] = 1e3 * (self._finished[short.id] - t_short)
        return row

    # -- inside

    def use(self, policy: Policy | None, solo_tps: float = 0.0) -> None:
        """Let a policy decide from now on. A gate in a server has seen prompts before, so it is told their rate."""
        Switched.gate = gate = policy.gate() if policy else None
        bound_prompts(policy.n_sms if policy else 0)
        if gate:
            gate.learn(self.engine.runner.n_ubatch, solo_tps, self.solo_curve[-1][0] / 2 if self.solo_curve else 0.0)

    def _request(self, n_prompt: int, n_predict: int, slot: int, *, stream: bool = False) -> Request:
        n_vocab = self.engine.vocab.n_vocab
        prompt = self._rng.integers(min(1000, n_vocab // 2), min(5000, n_vocab), n_prompt, dtype=np.int32)
        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        return Request(prompt, sampling, n_predict=n_predict, id_slot=slot, cache_prompt=False, stream=stream)

    def _cancel(self, requests: list[Request]) -> None:
        for request in requests:
            self.engine.cancel(request.id)
        self._tick(2)

    def _marks(self) -> dict[int, int]:
        """How many tokens each session has had; its gaps from here on begin with the last of them."""
        return {request.id: len(self._tokens[request.id]) for request in self._decoders}

    def _pairs(self, marks: dict[int, int], end: float) -> list[tuple[float, float]]:
        """Begin and end of each session's gaps since `marks`; one belongs here if any of it lies before `end`."""
        times = [self._tokens[id_][max(0, mark - 1) :] for id_, mark in marks.items()]
        return [(a, b) for t in times for a, b in itertools.pairwise(t) if a < end]

    def _gaps(self, marks: dict[int, int], end: float) -> list[float]:
        return [1e3 * (b - a) for a, b in self._pairs(marks, end)]

    def _tick(self, n: int) -> None:
        """Until each session has had so many more tokens; until so many batches are through where there are none."""
        if not self._decoders:
            return
        goals = {request.id: len(self._tokens[request.id]) + n for request in self._decoders}
        self._until(lambda: all(len(self._tokens[id_]) >= goal for id_, goal in goals.items()))

    def _until(self, done: Callable[[], bool]) -> None:
        since = time.perf_counter()
        while not done():
            since = self._step(since)

    def _step(self, since: float) -> float:
        """A step of the engine; when something last happened."""
        interrupt.check()
        is_done = self.engine.step()
        self.watch.look(time.perf_counter())
        if is_done:
            return time.perf_counter()
        if time.perf_counter() - since > STUCK_S:
            raise BenchError(f"nothing happened for {STUCK_S:.0f} s")
        return since

    def _arrived(self, pairs: list[tuple[int, Event]]) -> None:
        now = time.perf_counter()
        for id_, event in pairs:
            if isinstance(event, Failed):
                raise BenchError(f"a request failed: {event.message}")
            if isinstance(event, Delta) and id_ in self._tokens:
                self._tokens[id_].append(now)
            if isinstance(event, Finished):
                if id_ in self._tokens:
                    raise BenchError("a session ran out of room before the prompts were computed: use a larger -c")
                self._finished[id_] = now


def _sizes(stamps: list[Stamp]) -> dict[str, int]:
    """How many batches had so many prompt tokens."""
    sizes, counts = np.unique([stamp.n_prompt for stamp in stamps if stamp.n_prompt], return_counts=True)
    return {str(size): int(count) for size, count in zip(sizes, counts, strict=True)}
