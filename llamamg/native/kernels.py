"""Compile our own CUDA sources for one architecture: proof that they compile, on a machine without a GPU."""

from __future__ import annotations

import subprocess
import sys

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
    tree = paths.source("patched")
    folders = (
        paths.native() / "src",
        tree / "ggml" / "include",
        tree / "ggml" / "src",
        tree / "ggml" / "src" / "ggml-cuda",
    )
    includes = [f"-I{folder}" for folder in folders]
    for source in sources:
        print(f"compiling {source.name} for {ARCHITECTURE} ...", flush=True)
        command = [
            str(compiler),
            "-std=c++17",
            f"-arch={ARCHITECTURE}",
            *includes,
            "-c",
            str(source),
            "-o",
            "/dev/null",
        ]
        if subprocess.run(command, check=False).returncode != 0:
            print(f"{source} does not compile; see above", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
