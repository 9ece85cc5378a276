"""The disk tier while it writes and reads: what is queued once, what stays meanwhile, and what a failure takes along."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache_folder import N_BLOCK, Folder, chain, state

from llamamg import N_ROWS
from llamamg.statefile import StateFile
from llamamg_plugins import async_cache_disk, async_cache_folder
from llamamg_plugins.async_cache_folder import BadFile

WAIT_S = 20


class Gate:
    """Lets the disk's thread do one thing after the other; `close` at first, each `open` is for one."""

    def __init__(self) -> None:
        self._opened = threading.Semaphore(0)
        self.n_began = 0

    def open(self, n: int = 1) -> None:
        self._opened.release(n)

    def wait(self) -> None:
        self.n_began += 1
        assert self._opened.acquire(timeout=WAIT_S)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Files are written one by one."""
    made, write = Gate(), async_cache_disk.write_state_file

    def wait_and_write(*args: Any) -> int:
        made.wait()
        return write(*args)

    monkeypatch.setattr(async_cache_disk, "write_state_file", wait_and_write)
    return made


def starts(folder: Folder) -> list[tuple[int, int]]:
    """The tokens whose rows each file has."""
    found = []
    for entry in folder.disk.entries:
        with StateFile(entry.path) as file:
            found.append((file.header.start // N_ROWS, file.header.n_tokens // N_ROWS))
    return sorted(found)


def test_a_block_is_queued_once(folder: Folder, gate: Gate) -> None:
    """A conversation that grows faster than the disk writes."""
    nodes = chain(folder, 6)
    for n in (2, 3, 6, 6):
        folder.disk.write(nodes[:n])
    gate.open(4)
    folder.settle()
    assert gate.n_began == 3
    assert starts(folder) == [(0, 2), (2, 3), (3, 6)]
    assert [folder.rows(node) for node in nodes] == [node.tokens.tolist() for node in nodes]
    assert not any(node.is_written or node.n_pins for node in nodes)
    after = Folder(folder.disk._folder)
    assert after.tree.find(np.concatenate([node.tokens for node in nodes]))[1] == 6 * N_ROWS
    after.disk.stop()


def test_what_is_built_on_a_file_that_could_not_be_written_is_not_kept(
    folder: Folder, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = chain(folder, 4)
    sync, n_synced = os.fsync, 0

    def full_at_first(handle: int) -> None:
        nonlocal n_synced
        n_synced += 1
        if n_synced == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(handle)

    monkeypatch.setattr(os, "fsync", full_at_first)
    folder.disk.write(nodes[:2])
    folder.disk.write(nodes)
    gate.open(2)
    folder.settle()
    assert not folder.disk.entries
    assert list(folder.disk._folder.glob("*.llmg")) == []
    assert not any(node.stored for node in nodes)
    gate.open()
    folder.disk.write(nodes)
    folder.settle()
    assert starts(folder) == [(0, 4)]


def test_a_block_behind_one_that_failed_is_not_queued_twice(
    folder: Folder, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure is known while what is built on it is still being written."""
    nodes = chain(folder, 4)
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    folder.disk.write(nodes[:2])
    folder.disk.write(nodes)
    gate.open()
    folder.until(lambda: folder.disk.n_pending == 1)
    folder.disk.write(nodes)
    assert folder.disk.n_pending == 1
    assert [node.is_written for node in nodes] == [False, False, True, True]
    gate.open()
    folder.settle()


def test_what_a_queued_file_is_built_on_stays(folder: Folder, gate: Gate) -> None:
    nodes, other = chain(folder, 4, 1), chain(folder, 2, 2)
    gate.open(2)
    for path in (nodes[:2], other):
        folder.disk.write(path)
        folder.settle()
    folder.disk.write(nodes)
    folder.disk._n_bytes_max = folder.disk.n_bytes - 1
    folder.disk._shrink()
    assert list(folder.disk.entries) == [nodes[0].stored.entry], "it is older than the other one"
    folder.disk._n_bytes_max = 1 << 30
    gate.open()
    folder.settle()
    assert starts(folder) == [(0, 2), (2, 4)]


def test_the_beginning_of_a_conversation_is_as_new_as_its_end(folder: Folder) -> None:
    """It is written once and never read while the conversation stays in its slot."""
    nodes, other = chain(folder, 6, 1), chain(folder, 2, 2)
    for path in (nodes[:2], other, nodes[:4], nodes):
        folder.disk.write(path)
        folder.settle()
    wanted = [other[0], nodes[4], nodes[2], nodes[0]]
    assert list(folder.disk.entries) == [node.stored.entry for node in wanted]
    after = Folder(folder.disk._folder)
    assert [entry.path for entry in after.disk.entries] == [node.stored.entry.path for node in wanted]
    after.disk.stop()


def test_a_state_that_is_read_stays_though_it_lies_in_a_file_of_its_own(folder: Folder) -> None:
    (node,) = chain(folder, 1)
    folder.disk.write([node])
    folder.settle()
    apart = node.stored.entry
    node.stored, apart.nodes = None, []
    kept = state(folder, node, 100)
    folder.disk.write([node])
    folder.settle()
    kept.stored = async_cache_disk.Stored(apart, 0, 8, is_state=True)
    folder.tree.pin([node])
    folder.disk._n_bytes_max = 0
    folder.disk._shrink()
    assert apart in folder.disk.entries
    folder.tree.unpin([node])
    folder.disk._shrink()
    assert not folder.disk.entries


