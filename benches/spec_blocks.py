"""Blocks with the plugin spec on and off, on sessions that stay in their slots, and the ceiling that drafts could reach."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llamamg.engine import Engine
from llamamg.kvcache import Removal
from llamamg.replay import decode
from llamamg.request import Delta, Failed, Finished, Request, SamplingParams

from . import interrupt
from .errors import BenchError
from .session import Stream
from .spec_loads import Cell, prompt_of
from .spec_steps import Step, Steps
from .tokens import Others, best_others

PLUGIN = "spec"
N_PROBS = 4
N_CEILING = 4  # rounds over all widths


@dataclass(slots=True)
class Block:
    """Tokens per second of those who may draft (or of the only session), and of their neighbours; what was generated."""

    rate: float
    neighbour_rate: float
    tokens: list[list[int]] = field(default_factory=list)
    others: list[list[Others]] = field(default_factory=list)
    counts: dict[str, Any] = field(default_factory=dict)  # of the plugin, over this block
    steps: list[Step] = field(default_factory=list)  # while it was measured


class Sessions:
    """One cell on an engine that this thread steps."""

    def __init__(self, engine: Engine, cell: Cell, depth: int, n_tokens: int) -> None:
        self.engine, self.cell, self.n_tokens = engine, cell, n_tokens
        self._streams: dict[int, Stream] = {}
        self._steps: Steps | None = None
        self._prompts = [prompt_of(engine.vocab, cell, i, depth) for i in range(len(cell.texts))]
        needed = max(map(len, self._prompts)) + self._n_predict(0) + 8
        if needed > engine.n_ctx_slot:
            raise BenchError(
                f"{cell.name} needs {needed} tokens in each slot and a slot has {engine.n_ctx_slot}: "
                f"use -c {needed * engine.n_slots}"
            )
        engine.deliver = self._arrived

    def _n_predict(self, session: int) -> int:
        has_neighbours = self.cell.n_drafting < len(self.cell.texts)
        return self.n_tokens * (8 if has_neighbours and session < self.cell.n_drafting else 1)

    def block(self, on: bool, with_others: bool = False) -> Block:
        """Every session continues its prompt; measured while all of them generate."""
        engine, n_probs = self.engine, N_PROBS if with_others else 0
        engine.plugins.toggle(PLUGIN, on)
        before = report(engine)
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, n_probs=n_probs)
        requests = [
            Request(prompt, sampling, self._n_predict(i), id_slot=i, stream=True, return_tokens=True)
            for i, prompt in enumerate(self._prompts)
        ]
        streams = [Stream() for _ in requests]
        self._streams = dict(zip((request.id for request in requests), streams, strict=True))
        for request in requests:
            engine.submit(request)
        measured = streams[self.cell.n_drafting :] or streams
        self._until(lambda: all(stream.counts for stream in streams))
        begin = max(stream.stamps[0] for stream in streams)
        self._steps = steps = Steps(time.perf_counter(), engine.stats.n_draft, engine.stats.n_draft_accepted)
        self._until(lambda: any(stream.finished for stream in measured))
        self._steps = None
        end = next(stream.stamps[-1] for stream in measured if stream.finished)
        for request in requests:
            engine.cancel(request.id)
        self._until(lambda: not engine.scheduler.running)
        while engine.step():
            pass
        n_all = len(streams)
        rates = [stream.between(begin, end) / (end - begin) for stream in streams]
        neighbours = rates[self.cell.n_drafting :]
        return Block(
            sum(rates[: self.cell.n_drafting]) / min(n_all, self.cell.n_drafting),
            sum(neighbours) / len(neighbours) if neighbours else 0.0,
            [stream.tokens for stream in streams],
            [best_others(stream.probs) for stream in streams] if with_others else [],
            _since(before, report(engine)),
            steps.all,
        )

    def _until(self, done: Any) -> None:
        while not done():
            interrupt.check()
            if not self.engine.step() and not done():
                raise BenchError("the engine has nothing to do and the sessions have not ended")
            if self._steps is not None:
                self._steps.end(time.perf_counter(), self.engine.stats.n_draft, self.engine.stats.n_draft_accepted)

    def _arrived(self, pairs: Any) -> None:
        now = time.perf_counter()
        for id_, event in pairs:
            stream = self._streams.get(id_)
            if stream is None:
                continue
            if isinstance(event, Delta):
                stream.stamps.append(now)
                stream.counts.append(event.n_decoded)
                stream.tokens.extend(event.tokens)
                stream.probs.extend(event.probs)
            elif isinstance(event, Finished):
                if not stream.counts or event.n_decoded > stream.counts[-1]:
                    stream.stamps.append(now)
                    stream.counts.append(event.n_decoded)
                stream.tokens, stream.probs, stream.finished = list(event.tokens), list(event.probs), True
            elif isinstance(event, Failed):
                raise BenchError(f"the engine refused a request: {event.message}")


def report(engine: Engine) -> dict[str, Any]:
    """What the plugin tells of itself."""
    return next(view.report for view in engine.plugins.views() if view.name == PLUGIN)


COUNTED = ("drafts", "drafted", "accepted", "computed_again", "lookup_s", "verify_s")


def _since(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {name: after[name] - before[name] for name in COUNTED}
    for name in ("drafts_by_width", "no_draft"):
        counts = {key: n - before[name].get(key, 0) for key, n in after[name].items()}
        out[name] = {key: n for key, n in counts.items() if n}
    return out


def ceiling(engine: Engine, widths: list[int]) -> dict[str, Any]:
    """Time of a batch of 1 + w tokens over one of 1, behind what slot 0 holds; w + 1 over that is what drafts can reach."""
    slot, kv = engine.slots[0], engine.scheduler.kv
    context = engine.runner.context  # type: ignore[attr-defined]
    llama = engine.runner._llama  # type: ignore[attr-defined]
    pos0, token = len(slot.tokens), int(slot.tokens[-1])
    times: dict[int, list[float]] = {width: [] for width in (0, *widths)}
    for _ in range(N_CEILING):
        for width, taken in times.items():
            for again in range(3):  # the first of a shape builds its graph
                interrupt.check()
                if kv.removal is not Removal.PART and not kv.snapshot(slot.seq_id, pos0):
                    raise BenchError("the state of this model cannot be copied on its device")
                llama.llama_synchronize(context)
                began = time.perf_counter()
                decode(llama, context, [[slot.seq_id, pos0, width + 1, [token] * (width + 1)]])
                llama.llama_synchronize(context)
                if again:
                    taken.append(time.perf_counter() - began)
                plain = kv.removal is Removal.PART
                if not (kv.remove(slot.seq_id, pos0) if plain else kv.go_back(slot.seq_id, pos0)):
                    raise BenchError("the sequence did not go back")
    one_s = float(np.median(times[0]))
    ratios = {width: float(np.median(taken)) / one_s for width, taken in times.items() if width}
    return {
        "one_ms": 1e3 * one_s,
        "n_tokens": pos0,
        "ratio": {str(width): ratio for width, ratio in ratios.items()},
        "ceiling": {str(width): (width + 1) / ratio for width, ratio in ratios.items()},
    }
