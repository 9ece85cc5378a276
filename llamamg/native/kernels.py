"""Compile our own CUDA sources for one architecture: proof that they compile, on a machine without a GPU."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from llamamg import paths
from llamamg.native import cuda

ARCHITECTURE = "sm_86"


def main() -> int:
    """Exit status 1 when a source does not compile; machines without nvcc skip, and say so."""
    sources = sorted((paths.native() / "src").glob("*.cu"))
    compiler = cuda.nvcc()
    if not sources or compiler is None:
        print(
            f"CUDA sources: {len(sources)} in native/src, nvcc {'not ' if compiler is None else ''}found: none compiled"
        )
        return 0
    root = cuda.complete_root(compiler)
    tree = paths.source("patched")
    folders = (
        paths.native() / "src",
        tree / "ggml" / "include",
        tree / "ggml" / "src",
        tree / "ggml" / "src" / "ggml-cuda",
        root / "include",
        root / "include" / "cccl",
    )
    includes = [f"-I{folder}" for folder in folders]
    stamp = paths.home() / f"kernels-{ARCHITECTURE}.stamp"
    inputs = _hash([*sorted((paths.native() / "src").glob("qsa*")), *sources, *(tree / "ggml" / "include").glob("*.h")])
    if stamp.exists() and stamp.read_text() == inputs:
        print(f"CUDA sources: unchanged since they compiled for {ARCHITECTURE}")
        return 0
    for source in sources:
        print(f"compiling {source.name} for {ARCHITECTURE} ...", flush=True)
        command = [*_launcher(), str(root / "bin" / "nvcc"), "-std=c++17", f"-arch={ARCHITECTURE}", *includes]
        with tempfile.TemporaryDirectory() as folder:
            command += ["-c", str(source), "-o", f"{folder}/out.o"]
            if subprocess.run(command, check=False).returncode != 0:
                print(f"{source} does not compile; see above", file=sys.stderr)
                return 1
    stamp.write_text(inputs)
    return 0


def _hash(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _launcher() -> list[str]:
    ccache = shutil.which("ccache")
    return [ccache] if ccache else []


if __name__ == "__main__":
    sys.exit(main())
