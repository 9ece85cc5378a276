"""cffi binding of libllamamg, the C ABI of native/src/mg.h.

cffi releases the interpreter lock around every call, so a sampling call costs the asyncio thread nothing.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from llamamg.abi_header import ffi as ffi
from llamamg.errors import NativeError

LOG_LEVELS: Final = {"debug": 1, "info": 2, "warn": 3, "error": 4, "none": 5}
MOVE_RESULTS: Final = {-1: "invalid", -2: "model", -3: "empty", -4: "busy", -5: "room", -6: "cache"}
DEVICE_TYPES: Final = ("cpu", "gpu", "igpu", "accel", "meta")


class MoveError(NativeError):
    """A sequence stays where it is; `reason` is one of MOVE_RESULTS."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason: Final = reason


class UnknownSwitch(KeyError):
    """No switch of that name is compiled in; an unpatched library has none."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, slots=True)
class Switch:
    """A named run-time integer that patched code reads; at its default the library behaves like upstream."""

    name: str
    description: str
    default: int
    value: int


@dataclass(frozen=True, slots=True)
class Device:
    """One compute device; memory in bytes."""

    name: str
    description: str
    backend: str
    device_id: str
    type: str
    asynchronous: bool
    events: bool
    memory_free: int
    memory_total: int


@dataclass(frozen=True, slots=True)
class QsaStats:
    """What native QSA did in this process; zeros in an unpatched library."""

    n_native: int  # ubatches computed natively
    n_fallback: int  # ubatches left to upstream's graph although the switch `qsa` was on
    n_pooled: int  # pooled keys written, counted once for all layers
    n_bytes: int  # memory of pooled keys
    n_rebuilt: int = 0  # those of n_pooled that were written when the switch was turned on
    rebuilt_ms: float = 0.0  # time that took
    n_lean: int = 0  # contexts that are alive and keep no raw index keys
    reason: str = ""  # why upstream's graph computed the last ubatch of n_fallback


class Abi:
    """libllamamg. `lib` is the raw cffi handle for hot paths: pass pointers as `ffi.cast("void *", address)`."""

    def __init__(self, path: Path) -> None:
        self.path: Final = path
        self.lib: Final[Any] = ffi.dlopen(str(path))

    # -- switches

    def switches(self) -> list[Switch]:
        return [self._switch(i) for i in range(self.lib.mg_switch_count())]

    def switch(self, name: str) -> int:
        """Value of one switch. Raises UnknownSwitch."""
        out = ffi.new("int32_t *")
        if self.lib.mg_switch_get(name.encode(), out) != 0:
            raise self._unknown(name)
        return int(out[0])

    def set_switch(self, name: str, value: int) -> None:
        """Set one switch; takes effect where patched code reads it next. Raises UnknownSwitch."""
        if self.lib.mg_switch_set(name.encode(), int(value)) != 0:
            raise self._unknown(name)

    @contextmanager
    def held(self, values: Mapping[str, int]) -> Iterator[None]:
        """Switches at these values inside a `with`, as before after it; what this library lacks is left out."""
        there = {switch.name: switch.value for switch in self.switches() if switch.name in values}
        try:
            for name in there:
                self.set_switch(name, values[name])
            yield
        finally:
            for name, before in there.items():
                self.set_switch(name, before)

    def _switch(self, i: int) -> Switch:
        name = _text(self.lib.mg_switch_name(i))
        return Switch(
            name, _text(self.lib.mg_switch_description(i)), int(self.lib.mg_switch_default(i)), self.switch(name)
        )

    def _unknown(self, name: str) -> UnknownSwitch:
        known = ", ".join(s.name for s in self.switches()) or "none: this library is unpatched, run `llamamg build`"
        return UnknownSwitch(f"there is no native switch '{name}' in {self.path.name} (known: {known})")

    # -- information

    def build_info(self) -> dict[str, Any]:
        """BUILD_INFO.json as compiled in."""
        info: dict[str, Any] = json.loads(_text(self.lib.mg_build_info()))
        return info

    def devices(self) -> list[Device]:
        return [self._device(i) for i in range(self.lib.mg_device_count())]

    def _device(self, i: int) -> Device:
        d = ffi.new("struct mg_device *")
        if self.lib.mg_device_get(i, d) != 0:
            raise self.error()
        return Device(
            name=_text(d.name),
            description=_text(d.description),
            backend=_text(d.backend),
            device_id=_text(d.device_id),
            type=DEVICE_TYPES[d.type] if d.type < len(DEVICE_TYPES) else str(d.type),
            asynchronous=bool(d.is_async),
            events=bool(d.has_events),
            memory_free=int(d.memory_free),
            memory_total=int(d.memory_total),
        )

    def error(self) -> NativeError:
        """The last failure on this thread, to be raised."""
        return NativeError(_text(self.lib.mg_last_error()) or "libllamamg failed without saying why")

    def qsa_stats(self) -> QsaStats:
        out = ffi.new("struct mg_qsa *")
        self.lib.mg_qsa_stats(out)
        return QsaStats(
            n_native=int(out.n_native),
            n_fallback=int(out.n_fallback),
            n_pooled=int(out.n_pooled),
            n_bytes=int(out.n_bytes),
            n_rebuilt=int(out.n_rebuilt),
            rebuilt_ms=int(out.us_rebuilt) / 1e3,
            n_lean=int(out.n_lean),
            reason=_text(out.reason),
        )

    def adapt(self, context: Any, host_free: int) -> str:
        """Make an idle context ready for switches that were turned; `host_free` bytes of main memory may be used.

        Returns what was done, "" if nothing. Raises NativeError with the MiB that are missing: turn the switches back
        and adapt again.
        """
        if not hasattr(self.lib, "mg_context_adapt"):
            return ""  # an older build does so in the first step after the switch
        text = ffi.new("char[512]")
        address = ctypes.cast(context, ctypes.c_void_p).value or 0
        failed = self.lib.mg_context_adapt(ffi.cast("void *", address), int(host_free), text, len(text))
        if failed:
            raise NativeError(_text(text))
        return _text(text)

    # -- sequences

    def move_sequence(self, source: int, seq_source: int, target: int, seq_target: int) -> None:
        """Move a sequence into another context (`llama_context` addresses) of the same model, from device to device.

        Waits for both contexts and for the data; no other thread may use either meanwhile, any other context may decode.
        `seq_target` must be empty; `seq_source` is afterwards. Raises MoveError, then both are as before.
        """
        self._carry(self.lib.mg_seq_move, source, seq_source, target, seq_target)

    def copy_sequence(self, source: int, seq_source: int, target: int, seq_target: int) -> None:
        """As `move_sequence`, but the source keeps the sequence too."""
        self._carry(self.lib.mg_seq_copy, source, seq_source, target, seq_target)

    def _carry(self, call: Any, source: int, seq_source: int, target: int, seq_target: int) -> None:
        code = call(ffi.cast("void *", source), seq_source, ffi.cast("void *", target), seq_target)
        if code != 0:
            raise MoveError(MOVE_RESULTS.get(int(code), str(code)), str(self.error()))

    # -- trace

    def trace_count(self, name: str) -> int:
        """How often the native library came to a point it counts (names in native/src/mg_trace.h). Raises KeyError."""
        count = int(self.lib.mg_trace_count(name.encode()))
        if count < 0:
            raise KeyError(f"the native library does not count '{name}'")
        return count

    def write_trace(self, path: Path) -> int:
        """Write and forget the time stamps kept while the switch `trace` was 1; how many there were. Raises OSError."""
        n_stamps = int(self.lib.mg_trace_write(str(path).encode()))
        if n_stamps < 0:
            raise OSError(f"the trace cannot be written to {path}: choose another place")
        return n_stamps

    # -- log

    def set_log(self, level: str, path: Path | None = None) -> None:
        """Send llama.cpp's log at or above a level of LOG_LEVELS to a file, or to stderr; no Python code runs per line."""
        if level not in LOG_LEVELS:
            raise ValueError(f"log level '{level}' does not exist; use one of {', '.join(LOG_LEVELS)}")
        target = str(path).encode() if path else ffi.NULL
        if self.lib.mg_log_set(LOG_LEVELS[level], target) != 0:
            raise self.error()


def _text(pointer: Any) -> str:
    return "" if pointer == ffi.NULL else bytes(ffi.string(pointer)).decode("utf-8", "replace")
