"""A module of the benches in a process of its own that takes orders: a JSON object per line on stdin and stdout."""

from __future__ import annotations

import json
import sys
from typing import Any

from .errors import BenchError
from .sides import Process


class JsonChild:
    """`with` starts and ends it. Its first line out, without being asked, has its facts."""

    def __init__(self, name: str, module: str, order: dict[str, Any], env: dict[str, str] | None = None) -> None:
        argv = [sys.executable, "-m", f"{__package__}.{module}", json.dumps(order)]
        self._process = Process(name, argv, env, piped=True)
        self.facts: dict[str, Any] = {}

    def __enter__(self) -> JsonChild:
        self._process.start()
        try:
            self.facts = self._read()
        except BaseException:
            self._process.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End it, on any thread; what is being asked fails then."""
        self._process.stop()

    def ask(self, do: str, **order: Any) -> dict[str, Any]:
        """Have one order done. Raises BenchError with the child's own words."""
        child = self._process.child
        assert child is not None
        assert child.stdin is not None
        child.stdin.write(json.dumps({"do": do, **order}).encode() + b"\n")
        child.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        child = self._process.child
        assert child is not None
        assert child.stdout is not None
        line = child.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "it ended"}
        if "error" in answer:
            raise BenchError(f"the {self._process.name}: {answer['error']}\n{self._process.log_tail()}".rstrip())
        return answer
