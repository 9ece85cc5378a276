"""`llamamg build --archive`: one tarball that runs on another machine of the same architecture."""

from __future__ import annotations

import lzma
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from llamamg import paths
from llamamg.native import export, info, series
from llamamg.native.sdist import sha256_of


def pack(folder: Path, facts: dict[str, Any], target: Path) -> Path:
    """Pack the libraries in folder, the exported series, our sources, BUILD_INFO and SHA256SUMS below target."""
    kind = ("patched" if facts["patched"] else "upstream") + ("-cuda" if facts["cuda"] else "-cpu")
    name = f"llamamg-{facts['llamamg']}-{kind}-{facts['machine']}"
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="llamamg-", dir=target) as scratch:
        root = Path(scratch) / name
        (root / "lib").mkdir(parents=True)
        for library in sorted(folder.glob("lib*.so*")):
            shutil.copy2(library, root / "lib" / library.name, follow_symlinks=False)
        for program in ("llama-server", "ggml-rpc-server"):
            if (folder / program).is_file():
                shutil.copy2(folder / program, root / "lib" / program)
        if facts["patched"]:
            export.write(series.read(), root / "patches")
        shutil.copytree(paths.native() / "src", root / "src")
        shutil.copy2(paths.source("upstream") / "LICENSE", root / "LICENSE.llama.cpp")
        info.write(root, facts)
        info.write(root / "lib", facts)
        files = sorted(p for p in root.rglob("*") if p.is_file() and not p.is_symlink())
        (root / "SHA256SUMS").write_text("".join(f"{sha256_of(p)}  {p.relative_to(root)}\n" for p in files))
        result = target / f"{name}.tar.xz"
        partial = target / f"{name}.tar.xz.new"
        print(f"packing {result.name} ...", flush=True)
        with lzma.open(partial, "wb", preset=6) as stream, tarfile.open(fileobj=stream, mode="w") as archive:
            archive.add(root, name, filter=_anonymous)
        partial.replace(result)
    return result


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member
