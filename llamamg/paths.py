"""Where the native sources, builds and downloads live."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

Flavour = Literal["patched", "upstream", "patched-archive", "upstream-archive"]

_package = Path(__file__).resolve().parent


def checkout() -> Path | None:
    """The repository this package runs from, or None for an installed copy."""
    root = _package.parent
    return root if (root / "native" / "UPSTREAM").is_file() and (root / "pyproject.toml").is_file() else None


def native() -> Path:
    """Folder with UPSTREAM, CMakeLists.txt, patches/ and src/."""
    root = checkout()
    return root / "native" if root else _package.parent / "llamamg_native"


def home() -> Path:
    """Folder for everything that is downloaded or built: $LLAMAMG_HOME, <checkout>/build/native, or the user's cache."""
    override = os.environ.get("LLAMAMG_HOME")
    if override:
        return Path(override).expanduser().resolve()
    root = checkout()
    if root:
        return root / "build" / "native"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "llamamg"


def downloads() -> Path:
    return home() / "downloads"


def source(flavour: Flavour) -> Path:
    """The llama.cpp tree a flavour is built from; archives share the tree of the plain build."""
    return home() / flavour.removesuffix("-archive") / "src"


def build(flavour: Flavour) -> Path:
    """CMake's build folder of a flavour; the libraries are in its bin/."""
    return home() / flavour / "build"
