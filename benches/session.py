"""Blocks of work on sessions that stay in their slots, in an engine that this thread steps itself.

A block sends every session's own prompt again: the slot still holds it, so the engine cuts what the last block generated
and continues (models with recurrent layers go back to a checkpoint near the prompt's end). Whatever a plugin moved is put
back first. So every block starts from the same state, and between two blocks no slot is busy.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from llamamg.engine import Engine
from llamamg.request import Delta, Event, Failed, Finished, Request, SamplingParams, Started, TokenProb

from . import interrupt
from .errors import BenchError
from .loads import Load, Sizes, arriving_prompt, resident_prompt
from .tokens import Others, best_others

N_PROBS = 4  # alternatives looked at where another run may go another way; the end of text may be among them
STUCK_S = 30.0
PAUSE_S = 0.4  # between two conversations of the load that returns


class RanOut(BenchError):
    """A session had generated all that it may before a block was over."""


@dataclass(slots=True)
class Stream:
    """What came of one request: when, and how many tokens there were then."""

    stamps: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    probs: list[TokenProb] = field(default_factory=list)
    n_cached: int = 0
    finished: bool = False

    def between(self, begin: float, end: float) -> int:
        """Tokens that came after `begin`, up to `end`."""
        had = [0, *self.counts]
        return sum(had[i + 1] - had[i] for i, t in enumerate(self.stamps) if begin < t <= end)

    def gaps(self, begin: float, end: float) -> list[float]:
        """Seconds between consecutive arrivals, for arrivals after `begin`, up to `end`."""
        pairs = zip(self.stamps, self.stamps[1:], strict=False)
        return [later - earlier for earlier, later in pairs if begin < later <= end]


@dataclass(slots=True)
class Window:
    """The timed part of a block, in seconds of the clock."""

    streams: list[Stream]
    begin: float
    end: float
    effects: dict[str, int]


@dataclass(slots=True)
class Block:
    """The measurements of one block. `tokens` has what each session generated, and the prompt's first token."""

    metrics: dict[str, float]
    tokens: list[list[int]]
    n_recomputed: int  # prompt tokens that were not in the slots any more
    effects: dict[str, int] = field(default_factory=dict)  # what each plugin counted while it was timed
    others: list[list[Others]] = field(default_factory=list)  # of a reference: what else the model could have said

    def json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class Session:
    """A load on an engine whose thread was not started."""

    def __init__(
        self, engine: Engine, load: Load, sizes: Sizes, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.engine, self.load, self.sizes = engine, load, sizes
        self._clock = clock
        self._streams: dict[int, Stream] = {}
        check_room(engine, load, sizes)
        vocab = engine.vocab
        self._prompts = [resident_prompt(vocab, load, sizes, i) for i in range(load.n_sessions)]
        self._arriving = arriving_prompt(vocab, sizes) if load.has_prompt else None

    # -- what is done

    def prepare(self) -> Block:
        """Compute the sessions' prompts once. The reference: a block with the other candidates of every token."""
        self.engine.deliver = self._arrived
        self.engine.plugins.start(self.engine)
        self._home()
        for slot in self.engine.slots:
            self.engine.scheduler.clear(slot)
        if self.load.returns:
            for i in range(self.load.n_sessions):
                self._do([self._request(i, 1)])
                self._leave()
        else:
            self._do([self._request(i, 1) for i in range(self.load.n_sessions)])
        if self.load.has_prompt:
            # Who cuts prompts by how long steps take tries single tokens first: that would round the reference otherwise.
            with contextlib.suppress(RanOut):  # those that it takes may be more than a session has
                self.block()
        return self.block(with_others=True)

    def block(self, with_others: bool = False) -> Block:
        """One block, from the sessions' prompts on."""
        self._home()
        self._tidy()
        n_probs = N_PROBS if with_others else 0
        if self.load.returns:
            window = self._return(n_probs)
        else:
            window = self._mixed(n_probs) if self.load.has_prompt else self._decode(n_probs)
        streams, begin, end = window.streams, window.begin, window.end
        sessions = streams[: 1 if self.load.returns else self.load.n_sessions]
        gaps_ms = 1e3 * np.array([gap for stream in sessions for gap in stream.gaps(begin, end)])
        n = sum(stream.between(begin, end) for stream in sessions)
        if n == 0 or len(gaps_ms) == 0 or end <= begin:
            raise BenchError(
                "a block was too short to time: use more --tokens"
                + (" or a longer --prompt" if self._arriving is not None else "")
            )
        metrics = {
            "decode_tps": n / (end - begin),
            "itl_p50_ms": float(np.percentile(gaps_ms, 50)),
            "itl_p99_ms": float(np.percentile(gaps_ms, 99)),
            "itl_max_ms": float(gaps_ms.max()),
            "wall_s": end - begin,
        }
        if self._arriving is not None:
            metrics["prefill_tps"] = len(self._arriving) / (end - begin)
        if self.load.returns:  # from the request to its first token, whatever of the prompt was computed
            metrics["prefill_tps"] = len(self._prompts[0]) / (sessions[0].stamps[0] - begin)
        lost = [len(p) - s.n_cached for p, s in zip(self._prompts, sessions, strict=False)]
        return Block(
            metrics,
            [stream.tokens for stream in streams],
            sum(lost),
            window.effects,
            others=[best_others(stream.probs, self.engine.vocab.is_eog) for stream in streams] if with_others else [],
        )

    def toggle(self, name: str, enabled: bool) -> None:
        """Switch a plugin; nothing is in flight between two blocks."""
        self.engine.plugins.toggle(name, enabled)

    def check(self, name: str) -> None:
        """Raises BenchError when the plugin was switched off by an error."""
        view = next(view for view in self.engine.plugins.views() if view.name == name)
        if view.quarantined is not None:
            raise BenchError(f"plugin {name} was switched off by an error: {view.quarantined}")

    # -- inside

    def _decode(self, n_probs: int) -> Window:
        sizes, early = self.sizes, self.load.ends_early
        requests = [self._request(i, sizes.n_predict(self.load), n_probs) for i in range(self.load.n_sessions)]
        streams = [self._submit(request) for request in requests]
        self._until(lambda: all(stream.counts for stream in streams))
        for i in early:
            self.engine.cancel(requests[i].id)
        effects, begin = self._effects(), self._clock()
        goals = [(s, s.counts[-1] + sizes.n_tokens) for i, s in enumerate(streams) if i not in early]
        self._until(lambda: all(stream.finished or stream.counts[-1] >= goal for stream, goal in goals))
        end = max(stream.stamps[-1] for stream, _ in goals)
        effects = self._since(effects)
        self._stop(requests)
        return Window(streams, begin, end, effects)

    def _mixed(self, n_probs: int) -> Window:
        assert self._arriving is not None
        requests = [self._request(i, self.sizes.n_predict(self.load), n_probs) for i in range(self.load.n_sessions)]
        streams = [self._submit(request) for request in requests]
        self._until(lambda: all(len(stream.stamps) >= 3 for stream in streams))
        prompt = Request(
            self._arriving, _greedy(n_probs), 1, cache_prompt=False, id_slot=self.load.n_sessions, stream=True,
            return_tokens=True,
        )  # fmt: skip
        effects, begin = self._effects(), self._clock()
        arriving = self._submit(prompt)
        self._until(lambda: arriving.finished)
        ran_out = any(stream.finished for stream in streams)
        effects = self._since(effects)
        self._stop(requests)
        if ran_out:
            raise RanOut("a session ran out of tokens before the prompt was computed: use a longer --prompt")
        return Window([*streams, arriving], begin, arriving.stamps[-1], effects)

    def _return(self, n_probs: int) -> Window:
        for other in range(1, self.load.n_sessions):
            self._do([self._request(other, 1)])
            self._leave()
        request = self._request(0, self.sizes.n_predict(self.load), n_probs)
        effects, begin = self._effects(), self._clock()
        stream = self._submit(request)
        self._until(lambda: stream.finished or (bool(stream.counts) and stream.counts[-1] >= self.sizes.n_tokens))
        end = stream.stamps[-1]
        effects = self._since(effects)
        self._stop([request])
        self._leave()
        return Window([stream], begin, end, effects)

    def _leave(self) -> None:
        """Nobody wants the slot for a moment: what plugins do meanwhile gets the time that it has between two messages."""
        time.sleep(PAUSE_S)
        self._tidy()

    def _stop(self, requests: list[Request]) -> None:
        for request in requests:
            self.engine.cancel(request.id)
        self._until(lambda: not self.engine.scheduler.running)
        while self.engine.step():  # a batch that was in flight
            pass
        for request in requests:
            self._streams.pop(request.id, None)

    def _effects(self) -> dict[str, int]:
        return {view.name: view.effect for view in self.engine.plugins.views()}

    def _since(self, before: dict[str, int]) -> dict[str, int]:
        return {name: effect - before.get(name, 0) for name, effect in self._effects().items()}

    def _request(self, session: int, n_predict: int, n_probs: int = 0) -> Request:
        slot = 0 if self.load.returns else session
        return Request(
            self._prompts[session], _greedy(n_probs), n_predict, id_slot=slot, stream=True, return_tokens=True
        )

    def _do(self, requests: list[Request]) -> list[Stream]:
        streams = [self._submit(request) for request in requests]
        self._until(lambda: all(stream.finished for stream in streams))
        return streams

    def _submit(self, request: Request) -> Stream:
        stream = self._streams[request.id] = Stream()
        self.engine.submit(request)
        return stream

    def _until(self, done: Callable[[], bool]) -> None:
        since = time.monotonic()
        while not done():
            interrupt.check()
            if self.engine.step():
                since = time.monotonic()
            elif time.monotonic() - since > STUCK_S:
                raise BenchError(f"nothing happened for {STUCK_S:.0f} s: a plugin holds the requests back")

    def _arrived(self, pairs: list[tuple[int, Event]]) -> None:
        now = self._clock()
        for id_, event in pairs:
            stream = self._streams.get(id_)
            if stream is None:
                continue
            if isinstance(event, Delta):
                stream.stamps.append(now)
                stream.counts.append(event.n_decoded)
                stream.tokens.extend(event.tokens)
                stream.probs.extend(event.probs)
            elif isinstance(event, Started):
                stream.n_cached = event.n_cached
            elif isinstance(event, Finished):
                if not stream.counts or event.n_decoded > stream.counts[-1]:  # the last token had no text of its own
                    stream.stamps.append(now)
                    stream.counts.append(event.n_decoded)
                stream.tokens, stream.probs, stream.finished = list(event.tokens), list(event.probs), True
                del self._streams[id_]
            elif isinstance(event, Failed):
                raise BenchError(f"the engine refused a request of the load: {event.message}")

    def _home(self) -> None:
        """Give every slot the sequence id it began with; contents go along."""
        scheduler, slots = self.engine.scheduler, self.engine.slots
        while scheduler.moves.wanted or self.engine.runner.n_in_flight:  # a prompt on its way back to its group
            self.engine.step()
        for slot in slots:
            if slot.seq_id != slot.id:
                scheduler.moves.exchange(slot, next(other for other in slots if other.seq_id == slot.id))

    def _tidy(self) -> None:
        """What the loop does when nothing runs."""
        calls = self.engine.calls
        for _ in range(100):
            if not calls.hooks.idle or not any(calls.each("idle", self.engine.scheduler.state)):
                return


def check_room(engine: Engine, load: Load, sizes: Sizes) -> None:
    """Raises BenchError when the engine's slots are too few or too small for a load."""
    needed = sizes.needed(load)
    if needed > engine.n_ctx_slot:
        raise BenchError(
            f"load {load.name} needs {needed} tokens in each slot and a slot has {engine.n_ctx_slot}: "
            f"use -c {needed * engine.n_slots}, or a smaller --depth, --tokens or --prompt"
        )
    if load.n_slots > engine.n_slots:
        raise BenchError(f"load {load.name} needs {load.n_slots} slots: use -np {load.n_slots} or more")


def _greedy(n_probs: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, ignore_eos=True, seed=1, n_probs=n_probs)
