"""One plugin on and off: between the blocks of one engine, or in two processes where it can only be set at the start."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from llamamg.plugins import PluginError, Unavailable

from .errors import BenchError
from .loads import Load, Sizes
from .session import Block, Session
from .sides import Process


class Sides(Protocol):
    """What a comparison measures."""

    how: str

    def reference(self) -> Block:
        """A block with the plugin off and the other candidates of each token; everything is loaded and warm after it."""

    def block(self, enabled: bool) -> Block:
        """A block with the plugin on or off."""


@dataclass(slots=True)
class Toggled:
    """Both sides are one engine with the same resident sessions. The plugin is left as the last block had it."""

    session: Session
    plugin: str
    how: str = "toggled in one process"

    def reference(self) -> Block:
        self._set(False)
        return self.session.prepare()

    def block(self, enabled: bool) -> Block:
        self._set(enabled)
        block = self.session.block()
        self.session.check(self.plugin)
        return block

    def _set(self, enabled: bool) -> None:
        try:
            self.session.toggle(self.plugin, enabled)
        except PluginError as error:
            raise BenchError(f"{self.plugin} cannot be switched {'on' if enabled else 'off'}: {error}") from error


class Restarted:
    """Two processes, each with a model of its own; only one of them works at a time. `with` starts and ends both."""

    how = "two processes"

    def __init__(self, flags: Sequence[str], plugin: str, load: Load, sizes: Sizes) -> None:
        self._orders = {
            on: {"flags": list(flags), "plugin": plugin, "on": on, "load": load.name, "sizes": asdict(sizes)}
            for on in (False, True)
        }
        self._children: dict[bool, Child] = {}

    def __enter__(self) -> Restarted:
        try:
            for on, order in self._orders.items():
                self._children[on] = Child(order)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children.values():
            child.stop()

    def reference(self) -> Block:
        self._children[True].ask("reference")
        return self._children[False].ask("reference")

    def block(self, enabled: bool) -> Block:
        return self._children[enabled].ask("block")


class Child:
    """A process with one side (benches/side_process.py)."""

    def __init__(self, order: dict[str, Any]) -> None:
        argv = [sys.executable, "-m", f"{__package__}.side_process", json.dumps(order)]
        self._process = Process(f"the side with {order['plugin']} {'on' if order['on'] else 'off'}", argv, piped=True)
        self._process.start()
        try:
            self._read()
        except BaseException:
            self.stop()
            raise

    def ask(self, what: str) -> Block:
        """Have a block done."""
        child = self._process.child
        assert child is not None
        assert child.stdin is not None
        child.stdin.write(what.encode() + b"\n")
        child.stdin.flush()
        return Block(**self._read())

    def _read(self) -> dict[str, Any]:
        child = self._process.child
        assert child is not None
        assert child.stdout is not None
        line = child.stdout.readline()
        if not line:
            raise BenchError(f"{self._process.name} ended:\n{self._process.log_tail()}")
        answer: dict[str, Any] = json.loads(line)
        if answer.get("unavailable") is not None:
            raise BenchError(answer["error"]) from Unavailable(answer["unavailable"])
        if "error" in answer:
            raise BenchError(f"{self._process.name}: {answer['error']}")
        return answer

    def stop(self) -> None:
        """End it."""
        self._process.stop()
