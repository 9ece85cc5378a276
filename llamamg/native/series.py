"""The patch series: files, headers, and the state of every touched file after each patch."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from llamamg import paths

FIELDS = ("Description", "Origin", "Forwarded", "Dies-when", "Switch", "Guard", "Bench")
GUARDS = ("exact", "same-tokens", "close")


class PatchError(RuntimeError):
    """The series cannot be used; the message names the patch and says what to do."""


@dataclass(frozen=True, slots=True)
class Patch:
    """One patch file: DEP-3 header plus a unified diff."""

    name: str  # path below native/patches, as in series
    header: dict[str, str]
    diff: str

    @property
    def files(self) -> list[str]:
        """Paths the diff touches, relative to the llama.cpp tree."""
        return re.findall(r"^\+\+\+ b/(.+?)(?:\t.*)?$", self.diff, re.M)

    @property
    def summary(self) -> str:
        return self.header.get("Description", "").partition("\n")[0]

    @property
    def description(self) -> str:
        """Description without its first line, as one paragraph."""
        return " ".join(self.header.get("Description", "").partition("\n")[2].split())

    @property
    def switches(self) -> list[str]:
        value = self.header.get("Switch", "none")
        return [] if value == "none" else re.split(r"[,\s]+", value)

    def text(self) -> str:
        lines = []
        for key, value in self.header.items():
            first, *rest = value.split("\n")
            lines += [f"{key}: {first}", *(f" {line}" for line in rest)]
        return "\n".join(lines) + "\n\n" + self.diff


def parse(name: str, text: str) -> Patch:
    """Split a patch file into header fields and diff. Raises PatchError."""
    start = re.search(r"^--- ", text, re.M)
    if not start:
        raise PatchError(f"{name} contains no diff; write it with `llamamg patches refresh {name}`")
    header: dict[str, str] = {}
    key = ""
    for line in text[: start.start()].splitlines():
        if line.startswith(" ") and key:
            header[key] += "\n" + line[1:]
        elif ": " in line or line.endswith(":"):
            key, _, value = line.partition(":")
            header[key] = value.strip()
        elif line.strip():
            raise PatchError(f"{name}: cannot read the header line '{line}'; continue a field with a leading space")
    return Patch(name, header, text[start.start() :])


def folder() -> Path:
    return paths.native() / "patches"


def names(patches: Path | None = None) -> list[str]:
    """The entries of series in order. Raises PatchError when there is no series file."""
    file = (patches or folder()) / "series"
    if not file.is_file():
        raise PatchError(f"{file} does not exist; restore it from git")
    return [line.strip() for line in file.read_text().splitlines() if line.strip() and not line.startswith("#")]


def read(patches: Path | None = None) -> list[Patch]:
    """All patches in order. Raises PatchError when a file is missing or unreadable."""
    root = patches or folder()
    series = []
    for name in names(root):
        file = root / name
        if not file.is_file():
            raise PatchError(f"series names {name}, but {file} does not exist; remove the line or restore the file")
        series.append(parse(name, file.read_text()))
    return series


Files = dict[str, str]


def states(tree: Path, series: list[Patch], *, context: int | None = None) -> list[Files]:
    """Content of every touched file: element 0 pristine, element k after patch k. Raises PatchError.

    `context` lowers the number of context lines that must match, for refreshing after a new upstream.
    """
    touched = sorted({path for patch in series for path in patch.files})
    result = [{path: (tree / path).read_text() for path in touched if (tree / path).is_file()}]
    with tempfile.TemporaryDirectory(prefix="llamamg-") as scratch:
        root = Path(scratch)
        for path, text in result[0].items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        for patch in series:
            git_apply(root, patch, context)
            result.append({path: (root / path).read_text() for path in touched if (root / path).is_file()})
    return result


def git_apply(root: Path, patch: Patch, context: int | None = None) -> None:
    """Apply one diff to the files below root; git has no fuzz, every context line must match. Raises PatchError."""
    command = ["git", "apply", "--whitespace=nowarn", *([f"-C{context}"] if context is not None else []), "-"]
    # With the ceiling git treats root as a plain folder even inside our own repository.
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(root.resolve().parent)}
    result = subprocess.run(command, input=patch.diff, cwd=root, env=env, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        reason = result.stderr.strip().replace("error: ", "").replace("\n", "; ")
        raise PatchError(
            f"{patch.name} does not apply: {reason}. Fix the hunk by hand, or run "
            "`llamamg patches refresh` if only its context moved"
        )


def unified_diff(before: Files, after: Files, n_context: int = 1) -> str:
    """Minimal-context diff of two states, without git's index lines and function names."""
    with tempfile.TemporaryDirectory(prefix="llamamg-") as scratch:
        root = Path(scratch)
        for side, files in (("a", before), ("b", after)):
            (root / side).mkdir()
            for path, text in files.items():
                (root / side / path).parent.mkdir(parents=True, exist_ok=True)
                (root / side / path).write_text(text)
        command = [
            "git",
            "diff",
            "--no-index",
            "--no-color",
            "--no-ext-diff",
            "--no-prefix",
            f"-U{n_context}",
            "a",
            "b",
        ]
        env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(root.resolve().parent), "GIT_CONFIG_NOSYSTEM": "1"}
        result = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    kept = [
        line
        for line in result.stdout.splitlines()
        if not line.startswith(("diff --git ", "index ", "new file", "deleted"))
    ]
    return "".join(re.sub(r"^(@@ [^@]+ @@).*", r"\1", line) + "\n" for line in kept)
