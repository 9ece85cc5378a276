"""State files: what was written is read, and every damage is a sentence."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamamg.statefile import (
    Header,
    NoStateFile,
    OtherVersion,
    StateFile,
    StateFileError,
    StateInfo,
    check_identity,
    write_state_file,
)
from llamamg.statefile import lock as locking
from llamamg.statefile import write as writing
from llamamg.statefile.checksum import CHECKSUMS
from llamamg.statefile.format import PREFIX
from llamamg.statefile.write import confined, remove_leftovers

PLANES = ((1, 24, 1), (1, 2, 12))
TOKENS = np.arange(600, dtype=np.int32) * 7
RANDOM = np.random.default_rng(1)


def header(**changes: Any) -> Header:
    return replace(Header("model-a", PLANES, 256, 0, 600, (StateInfo(596, 595, 595, 5000),), "smol"), **changes)


def records(of: Header) -> list[Any]:
    return [np.random.default_rng(i).integers(0, 256, size, np.uint8) for i, size in enumerate(of.records()[1:])]


@pytest.fixture(params=sorted(CHECKSUMS))
def saved(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    h = header(checksum=request.param)
    n = write_state_file(tmp_path / "a.bin", h, TOKENS, records(h))
    assert n == (tmp_path / "a.bin").stat().st_size == h.n_file_bytes()
    return tmp_path / "a.bin"


def read_all(path: Path) -> list[Any]:
    with StateFile(path) as file:
        out = [file.tokens()]
        for i in range(file.header.n_blocks):
            out.append(np.empty(file.header.n_block_bytes, np.uint8))
            file.read_block(i, out[-1])
        for i, state in enumerate(file.header.states):
            out.append(np.empty(state.n_bytes, np.uint8))
            file.read_state(i, out[-1])
        return out


def test_round_trip(saved: Path) -> None:
    found = read_all(saved)
    np.testing.assert_array_equal(found[0], TOKENS)
    for a, b in zip(found[1:], records(header()), strict=True):
        np.testing.assert_array_equal(a, b)
    with StateFile(saved) as file:
        assert list(file.verify())[-1] == sum(header().records())
        assert file.header.states[0].n_tokens == 596
        check_identity(file.header, "model-a", PLANES, 256)


def test_cut_off_at_every_4_kib(saved: Path) -> None:
    whole = saved.read_bytes()
    for n in (*range(0, len(whole), 4096), len(whole) - 1, 3, 15, 16, 17):
        saved.write_bytes(whole[:n])
        with pytest.raises(StateFileError, match=r"cut off|damaged|no state file"):
            read_all(saved)
    saved.write_bytes(whole + b"x")
    with pytest.raises(StateFileError, match="added to"):
        read_all(saved)


def test_one_flipped_bit_anywhere(saved: Path) -> None:
    whole = saved.read_bytes()
    places = {*range(0, 40), *range(0, len(whole), 997), *range(len(whole) - 40, len(whole))}
    for at in sorted(places):
        data = bytearray(whole)
        data[at] ^= 1 << (at % 8)
        saved.write_bytes(data)
        with pytest.raises(StateFileError):
            read_all(saved)


def test_other_versions_and_other_files(saved: Path) -> None:
    data = bytearray(saved.read_bytes())
    data[8:12] = (0).to_bytes(4, "little")
    saved.write_bytes(data)
    with pytest.raises(OtherVersion, match="version 0 of the format, and this program reads 1"):
        read_all(saved)
    saved.write_bytes(b"GGUF" * 100)
    with pytest.raises(NoStateFile, match="no state file"):
        read_all(saved)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(NoStateFile, match="a folder, a pipe or a device"):
            StateFile(path)


@pytest.mark.parametrize(
    ("identity", "planes", "n_rows", "words"),
    [
        ("model-b", PLANES, 256, "another model or other settings of its context .smol."),
        ("model-a", ((8, 13, 1), (1, 2, 12)), 256, "other cache types"),
        ("model-a", PLANES[:1], 256, "other cache types"),
        ("model-a", PLANES, 128, "other cache types"),
    ],
)
def test_files_of_something_else(identity: str, planes: Any, n_rows: int, words: str) -> None:
    with pytest.raises(StateFileError, match=words):
        check_identity(header(), identity, planes, n_rows)


def test_checksums_of_a_package_that_is_missing(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with StateFile(saved) as file:
        name = file.header.checksum
    monkeypatch.delitem(CHECKSUMS, name)
    with pytest.raises(OtherVersion, match="pip install xxhash"):
        read_all(saved)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_write_that_fails_leaves_what_was_there(saved: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    before = saved.read_bytes()

    def fail(handle: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(writing.os, "fsync", fail)
    with pytest.raises(OSError, match=os.strerror(code)):
        write_state_file(saved, header(start=256), TOKENS, records(header(start=256)))
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == ["a.bin"]


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """A limit on the size of files, as a full disk: the write fails in the middle."""
    done = _python(
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
        "try:\n    write_state_file(folder / 'a.bin', h, TOKENS, records(h))\n"
        "except OSError as error:\n    print('refused', error.errno)\n",
        tmp_path,
    )
    assert done.stdout.split()[0] == "refused", done.stderr
    assert list(tmp_path.iterdir()) == []


def test_killed_in_the_middle_of_a_write(saved: Path) -> None:
    folder, before = saved.parent, saved.read_bytes()
    child = subprocess.Popen(
        [sys.executable, "-c", _script(
            "def slow():\n    for r in records(h):\n        time.sleep(0.3); yield r\n"
            "write_state_file(folder / 'a.bin', h, TOKENS, slow())\n", folder,
        )],
        env=_env(),
    )  # fmt: skip
    until = time.monotonic() + 30
    while not list(folder.glob(".a.bin.*.part")):
        assert time.monotonic() < until
        time.sleep(0.01)
    child.kill()
    child.wait()
    assert saved.read_bytes() == before
    read_all(saved)
    assert len(list(folder.iterdir())) == 2
    assert remove_leftovers(folder) == 1
    assert [path.name for path in folder.iterdir()] == ["a.bin"]
    (folder / f".c.bin.{os.getpid()}.part").touch()  # in a container every server may have the same id
    assert remove_leftovers(folder) == 1


@pytest.mark.parametrize("locks", [True, False], ids=["with locks", "a file system without locks"])
def test_what_this_process_is_writing_is_no_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    """A second cache, or a folder of slots, in the same process."""
    if not locks:
        monkeypatch.setattr(locking, "fcntl", None)
    h, removed = header(), []

    def look() -> Any:
        for record in records(h):
            removed.append(remove_leftovers(tmp_path))
            yield record

    write_state_file(tmp_path / "a.bin", h, TOKENS, look())
    assert set(removed) == {0}
    read_all(tmp_path / "a.bin")


def test_what_another_process_is_writing_is_no_leftover(tmp_path: Path) -> None:
    """Whatever its id is: it may be that of nobody here."""
    code = (
        "import os\nos.getpid = lambda: 1 << 22\n"
        "def slow():\n    for r in records(h):\n        print('writing', flush=True); sys.stdin.readline(); yield r\n"
        "write_state_file(folder / 'a.bin', h, TOKENS, slow())\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", _script(code, tmp_path)],
        env=_env(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.readline() == "writing\n"
    assert remove_leftovers(tmp_path) == 0
    child.communicate(100 * "\n", timeout=30)
    read_all(tmp_path / "a.bin")


def test_without_locks_the_leftovers_of_ended_processes_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locking, "fcntl", None)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for pid in (ended.pid, os.getpid(), os.getppid()):
        (tmp_path / f".a.bin.{pid}.part").touch()
    assert remove_leftovers(tmp_path) == 1
    assert not (tmp_path / f".a.bin.{ended.pid}.part").exists()


def _script(code: str, folder: Path) -> str:
    here = Path(__file__)
    return (
        f"import sys, time; sys.path.insert(0, {str(here.parent)!r})\nfrom pathlib import Path\n"
        f"from {here.stem} import TOKENS, header, records, write_state_file\n"
        f"folder, h = Path({str(folder)!r}), header()\n{code}"
    )


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _script(code, folder)], env=_env(), capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../a", "a/b", "/etc/passwd", "a\\b", "a\0b", "a\nb", ".hidden", "c:a", "x" * 201, "a*"]
)
def test_names_stay_in_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(StateFileError, match="Invalid filename"):
        confined(tmp_path, name)


def test_a_link_out_of_the_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/passwd")
    with pytest.raises(StateFileError, match="Invalid filename"):
        confined(tmp_path, "link")
    assert confined(tmp_path, "slot 1.bin") == tmp_path / "slot 1.bin"


def test_the_prefix_is_what_docs_say() -> None:
    assert PREFIX.size == 16
