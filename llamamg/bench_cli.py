"""Measure: what a plugin gains, that it did something, and that answers stayed the same. Each benchmark is a module of benches/."""

from __future__ import annotations

import argparse
import difflib
import sys
from importlib import import_module
from importlib.util import find_spec

PACKAGE = "llamamg_benches"
# Modules that may be there; each has NAME, HELP, add_arguments(parser) and run(args) -> exit status.
MODULES = (
    "ab",
    "ablation",
    "mixed",
    "gate",
    "grid",
    "soak",
    "agents",
    "check",
    "kernels",
    "qsa_depth",
    "steps",
    "spec",
    "pipeline",
    "groups",
    "cache",
    "report",
    "aa",
    "overhead",
    "serve_rate",
    "big_prompt",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's name; the rest belongs to it."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "benchmarks (`llamamg bench NAME --help` lists a benchmark's options):\n" + _overview()
    parser.add_argument("benchmark", nargs="?", help="which one")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="its options")


def run(args: argparse.Namespace) -> int:
    """Run one benchmark; its exit status."""
    if args.benchmark is None:
        print(f"Usage: llamamg bench NAME [OPTION…]\n\n{_overview()}", end="")
        return 1
    module = args.benchmark.replace("-", "_")
    if module not in available():
        near = difflib.get_close_matches(args.benchmark, _names(), n=1)
        hint = f" did you mean {near[0]}?" if near else ""
        print(
            f"llamamg: error: there is no benchmark {args.benchmark!r};{hint} `llamamg bench` lists them",
            file=sys.stderr,
        )
        return 1
    program = import_module(f"{PACKAGE}.program")
    found = import_module(f"{PACKAGE}.{module}")
    return int(program.run_module(found, args.options, f"llamamg bench {args.benchmark}"))


def available() -> list[str]:
    """Modules that this copy has and that are benchmarks of the command line."""
    return [name for name in MODULES if _help(name) is not None]


def _names() -> list[str]:
    return [name.replace("_", "-") for name in available()]


def _help(module: str) -> str | None:
    """The module's one line, read from its source: importing all of them to print a list would take seconds."""
    try:
        spec = find_spec(f"{PACKAGE}.{module}")
    except ModuleNotFoundError:  # an editable install made before benches/ was a package of it
        return None
    if spec is None or spec.origin is None:
        return None
    with open(spec.origin, encoding="utf-8") as file:
        for line in file:
            if line.startswith("HELP = "):
                return line.removeprefix("HELP = ").strip().strip('"')
    return None


def _overview() -> str:
    return "".join(f"  {name.replace('_', '-'):<11} {_help(name)}\n" for name in available())
