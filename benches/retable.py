"""Write the tables of results again from their JSON: `python -m benches.retable [FOLDER]`. Nothing is measured."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from . import aa, ab, ablation, check, gate_table, kernels, mixed, qsa_depth_table, record
from .grid_table import markdown
from .program import alone
from .report_load import machines

NAME = "retable"
TABLES: dict[str, tuple[str, Callable[[Mapping[str, Any]], str]]] = {
    "grid": ("table.md", markdown),
    "qsa-depth": ("table.md", qsa_depth_table.table),
    "kernels": ("table.txt", kernels.table),
    "mixed": ("table.txt", mixed.table),
    "ablation": ("table.txt", ablation.table),
    "ab": ("table.txt", ab.table),
    "aa": ("table.txt", aa.table),
    "check": ("table.txt", check.table),
    "gate": ("table.txt", gate_table.table),
}


def tables(root: Path) -> Iterator[tuple[Path, str]]:
    """Every table with what its JSON says now."""
    for results in machines(root).values():
        for found in results:
            if found.bench in TABLES:
                name, table = TABLES[found.bench]
                yield root / found.machine / found.run / name, table(found.value) + "\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The folder."""
    parser.add_argument("results", type=Path, nargs="?", default=record.RESULTS, metavar="FOLDER")


def run(args: argparse.Namespace) -> int:
    """Write what differs; 0."""
    for path, text in tables(args.results):
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(alone(sys.modules[__name__]))
