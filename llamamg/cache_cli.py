"""`llamamg cache`: what a folder of saved sequences holds, deleting and checking."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence as Seq
from pathlib import Path

from llamamg.statefile import FolderInUse, FolderLock, NoStateFile, OtherVersion, StateFile, StateFileError
from llamamg.statefile.lock import NAME
from llamamg.statefile.write import confined

MB = 1e6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """ls, rm and verify."""
    commands = parser.add_subparsers(dest="command", required=True, metavar="ls|rm|verify")
    ls = commands.add_parser("ls", help="list the files: tokens, size, model, when used")
    rm = commands.add_parser("rm", help="delete files; no server may be using the folder")
    verify = commands.add_parser("verify", help="read every byte and compare checksums")
    for command in (ls, rm, verify):
        command.add_argument("folder", type=Path, metavar="DIR", help="the folder")
    rm.add_argument("names", nargs="*", metavar="NAME", help="files in it")
    rm.add_argument("--all", action="store_true", help="all state files in it")
    rm.add_argument("--damaged", action="store_true", help="those that cannot be read")


def run(given: argparse.Namespace) -> int:
    """The exit status is 1 when a file is damaged or missing."""
    if not given.folder.is_dir():
        print(f"llamamg cache: error: {given.folder} is no folder", file=sys.stderr)
        return 1
    try:
        return _do(given)
    except OSError as error:
        print(f"llamamg cache: error: {given.folder}: {_reason(error)}", file=sys.stderr)
        return 1


def _do(given: argparse.Namespace) -> int:
    if given.command == "ls":
        return _list(given.folder)
    if given.command == "verify":
        return _verify(given.folder)
    if not (given.names or given.all or given.damaged):
        print("llamamg cache: error: say which: NAME…, --damaged or --all", file=sys.stderr)
        return 1
    try:
        lock = FolderLock(given.folder) if (given.folder / NAME).exists() else None
    except FolderInUse as error:
        print(f"llamamg cache: error: {error}: end that server first, it keeps to its limit by itself", file=sys.stderr)
        return 1
    try:
        return _remove(given.folder, given.names, everything=given.all, damaged=given.damaged)
    finally:
        if lock is not None:
            lock.release()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))


def _list(folder: Path) -> int:
    n_files = n_bytes = 0
    for path in _files(folder):
        status = path.stat()
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(status.st_mtime))
        try:
            with StateFile(path) as file:
                h = file.header
            what = f"{h.n_tokens - h.start:7d} tokens from {h.start:7d}, {len(h.states)} states, {h.model}"
        except (StateFileError, OSError) as error:
            what = f"not usable: {_reason(error)}"
        n_files, n_bytes = n_files + 1, n_bytes + status.st_size
        print(f"{path.name}  {status.st_size / MB:9.1f} MB  {used}  {what}")
    print(f"{n_files} files, {n_bytes / MB:.1f} MB")
    return 0


def _verify(folder: Path) -> int:
    n_bad = n_files = 0
    for path in _files(folder):
        n_files += 1
        try:
            with StateFile(path) as file:
                for done in file.verify():
                    if sys.stderr.isatty():
                        print(f"\r{path.name}  {done / MB:9.1f} MB", end="", file=sys.stderr)
            print(f"{path.name}: good")
        except (StateFileError, OSError) as error:
            n_bad += 1
            print(f"{path.name}: {_reason(error)}")
    print(f"{n_files - n_bad} of {n_files} files are good")
    return 1 if n_bad else 0


def _remove(folder: Path, names: Seq[str], *, everything: bool, damaged: bool) -> int:
    status = 0
    paths = []
    for name in names:
        try:
            path = confined(folder, name)
        except StateFileError:
            print(f"llamamg cache: error: {name!r} is not the name of a file in {folder}", file=sys.stderr)
            return 1
        if path.is_file():
            paths.append(path)
        else:
            print(f"llamamg cache: there is no file {name} in {folder}", file=sys.stderr)
            status = 1
    for path in _files(folder) if everything or damaged else ():
        if _is_state_file(path, damaged_only=not everything):
            paths.append(path)
    for path in dict.fromkeys(paths):
        try:
            path.unlink()
        except OSError as error:
            print(f"llamamg cache: {path.name} cannot be deleted: {_reason(error)}", file=sys.stderr)
            status = 1
        else:
            print(f"deleted {path.name}")
    return status


def _is_state_file(path: Path, *, damaged_only: bool) -> bool:
    try:
        with StateFile(path) as file:
            for _ in file.verify() if damaged_only else ():
                pass
    except NoStateFile:
        return False
    except OtherVersion:
        return not damaged_only  # nothing says that it is damaged: the disk tier leaves it alone too
    except StateFileError:
        return True
    except OSError as error:
        print(f"llamamg cache: {path.name} cannot be read: {_reason(error)}", file=sys.stderr)
        return False
    return not damaged_only


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
