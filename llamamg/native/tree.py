"""The patched source tree: links to the pristine one, plus the files our patches change."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

from llamamg.native.series import Files, Patch, PatchError, states

MANIFEST = ".llamamg-patched"  # path -> sha256 of every file that differs from the pristine tree


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def sync(pristine: Path, tree: Path, series: list[Patch]) -> list[str]:
    """Make tree equal pristine plus series; returns the files written. Unchanged files keep their time, so Ninja
    rebuilds only what a patch touches. Raises PatchError for a patch that fails or a file that was edited by hand."""
    files = states(pristine, series)[-1]
    if not _same_origin(pristine, tree):
        shutil.rmtree(tree, ignore_errors=True)
        _link_copy(pristine, tree)
    manifest = _read_manifest(tree)
    _refuse_edits(tree, manifest)
    written = []
    for path in sorted({*files, *manifest}):
        wanted = files[path] if path in files else _pristine_text(pristine, path)
        if wanted is None:
            (tree / path).unlink(missing_ok=True)
        elif not (tree / path).is_file() or (tree / path).read_text() != wanted:
            _replace(tree / path, wanted)
            written.append(path)
    changed = {path: digest(text) for path, text in files.items() if text != _pristine_text(pristine, path)}
    _replace(tree / MANIFEST, json.dumps(changed, indent=1))
    return written


def edited(tree: Path) -> list[str]:
    """Patched files whose content is no longer what sync wrote."""
    return [
        path
        for path, sha256 in _read_manifest(tree).items()
        if not (tree / path).is_file() or digest((tree / path).read_text()) != sha256
    ]


def current(tree: Path, paths: list[str]) -> Files:
    return {path: (tree / path).read_text() for path in paths if (tree / path).is_file()}


def adopt(pristine: Path, tree: Path, series: list[Patch]) -> None:
    """Accept the tree's present content as the series' result, after an edit went into a patch. Raises PatchError."""
    files = states(pristine, series)[-1]
    foreign = [path for path, text in files.items() if current(tree, [path]) != {path: text}]
    if foreign:
        raise PatchError(f"{', '.join(foreign)} in {tree} holds edits of another patch; refresh that one as well")
    _replace(tree / MANIFEST, json.dumps({path: digest(text) for path, text in files.items()}, indent=1))


def _refuse_edits(tree: Path, manifest: dict[str, str]) -> None:
    changed = edited(tree) if manifest else []
    if changed:
        raise PatchError(
            f"{', '.join(changed)} in {tree} was edited by hand. Keep the edit with "
            f"`llamamg patches refresh NAME`, or drop it by deleting {tree}"
        )


def _read_manifest(tree: Path) -> dict[str, str]:
    file = tree / MANIFEST
    return dict(json.loads(file.read_text())) if file.is_file() else {}


def _pristine_text(pristine: Path, path: str) -> str | None:
    return (pristine / path).read_text() if (pristine / path).is_file() else None


def _same_origin(pristine: Path, tree: Path) -> bool:
    stamp = ".llamamg-sdist"
    return (tree / stamp).is_file() and (tree / stamp).read_text() == (pristine / stamp).read_text()


def _link_copy(pristine: Path, tree: Path) -> None:
    """Hard links cost no space; a patched file is replaced, never written through."""

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)

    fresh = tree.with_name(tree.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(pristine, fresh, copy_function=link, symlinks=True)
    fresh.rename(tree)


def _replace(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_name(file.name + ".new")
    fresh.write_text(text)
    fresh.replace(file)
