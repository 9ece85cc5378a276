"""One set of devices in a process of its own, for groups.py: JSON orders on stdin, answers on stdout.

The model is loaded once; `open` makes contexts for one command line, `run` decodes with them, and the next `open` replaces
them. A prompt is computed once for each depth and its state copied to every slot, and each session goes on with tokens of
its own. The rate counts from when all sessions decode until each has generated its tokens.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from itertools import chain, zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamamg import library
from llamamg.devices import split
from llamamg.engine import Engine
from llamamg.model import load_model
from llamamg.modelfile import open_model
from llamamg.request import Delta, Failed, Finished, Request, SamplingParams
from llamamg.slot import Slot

from .errors import BenchError
from .flags import config_of, opened
from .json_side import asked, say, serve

PLUGIN = "decode-groups"
N_OWN = 8  # tokens that tell the sessions apart: few enough that no context for prompts is asked
N_WARM = 4  # tokens of each session that are not timed


class Sessions:
    """Requests that decode together in an engine that this thread steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._stamps: dict[int, list[tuple[float, int]]] = {}
        self._ended: set[int] = set()
        self._held: dict[int, tuple[NDArray[np.int32], Any]] = {}  # of each depth: a prompt and its state
        self._rng = np.random.default_rng(1)
        engine.deliver = self._arrived
        engine.plugins.start(engine)

    def _arrived(self, pairs: list[Any]) -> None:
        now = time.perf_counter()
        for id_, event in pairs:
            if isinstance(event, Delta):
                self._stamps[id_].append((now, event.n_decoded))
            elif isinstance(event, Finished):
                self._ended.add(id_)
            elif isinstance(event, Failed):
                raise BenchError(f"the engine refused a request: {event.message}")

    def run(self, depths: Sequence[int], n_tokens: int) -> dict[str, Any]:
        """Generate `n_tokens` in each of some sessions that hold so many tokens; tokens per second of all together."""
        engine = self._engine
        for depth in sorted(set(depths)):
            self._hold(depth)
        slots = dict(zip(spread(engine.slots), depths, strict=False))
        requests = []
        for slot, depth in slots.items():
            self._fill(slot, depth)
            prompt = np.concatenate([self._held[depth][0], self._tokens(N_OWN)])
            requests.append(self._request(prompt, slot, engine.n_ctx_slot - len(prompt) - 1))
        stamps = [self._stamps.setdefault(request.id, []) for request in requests]
        for request in requests:
            engine.submit(request)
        self._until(lambda: all(s and s[-1][1] >= N_WARM for s in stamps))
        cached = {view.id: view.n_prompt_cached for view in engine.slot_views()}
        if n := sum(cached[slot.id] < depth for slot, depth in slots.items()):
            raise BenchError(f"{n} of {len(depths)} prompts were computed again though their state was there")
        begin, had = time.perf_counter(), [s[-1][1] for s in stamps]
        self._until(lambda: all(s[-1][1] >= n + n_tokens for s, n in zip(stamps, had, strict=True)))
        end = time.perf_counter()
        counts = [s[-1][1] - n for s, n in zip(stamps, had, strict=True)]
        for request in requests:
            engine.cancel(request.id)
        self._rest()
        for request in requests:
            del self._stamps[request.id]
        return {"tps": sum(counts) / (end - begin), "counts": counts, "seconds": end - begin}

    def _hold(self, depth: int) -> None:
        """Compute a prompt of so many tokens and keep what the memory holds of it, when it is asked for first."""
        if depth in self._held:
            return
        engine, slot = self._engine, self._engine.slots[0]
        prompt = self._tokens(depth)
        engine.scheduler.clear(slot)
        request = self._request(prompt, slot, 1)
        self._stamps[request.id] = []
        engine.submit(request)
        self._until(lambda: request.id in self._ended)
        self._ended.discard(request.id)
        del self._stamps[request.id]
        self._rest()
        if len(slot.tokens) != depth:
            raise BenchError(f"a prompt of {depth} tokens left {len(slot.tokens)} in its slot")
        self._held[depth] = prompt, engine.kv.save(slot.seq_id, 0)

    def _fill(self, slot: Slot, depth: int) -> None:
        engine, (prompt, state) = self._engine, self._held[depth]
        engine.scheduler.clear(slot)
        if not engine.kv.restore(slot.seq_id, state, 0):
            raise BenchError("libllama refused a state that it had saved itself: there may be no memory left")
        slot.tokens.keep(0)
        slot.tokens.extend(prompt)

    def _tokens(self, n: int) -> NDArray[np.int32]:
        n_vocab = self._engine.vocab.n_vocab
        return self._rng.integers(n_vocab // 8, n_vocab // 2, n, dtype=np.int32)

    def _request(self, prompt: NDArray[np.int32], slot: Slot, n_predict: int) -> Request:
        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        return Request(prompt, sampling, n_predict, id_slot=slot.id, stream=True)

    def _rest(self) -> None:
        while self._engine.step():
            pass

    def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            if self._ended & self._stamps.keys() and not done():
                raise BenchError("a session ran out of room before all of them had their tokens: use a larger -c")
            if not self._engine.step() and not done():
                raise BenchError("nothing is left to do and not all sessions have their tokens")


def spread(slots: Sequence[Slot]) -> list[Slot]:
    """The first slot of every group, then the second of each: sessions are shared out evenly."""
    groups: dict[int, list[Slot]] = {}
    for slot in slots:
        groups.setdefault(slot.group, []).append(slot)
    return [slot for slot in chain.from_iterable(zip_longest(*groups.values())) if slot is not None]


class Side:
    """A loaded model, and contexts of it for one command line after the other."""

    def __init__(self, flags: Sequence[str]) -> None:
        self._lib, config = library.load(), config_of(flags)
        header = open_model(config.model.path)
        self.said: list[str] = []
        self._model = split.resolve(self._lib, config, header, self.said.append, pooled_keys=True).model
        self._handle = load_model(self._lib, self._model)
        self._opened = contextlib.ExitStack()
        self.sessions: Sessions | None = None
        self._engine: Engine | None = None

    def open(self, flags: Sequence[str]) -> dict[str, Any]:
        """Contexts as these flags say, in place of those there are; which plugins and groups there are."""
        self.close()
        self._engine = engine = self._opened.enter_context(opened(config_of(flags), handle=self._handle))
        self.sessions = Sessions(engine)
        plugins = sorted(view.name for view in engine.plugins.views() if view.enabled)
        return {"plugins": plugins, "groups": [len(ids) for ids in engine.scheduler.state.groups]}

    def run(self, depths: Sequence[int], n_tokens: int) -> dict[str, Any]:
        """As Sessions.run, with what decode-groups did."""
        assert self.sessions is not None
        before = self._effect()
        return {**self.sessions.run(depths, n_tokens), "effect": self._effect() - before}

    def close(self) -> None:
        """Give the contexts back; the model stays."""
        self.sessions = self._engine = None
        self._opened.close()

    def free(self) -> None:
        """Give everything back."""
        self.close()
        self._lib.llama.llama_model_free(self._handle)

    def _effect(self) -> int:
        assert self._engine is not None
        return next((int(view.effect) for view in self._engine.plugins.views() if view.name == PLUGIN), 0)


def main(order: dict[str, Any]) -> None:
    """Serve stdin."""
    side = Side(order["flags"])
    say({"said": side.said})
    for ask in asked():
        say(side.open(ask["flags"]) if ask["do"] == "open" else side.run(ask["depths"], ask["n_tokens"]))
    side.free()


if __name__ == "__main__":
    serve(main)
