"""The series as `git format-patch` would write it, so that `git am` takes it on a llama.cpp checkout."""

from __future__ import annotations

import email.utils
import re
from pathlib import Path

from llamamg import paths
from llamamg.native import toolchain
from llamamg.native.series import Patch

AUTHOR = "llamamg <llamamg@localhost>"
ZERO = "0" * 40


def write(series: list[Patch], target: Path) -> list[Path]:
    """Write one mail per patch below target; returns the files."""
    target.mkdir(parents=True, exist_ok=True)
    written = []
    for i, patch in enumerate(series, 1):
        file = target / f"{i:04d}-{re.sub(r'^[0-9]+-', '', Path(patch.name).name)}"
        file.write_text(mail(patch, i, len(series)))
        written.append(file)
    return written


def mail(patch: Patch, i: int, n: int) -> str:
    fields = [f"{key}: {' '.join(value.split())}" for key, value in patch.header.items() if key != "Description"]
    added = sum(1 for line in patch.diff.splitlines() if line.startswith("+") and not line.startswith("+++ "))
    removed = sum(1 for line in patch.diff.splitlines() if line.startswith("-") and not line.startswith("--- "))
    files = patch.files
    diff = re.sub(r"^--- (.+)\n\+\+\+ (.+)$", _git_header, patch.diff, flags=re.M)
    body = "\n".join([patch.description, "", *fields]) if patch.description else "\n".join(fields)
    return (
        f"From {ZERO} Mon Sep 17 00:00:00 2001\n"
        f"From: {AUTHOR}\n"
        f"Date: {_date(patch)}\n"
        f"Subject: [PATCH {i}/{n}] {patch.summary}\n\n"
        f"{body}\n---\n"
        + "".join(f" {path}\n" for path in files)
        + f" {len(files)} file{'s' * (len(files) != 1)} changed, {added} insertions(+), {removed} deletions(-)\n\n"
        + diff.rstrip("\n")
        + "\n-- \nllamamg\n"
    )


def _git_header(match: re.Match[str]) -> str:
    old, new = match[1], match[2]
    a, b = (old, new) if old != "/dev/null" else ("a/" + new[2:], new)
    kind = "new file mode 100644\n" if old == "/dev/null" else ""
    return f"diff --git {a} {b}\n{kind}--- {old}\n+++ {new}"


def _date(patch: Patch) -> str:
    """When the patch was last committed; the epoch outside a checkout, to stay reproducible."""
    root = paths.checkout()
    file = f"native/patches/{patch.name}"
    committed = toolchain.output_of("git", "-C", str(root), "log", "-1", "--format=%ct", "--", file) if root else ""
    return email.utils.formatdate(int(committed.strip() or 0))
