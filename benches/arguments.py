"""What the comparisons in this process share: options, defaults of the server's flags, the record."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llamamg import library

from . import record
from .errors import BenchError
from .loads import Load, Sizes

DEFAULTS = Sizes()


# Slots that are saved between blocks would be timed with them; `bench cache` is for that.
NO_CACHE = ("-cram", "0")


def add_sizes(parser: argparse.ArgumentParser, d: Sizes = DEFAULTS) -> None:
    """How much work a block is; `d` has the defaults."""
    parser.add_argument(
        "--depth", type=int, default=d.depth, help=f"tokens that each session holds (default {d.depth})"
    )
    parser.add_argument(
        "--tokens", type=int, default=d.n_tokens, help=f"tokens per session in a block (default {d.n_tokens})"
    )
    parser.add_argument(
        "--prompt", type=int, default=d.n_prompt, help=f"tokens of an arriving prompt (default {d.n_prompt})"
    )


def add_results(parser: argparse.ArgumentParser) -> None:
    """Where it goes."""
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FOLDER",
        help="where to keep the result (default: benches/results, in an installed copy ./llamamg-results)",
    )


def sizes_of(args: argparse.Namespace) -> Sizes:
    """The sizes asked for. Raises BenchError for sizes that cannot be."""
    for name, least in (("depth", 8), ("tokens", 4), ("prompt", 8)):
        if getattr(args, name) < least:
            raise BenchError(f"--{name} must be at least {least}")
    return Sizes(args.depth, args.tokens, args.prompt)


def serve_flags(model: Path, loads: Sequence[Load], sizes: Sizes, given: Sequence[str]) -> list[str]:
    """Defaults that fit the loads, then what was given: the later one counts."""
    n_slots = max(load.n_slots for load in loads)
    for i, word in enumerate(given[:-1]):
        if word in ("-np", "--parallel") and given[i + 1].isdigit():
            n_slots = int(given[i + 1])
    n_ctx = n_slots * -(-max(sizes.needed(load) for load in loads) // 256) * 256
    cache = () if all(load.returns for load in loads) else NO_CACHE
    return ["-m", str(model), "-np", str(n_slots), "--no-kv-unified", "-c", str(n_ctx), "-lv", "2", *cache, *given]


def record_of(build: Path | None, *models: Path) -> dict[str, Any]:
    """Machine, software, build (None: the default one) and models."""
    folder = library.find(build)
    info = record.build(folder) or record.build(folder.parent)
    return record.everything(build=info, models=[record.model(model) for model in models])
