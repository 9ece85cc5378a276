"""BUILD_INFO: what a build was made from."""

from __future__ import annotations

import datetime
import json
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llamamg
from llamamg import paths
from llamamg.native import cuda, series, toolchain
from llamamg.native.sdist import Upstream, sha256_of
from llamamg.native.series import Patch

if TYPE_CHECKING:
    from llamamg.native.build import Plan

FILE = "BUILD_INFO.json"


def git_commit() -> str:
    """Our commit, with -dirty when native/ differs from it; "unknown" for an installed copy."""
    root = paths.checkout()
    if not root:
        return "unknown"
    commit = toolchain.output_of("git", "-C", str(root), "rev-parse", "HEAD").strip()
    changed = toolchain.output_of("git", "-C", str(root), "status", "--porcelain", "--", "native").strip()
    return (commit + ("-dirty" if changed else "")) if commit else "unknown"


def collect(plan: Plan, upstream: Upstream, patches: list[Patch], compilers: dict[str, str]) -> dict[str, Any]:
    archs = [flag.partition("=")[2] for flag in plan.flags if flag.startswith("-DCMAKE_CUDA_ARCHITECTURES=")]
    compiler = cuda.nvcc() if plan.cuda else None
    return {
        "llamamg": llamamg.__version__,
        "commit": git_commit(),
        "date": _date(),
        "patched": plan.patched,
        "upstream": {"name": upstream.name, "version": upstream.version, "sha256": upstream.sha256},
        "llama.cpp": upstream.commit,
        "patches": [
            {"name": p.name, "sha256": sha256_of(series.folder() / p.name), "description": p.summary} for p in patches
        ],
        "flags": list(plan.flags),
        "cuda": plan.cuda,
        "cuda_architectures": archs[0] if archs else "",
        "server": plan.server,
        "compilers": {**compilers, **({"nvcc": cuda.nvcc_version(compiler)} if compiler else {})},
        "machine": platform.machine(),
        "key": plan.key,
    }


def _date() -> str:
    """Build time in UTC; SOURCE_DATE_EPOCH makes it reproducible."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    when = datetime.datetime.fromtimestamp(int(epoch), datetime.timezone.utc) if epoch else _now()
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)


def literal(facts: dict[str, Any]) -> str:
    """A C++ raw string literal, for the copy compiled into libllamamg."""
    return f'R"MGJSON({json.dumps(facts)})MGJSON"\n'


def text(facts: dict[str, Any]) -> str:
    """BUILD_INFO.txt: the same for people."""
    up = facts["upstream"]
    lines = [
        f"llamamg {facts['llamamg']} native build, commit {facts['commit']}, {facts['date']}",
        f"llama.cpp {facts['llama.cpp']} from {up['name']} {up['version']} (sha256 {up['sha256']})",
        f"{'patched' if facts['patched'] else 'unpatched'}, {facts['machine']}"
        + (f", CUDA for {facts['cuda_architectures']}" if facts["cuda"] else ", CPU only"),
        *(f"compiler {name}: {version}" for name, version in facts["compilers"].items()),
        "flags: " + " ".join(facts["flags"]),
        *(f"patch {p['name']}: {p['description']} (sha256 {p['sha256'][:12]})" for p in facts["patches"]),
    ]
    return "\n".join(lines) + "\n"


def write(folder: Path, facts: dict[str, Any]) -> None:
    (folder / "BUILD_INFO.txt").write_text(text(facts))
    fresh = folder / (FILE + ".new")
    fresh.write_text(json.dumps(facts, indent=1) + "\n")
    fresh.replace(folder / FILE)


def read(folder: Path) -> dict[str, Any]:
    """Facts of a finished build, or {}."""
    file = folder / FILE
    try:
        return dict(json.loads(file.read_text())) if file.is_file() else {}
    except ValueError:
        return {}
