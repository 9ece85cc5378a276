"""Finds results under benches/results, machine by machine. Results of different machines are never put together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import record
from .errors import BenchError


@dataclass(frozen=True, slots=True)
class Found:
    """One result: machine and run are the names of its folders."""

    machine: str
    run: str
    value: dict[str, Any]

    @property
    def bench(self) -> str:
        """Which benchmark it is of."""
        return str(self.value.get("bench", ""))


def machines(root: Path | None = None) -> dict[str, list[Found]]:
    """All results of each machine, the newest first. Raises BenchError for a file that is no result."""
    out: dict[str, list[Found]] = {}
    for found in _walk(root or record.RESULTS):
        out.setdefault(found.machine, []).append(found)
    for results in out.values():
        results.sort(key=lambda found: (_date(found), found.run), reverse=True)
    return dict(sorted(out.items()))


def newest_day(results: list[Found], bench: str) -> list[Found]:
    """The results of a benchmark from the last day that has any, in the order of their making."""
    of_bench = [found for found in results if found.bench == bench]
    return [found for found in reversed(of_bench) if _date(found)[:10] == _date(of_bench[0])[:10]]


def _date(found: Found) -> str:
    return str(found.value.get("record", {}).get("date", ""))


def _walk(root: Path) -> Iterator[Found]:
    for path in sorted(root.glob("*/*/*.json")):
        if path.parent.name.startswith("."):
            continue  # a run that is going on
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BenchError(f"{path} is not readable as a result ({error}): repair or remove it") from error
        if isinstance(value, dict) and "bench" in value:
            yield Found(path.parent.parent.name, path.parent.name, value)


def newest(results: list[Found], bench: str) -> Found | None:
    """The newest result of a benchmark."""
    return next((found for found in results if found.bench == bench), None)
