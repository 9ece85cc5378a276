"""One number of groups in a process of its own, for groups.py: JSON orders on stdin, answers on stdout.

Sessions decode side by side; the rate counts from when all of them decode until each has generated its tokens.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from llamamg.engine import Engine
from llamamg.request import Delta, Failed, Finished, Request, SamplingParams

from .errors import BenchError
from .flags import config_of, opened

PLUGIN = "decode-groups"


class Sessions:
    """Requests that decode together in an engine that this thread steps."""

    def __init__(self, engine: Engine, depth: int) -> None:
        self._engine, self._depth = engine, depth
        self._stamps: dict[int, list[tuple[float, int]]] = {}
        self._ended: set[int] = set()
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

    def run(self, n_sessions: int, n_tokens: int) -> dict[str, Any]:
        """Generate `n_tokens` in each of `n_sessions` while all of them decode; tokens per second of all together."""
        engine = self._engine
        rng = np.random.default_rng(n_sessions)
        n_vocab = engine.vocab.n_vocab
        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        room = engine.n_ctx_slot - self._depth - 2  # the first one decodes while the others' prompts are computed
        requests = [
            Request(
                rng.integers(n_vocab // 8, n_vocab // 2, self._depth, dtype=np.int32),
                sampling,
                room,
                id_slot=-1,
                stream=True,
                cache_prompt=False,
            )
            for _ in range(n_sessions)
        ]
        stamps = [self._stamps.setdefault(request.id, []) for request in requests]
        for request in requests:
            engine.submit(request)
        self._until(lambda: all(stamps))
        begin, had = time.perf_counter(), [s[-1][1] for s in stamps]
        self._until(lambda: all(s[-1][1] >= n + n_tokens for s, n in zip(stamps, had, strict=True)))
        end = time.perf_counter()
        counts = [s[-1][1] - n for s, n in zip(stamps, had, strict=True)]
        for request in requests:
            engine.cancel(request.id)
        while engine.step():
            pass
        for request in requests:
            del self._stamps[request.id]
        return {"tps": sum(counts) / (end - begin), "counts": counts, "seconds": end - begin}

    def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            if self._ended:
                raise BenchError("a session ran out of room before all of them decoded: use a larger -c")
            if not self._engine.step():
                raise BenchError("nothing is left to do and not all sessions have their tokens")


def main() -> int:
    """Serve stdin."""
    order = json.loads(sys.argv[1])
    try:
        with opened(config_of(order["flags"])) as engine:
            sessions = Sessions(engine, order["depth"])
            devices = sorted({view.name for view in engine.plugins.views() if view.enabled})
            layout = engine.scheduler.state.groups
            _say({"plugins": devices, "groups": [len(ids) for ids in layout]})
            for line in sys.stdin:
                asked = json.loads(line)
                before = _effect(engine)
                answer = sessions.run(asked["n_sessions"], asked["n_tokens"])
                _say({**answer, "effect": _effect(engine) - before})
    except Exception as error:  # the parent says it
        _say({"error": str(error) or type(error).__name__})
        return 1
    return 0


def _effect(engine: Engine) -> int:
    return next(int(view.effect) for view in engine.plugins.views() if view.name == PLUGIN)


def _say(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