def test_a_file_is_not_closed_while_it_is_read(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor when it is deleted, or when the cache ends; afterwards it is."""
    (node,) = chain(folder, 1)
    folder.disk.write([node])
    folder.settle()
    reading, go_on = threading.Event(), threading.Event()
    read = StateFile.read_block

    def slow(file: StateFile, index: int, memory: Any) -> None:
        reading.set()
        assert go_on.wait(WAIT_S)
        read(file, index, memory)
        files.append(file)

    monkeypatch.setattr(StateFile, "read_block", slow)
    files: list[StateFile] = []
    rows: list[list[int]] = []
    thread = threading.Thread(target=lambda: rows.append(folder.rows(node)))
    thread.start()
    assert reading.wait(WAIT_S)
    folder.disk.forget(node.stored.entry)
    folder.disk._files.close_all()
    folder.settle()
    assert list(folder.disk._folder.glob("*.llmg")) == []
    go_on.set()
    thread.join(WAIT_S)
    assert rows == [node.tokens.tolist()]
    assert files[0]._handle == -1


def test_two_threads_that_open_a_file_at_once(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    (node,) = chain(folder, 1)
    folder.disk.write([node])
    folder.settle()
    both, opened = threading.Barrier(2), folder.disk._files._opened
    made: list[StateFile] = []

    def at_once(entry: Any) -> StateFile:
        file = opened(entry)
        made.append(file)
        both.wait(WAIT_S)
        return file

    monkeypatch.setattr(folder.disk._files, "_opened", at_once)
    rows: list[list[int]] = []
    threads = [threading.Thread(target=lambda: rows.append(folder.rows(node))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert rows == 2 * [node.tokens.tolist()]
    assert sorted(file._handle >= 0 for file in made) == [False, True]
    assert folder.disk.n_read == 2 * N_BLOCK


def test_a_disk_that_is_smaller_than_the_limit(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The oldest files make room for the next ones, once and for all."""
    sync = os.fsync

    def full(handle: int) -> None:
        if sum(path.stat().st_size for path in folder.disk._folder.iterdir()) > 40_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(handle)

    monkeypatch.setattr(os, "fsync", full)
    saved = [chain(folder, 4, seed) for seed in range(9)]
    for path in saved:
        folder.disk.write(path)
        folder.settle()
        if folder.disk._is_failing:
            folder.disk.write(path)
            folder.settle()
    assert [path[0].stored is not None for path in saved] == 6 * [False] + 3 * [True]
    assert folder.disk.n_bytes == sum(path.stat().st_size for path in folder.disk._folder.iterdir()) <= 40_000
    assert (folder.disk.n_unwritten, folder.disk.n_evicted) == (1, 6)
    assert caplog.text.count("could not be kept") == caplog.text.count("until the next start: the disk is full") == 1
    monkeypatch.setattr(os, "fsync", lambda handle: full(handle) or (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
    for seed in range(10, 13):
        folder.disk.write(chain(folder, 1, seed))
        folder.settle()
    assert (folder.disk.n_unwritten, caplog.text.count("could not be kept")) == (4, 2)


def test_a_start_that_takes_long_says_how_far_it_is(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for seed in range(3):
        folder.disk.write(chain(folder, 1, seed))
    folder.settle()
    monkeypatch.setattr(async_cache_folder, "SAY_S", -1.0)
    Folder(folder.disk._folder).disk.stop()
    assert "2 of 3 files looked at" in caplog.text


@pytest.mark.parametrize(("code", "stays"), [(errno.EMFILE, True), (errno.ENOMEM, True), (errno.EIO, False)])
def test_a_file_that_cannot_be_read_just_now_is_not_deleted(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, code: int, stays: bool
) -> None:
    nodes = chain(folder, 4)
    for n in (2, 4):
        folder.disk.write(nodes[:n])
        folder.settle()
    folder.disk._files.close_all()
    n_bytes = folder.disk.n_bytes
    opened = os.open
    monkeypatch.setattr(os, "open", lambda *_, **__: (_ for _ in ()).throw(OSError(code, os.strerror(code))))
    with pytest.raises(BadFile) as caught:
        folder.rows(nodes[0])
    monkeypatch.setattr(os, "open", opened)
    folder.disk.failed(caught.value)
    folder.settle()
    assert (folder.disk.n_bad, folder.disk.n_bytes) == (0, n_bytes)
    assert [node.stored is not None for node in nodes] == 4 * [stays]
    assert len(list(folder.disk._folder.glob("*.llmg"))) == 2
    after = Folder(folder.disk._folder)
    assert after.tree.find(np.concatenate([node.tokens for node in nodes]))[1] == 4 * N_ROWS
    after.disk.stop()


def test_a_file_that_somebody_deleted_takes_along_what_is_built_on_it(folder: Folder, tmp_path: Path) -> None:
    nodes = chain(folder, 4)
    for n in (2, 4):
        folder.disk.write(nodes[:n])
        folder.settle()
    nodes[0].stored.entry.path.unlink()
    with pytest.raises(BadFile) as caught:
        folder.rows(nodes[0])
    folder.disk.failed(caught.value)
    folder.settle()
    assert not folder.disk.entries
    assert list((tmp_path / "disk").glob("*.llmg")) == []
