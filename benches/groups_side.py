"""One number of groups in a process of its own, for groups.py: JSON orders on stdin, answers on stdout.

Sessions decode side by side; the rate counts from when all of them decode until the first one ends.
"""

from __future__ import annotations

import json
import sys
import time
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
                self._stamps[id_].append((now, event.n_decoded))
                self._ended.add(id_)
            elif isinstance(event, Failed):
                raise BenchError(f"the engine refused a request: {event.message}")

    def run(self, n_sessions: int, n_tokens: int) -> dict[str, Any]:
        """Generate `n_tokens` in each of `n_sessions`; tokens per second of all together."""
        rng = np.random.default_rng(n_sessions)
        n_vocab = self._engine.vocab.n_vocab
        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        requests = [
            # The token that all sessions have is there when the last one begins.
            Request(
                rng.integers(n_vocab // 8, n_vocab // 2, self._depth, dtype=np.int32),
                sampling,
                n_tokens + 8 * n_sessions,
                id_slot=-1,
                stream=True,
                cache_prompt=False,
            )
            for _ in range(n_sessions)
        ]
        for request in requests:
            self._stamps[request.id] = []
            self._engine.submit(request)
        while not self._ended.issuperset(r.id for r in requests):
            if not self._engine.step():
                raise BenchError("nothing is left to do and not all sessions have ended")
        while self._engine.step():
            pass
        stamps = [self._stamps.pop(r.id) for r in requests]
        begin, end = max(s[0][0] for s in stamps), min(s[-1][0] for s in stamps)
        counts = [max(n for t, n in s if t <= end) - max(n for t, n in s if t <= begin) for s in stamps]
        if end <= begin or min(counts) < 2:
            raise BenchError("the sessions did not decode side by side: use more --tokens")
        return {"tps": sum(counts) / (end - begin), "counts": counts, "seconds": end - begin}


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
