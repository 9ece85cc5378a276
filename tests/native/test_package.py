"""A non-editable install holds everything it needs to build and to find its plugins."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from llamamg import paths

SHOW = """
import llamamg, llamamg_plugins
from llamamg import paths
from llamamg.native import build, check, series
print(llamamg.__file__, paths.native(), len(series.read()), check.structure(), paths.home())
print(build.input_key(True, []))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the sources: building in place would leave a build/lib behind."""
    root = paths.checkout()
    assert root is not None
    copy = tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy2(root / name, copy / name)
    for name in ("llamamg", "plugins", "benches", "native"):
        shutil.copytree(root / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    target = copy / "wheel"
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "wheel",
        "-q",
        "--no-deps",
        "-w",
        str(target),
    ]
    subprocess.run([*command, str(copy)], check=True)
    return next(target.glob("*.whl"))


def test_the_wheel_holds_every_source(wheel: Path) -> None:
    packed = set(zipfile.ZipFile(wheel).namelist())
    native = paths.native()
    expected = {f"llamamg_native/{p.relative_to(native)}" for p in native.rglob("*") if p.is_file()}
    assert expected - packed <= {"llamamg_native/.clang-format"}
    modules = paths.native().parent.glob("llamamg/**/*.py")
    assert {str(p.relative_to(native.parent)) for p in modules} <= packed
    assert {"llamamg_plugins/seq_compact.py", "llamamg_plugins/prefill_gate.py"} <= packed
    assert {"llamamg_benches/ab.py", "llamamg_benches/side_process.py"} <= packed


def test_an_installed_copy_finds_its_native_sources(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    env = {"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    result = subprocess.run(
        [sys.executable, "-c", SHOW], env=env, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    module, native, n_patches, problems, home = result.stdout.splitlines()[0].split()
    assert module == str(site / "llamamg" / "__init__.py")
    assert native == str(site / "llamamg_native")
    assert int(n_patches) == len((paths.native() / "patches" / "series").read_text().split(".patch")) - 1
    assert problems == "[]"
    assert home == str(tmp_path / "cache" / "llamamg")
