"""`llamamg doctor`: which library, patches, switches, devices and packages are in use here."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

import llamamg
from llamamg import library
from llamamg.devices import report as device_report
from llamamg.devices.survey import survey
from llamamg.errors import LoadError
from llamamg.native import cuda, toolchain
from llamamg.options.declared import declared_options
from llamamg.options.resolve import parse
from llamamg.options.table import Table
from llamamg.plugins import discover
from llamamg.transfer.pick import way_of

PACKAGES = ("llama_cpp_python", "numpy", "cffi", "pluggy", "starlette", "uvicorn", "uvloop", "httptools", "orjson")
CUPY_PACKAGES = ("cupy-cuda12x", "cupy-cuda13x", "cupy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `llamamg doctor`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--build", type=Path, metavar="DIR", help="look at this build instead of the default one")
    parser.add_argument(
        "--devices", action="store_true", help="measure the devices: speed, hops between them, the order to use them in"
    )
    parser.add_argument(
        "-m", "--model", type=Path, metavar="FILE", help="with --devices: also what each device would hold of this model, "
        "the time of each stage, and the split that balances them",
    )  # fmt: skip
    parser.add_argument(
        "serve_flags", nargs="*", metavar="-- FLAG…", help="after --: flags of `llamamg serve` that the model would be served with"
    )  # fmt: skip


def examine(build: Path | None = None) -> dict[str, Any]:
    """Everything doctor knows, as JSON types. The library part holds `error` when none can be loaded."""
    return {
        "llamamg": llamamg.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu(),
        "gpu_visible": cuda.gpu_visible(),
        "library": _library(build),
        "cache_copies": _cache_copies(build),
        "packages": {name: _installed(name) for name in PACKAGES},
        "cupy": next((f"{name} {_installed(name)}" for name in CUPY_PACKAGES if _installed(name)), None),
    }


def _cache_copies(build: Path | None) -> str:
    try:
        native = library.load(build).mg
        return way_of([device.name for device in native.devices() if device.type == "gpu"], native)
    except (RuntimeError, OSError):
        return way_of([])


def _library(build: Path | None) -> dict[str, Any]:
    try:
        loaded = library.load(build)
    except (RuntimeError, OSError) as error:
        return {"error": str(error)}
    return {
        "dir": str(loaded.dir),
        "patched": loaded.patched,
        "build": loaded.build_info,
        "switches": [asdict(switch) for switch in loaded.mg.switches()],
        "devices": [asdict(device) for device in loaded.mg.devices()],
        "system_info": loaded.llama.llama_print_system_info().decode(),
    }


def _cpu() -> dict[str, Any]:
    enabled = [flag[len("-DGGML_") : -len("=ON")] for flag in toolchain.cpu_flags() if flag.endswith("=ON")]
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"n_threads": os.cpu_count(), "n_usable": usable, "features": enabled}


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def report(facts: dict[str, Any]) -> str:
    """The same for people."""
    lib, cpu = facts["library"], facts["cpu"]
    features = " ".join(cpu["features"]) or "no vector features"
    lines = [
        f"llamamg    {facts['llamamg']}, Python {facts['python']}, {facts['system']}",
        f"CPU        {cpu['n_usable']} of {cpu['n_threads']} threads usable; {features}",
    ]
    lines += [f"library    {lib['error']}"] if "error" in lib else _library_lines(lib)
    missing = [name for name, version in facts["packages"].items() if version is None]
    present = [f"{name} {version}" for name, version in facts["packages"].items() if version]
    lines.append(f"packages   {', '.join(present)}")
    if missing:
        lines.append(f"missing    {', '.join(missing)}: run `llamamg build` and `pip install llamamg`")
    lines.append(f"cupy       {facts['cupy'] or 'not installed; GPU plugins need the extra cuda12 or cuda13'}")
    lines.append(f"cache      slots are copied {facts['cache_copies']}")
    if facts["gpu_visible"] and "error" not in lib and all(d["type"] != "gpu" for d in lib["devices"]):
        lines.append("warning    a GPU is visible but this build cannot use it: run `llamamg build --cuda`")
    return "\n".join(lines)


def _library_lines(lib: dict[str, Any]) -> list[str]:
    built = lib["build"]
    lines = [
        f"library    {lib['dir']}",
        f"           {'patched' if lib['patched'] else 'unpatched'} llama.cpp {built.get('llama.cpp', '?')}, "
        f"llamamg commit {built.get('commit', '?')[:12]}, built {built.get('date', '?')}",
    ]
    lines += [f"patch      {patch['name']}: {patch['description']}" for patch in built.get("patches", [])]
    for switch in lib["switches"]:
        mark = "" if switch["value"] == switch["default"] else f" (default {switch['default']})"
        lines.append(f"switch     {switch['name']} = {switch['value']}{mark}: {switch['description']}")
    for i, device in enumerate(lib["devices"]):
        free, total = device["memory_free"] / 2**30, device["memory_total"] / 2**30
        lines.append(
            f"device {i}   {device['name']} ({device['type']}), {device['description']}, "
            f"{free:.1f} of {total:.1f} GiB free{', async' if device['asynchronous'] else ''}"
        )
    return lines


def run(args: argparse.Namespace) -> int:
    """`llamamg doctor`. Exit status 1 when no library can be loaded. Raises LoadError or OptionError with a sentence."""
    if (args.model or args.serve_flags) and not args.devices:
        raise LoadError("a model and flags of `llamamg serve` mean something with --devices only: give that too")
    if args.serve_flags and not args.model:
        raise LoadError("flags of `llamamg serve` are about a model: give -m too")
    facts = examine(args.build)
    failed = "error" in facts["library"]
    if args.devices and not failed:
        facts["survey"] = _survey(args)
    if args.json:
        print(json.dumps(facts, indent=1))
    else:
        print("\n".join([report(facts), *(device_report.lines(facts["survey"]) if "survey" in facts else ())]))
    return 1 if failed else 0


def _survey(args: argparse.Namespace) -> dict[str, Any]:
    config = None
    if args.model:
        found = discover()
        flags = ["-m", str(args.model), *args.serve_flags]
        config = parse(flags, os.environ, Table(declared_options(found)), found).config
    loaded = library.load(args.build)
    with tqdm(desc="measuring", unit="", bar_format="{desc}", leave=False, disable=None) as bar:
        return survey(loaded, config, lambda what: bar.set_description_str(f"measuring the {what}"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="llamamg doctor", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
