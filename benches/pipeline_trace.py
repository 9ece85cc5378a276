"""What stamps of the native trace say: how long each device was busy, and how much of that was beside the other ones.

Stamps are rows of (microseconds, what, id, device); `begin` and `end` belong to devices, the rest to the host thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

Stamp = Sequence[Any]
# What the host does between two of its stamps, by the later one.
PHASES = {
    "drained": "waiting for the devices",
    "reused": "taking the graph of before",
    "built": "building the graph",
    "realloc": "splitting the graph",
    "allocated": "allocating it",
    "inputs": "writing inputs",
    "copied": "copying inputs",
    "submitted": "submitting",
}
# Where the host waits for all devices: a new layout of the graph, or inputs that may still be read. Most reuses wait for nothing.
DRAINS = ("realloc", "drained")


def spans(stamps: Sequence[Stamp]) -> dict[str, list[tuple[float, float]]]:
    """When each device worked on a split: (from, to) in ms."""
    open_at: dict[tuple[str, int], float] = {}
    found: dict[str, list[tuple[float, float]]] = {}
    for us, what, number, device in stamps:
        if what == "begin":
            open_at[device, number] = us / 1e3
        elif what == "end" and (device, number) in open_at:
            found.setdefault(device, []).append((open_at.pop((device, number)), us / 1e3))
    return found


def host(stamps: Sequence[Stamp]) -> dict[str, float]:
    """Milliseconds the host thread spent in each phase."""
    found: dict[str, float] = {}
    for before, after in pairwise(stamp for stamp in stamps if not stamp[3]):
        if phase := PHASES.get(after[1]):
            found[phase] = found.get(phase, 0.0) + (after[0] - before[0]) / 1e3
    return found


def summary(stamps: Sequence[Stamp]) -> dict[str, Any]:
    """Busy time per device, and `parallelism`: the mean number of devices at work from the first begin to the last end."""
    at_work = spans(stamps)
    busy = {device: sum(end - begin for begin, end in found) for device, found in at_work.items()}
    every = [span for found in at_work.values() for span in found]
    wall = max(end for _, end in every) - min(begin for begin, _ in every) if every else 0.0
    return {
        "wall_ms": wall,
        "busy_ms": busy,
        "parallelism": sum(busy.values()) / wall if wall else 0.0,
        "host_ms": host(stamps),
        "n_ubatches": sum(stamp[1] == "ubatch" for stamp in stamps),
        "n_drains": sum(stamp[1] in DRAINS for stamp in stamps),
    }
