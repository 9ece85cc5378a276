"""Saving a slot to a file and loading it again. The copying and the file are a thread's work; other slots go on decoding."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from llamamg.blocks import N_ROWS, Bytes, Cells, Indexes, StateCopy
from llamamg.kept import host_bytes
from llamamg.slot import Checkpoint, Slot
from llamamg.statefile import Header, StateFile, StateFileError, StateInfo, check_identity, model_identity
from llamamg.statefile.write import write_state_file
from llamamg.transfer import Piece, PlaceWork, Transfer, Work, Workers, pick_copier

if TYPE_CHECKING:
    from llamamg.config import Config
    from llamamg.request import Tokens

N_PLACE = 8 * N_ROWS  # cells given out between two steps
RETRY_S = 0.0005  # until the context is between two batches


class SlotBusy(Exception):
    """A sequence runs in it: try again later."""


class NotCopied(RuntimeError):
    """This model's memory cannot be copied; the sentence says why."""


class _Engine(Protocol):
    """What is used of the engine."""

    def call(self, function: Any) -> Future[Any]: ...


@dataclass(slots=True)
class _Content:
    """A slot in host memory."""

    tokens: Tokens
    blocks: list[Bytes]
    states: list[tuple[Checkpoint, Bytes]]


@dataclass(slots=True)
class _Reading:
    """A slot on its way to host memory; `tail` is the state behind its last token, `copying` it where it is detached."""

    tokens: Tokens
    blocks: list[Bytes]
    states: list[Checkpoint]
    transfer: Transfer
    tail: Checkpoint | None = None
    copying: StateCopy | None = None


def save_slot(engine: _Engine, id_slot: int, path: Path) -> tuple[int, int]:
    """Save an idle slot; tokens and bytes written. Raises SlotBusy, NotCopied, OSError, RuntimeError."""
    job = _Job(engine, id_slot)
    content = job.read()
    header = job.header(content)
    n_bytes = write_state_file(path, header, content.tokens, [*content.blocks, *[state for _, state in content.states]])
    return len(content.tokens), n_bytes


def restore_slot(engine: _Engine, id_slot: int, path: Path) -> tuple[int, int]:
    """Load a file into an idle slot; tokens and bytes read. All of the file is checked before the slot changes.

    Raises SlotBusy, NotCopied, StateFileError, OSError, RuntimeError (the slot is empty then).
    """
    job = _Job(engine, id_slot)
    with StateFile(path) as file:
        header = file.header
        check_identity(header, job.identity, job.cells.layout.planes, N_ROWS)
        if header.start != 0:
            raise StateFileError("it is a part of a session in the cache's folder, not a saved slot")
        if header.n_tokens > job.n_ctx:
            raise StateFileError(f"it has {header.n_tokens} tokens, and a slot has room for {job.n_ctx}")
        blocks = [np.empty(header.n_block_bytes, np.uint8) for _ in range(header.n_blocks)]
        for i, block in enumerate(blocks):
            file.read_block(i, block)
        states = []
        for i, info in enumerate(header.states):
            data = np.empty(info.n_bytes, np.uint8)
            file.read_state(i, data)
            states.append((Checkpoint(info.n_tokens, info.pos_min, info.pos_max, -1, data), data))
        tokens, n_bytes = file.tokens(), file.n_bytes
    job.write(_Content(tokens, blocks, states))
    return len(tokens), n_bytes


def erase_slot(engine: _Engine, id_slot: int) -> int:
    """Forget what an idle slot holds; how many tokens. Raises SlotBusy."""

    def erase(engine: Any) -> int:
        slot = _idle(engine, id_slot)
        n = len(slot.tokens)
        engine.scheduler.clear(slot)
        return n

    return int(engine.call(erase).result())


def _idle(engine: Any, id_slot: int) -> Slot:
    slot: Slot = engine.slots[id_slot]
    if slot.busy or not engine.runner.is_free(slot.context) or not engine.scheduler.is_settled(slot.context):
        raise SlotBusy
    return slot


def _whole(copying: StateCopy, data: Bytes) -> None:
    try:
        copying.copy(data, 0, copying.n_bytes)
    finally:
        copying.close()


class _Job:
    """One slot, reserved while it is copied: requests that want it wait."""

    def __init__(self, engine: _Engine, id_slot: int) -> None:
        self._engine, self._id = engine, id_slot
        self.cells, config, self.model, self.n_ctx, self.needs_state = engine.call(_facts).result()
        self.identity = model_identity(config)  # reads the model's file: not on the engine thread
        self._copier = pick_copier(self.cells)[0]

    def header(self, content: _Content) -> Header:
        """The header of a file with this content."""
        return Header(
            self.identity,
            self.cells.layout.planes,
            N_ROWS,
            0,
            len(content.tokens),
            tuple(StateInfo(c.n_tokens, c.pos_min, c.pos_max, len(state)) for c, state in content.states),
            self.model,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )

    def read(self) -> _Content:
        """Copy the slot to host memory."""
        workers = Workers(1)
        try:
            reading: _Reading = self._engine.call(lambda engine: self._begin_read(engine, workers)).result()
            reading.transfer.wait()
        finally:
            workers.stop()
        self._engine.call(lambda engine: self._end(engine)).result()
        if reading.transfer.error is not None:
            raise RuntimeError(f"the slot could not be copied: {reading.transfer.error}")
        states = []
        for checkpoint in reading.states:
            data = host_bytes(checkpoint.data)
            if data is not None:
                states.append((checkpoint, data))
        if reading.tail is not None:
            assert isinstance(reading.tail.data, np.ndarray)
            if reading.copying is not None:
                _whole(reading.copying, reading.tail.data)
            states.append((reading.tail, reading.tail.data))
        return _Content(reading.tokens, reading.blocks, states)

    def _begin_read(self, engine: Any, workers: Workers) -> _Reading:
        slot = _idle(engine, self._id)
        tokens = slot.tokens.view().copy()
        n = len(tokens)
        blocks = [np.zeros(self.cells.layout.n_block_bytes, np.uint8) for _ in range(-(-n // N_ROWS))]
        where = self.cells.find(slot.seq_id, 0, n) if n else np.empty(0, np.int32)
        transfer = Transfer(slot.seq_id, True, self.cells.fence(slot.seq_id))
        reading = _Reading(tokens, blocks, list(slot.checkpoints), transfer)
        if n and engine.kv.needs_checkpoints and all(c.n_tokens != n for c in reading.states):
            copying = self.cells.save_state(slot.seq_id)
            data = np.empty(copying.n_bytes, np.uint8)
            reading.tail = Checkpoint(n, engine.kv.pos_min(slot.seq_id), engine.kv.pos_max(slot.seq_id), -1, data)
            if copying.detach():
                reading.copying = copying
            else:
                _whole(copying, data)  # at once: a decode of others may swap the rows in which recurrent states lie
        pieces = [
            Piece(i * N_ROWS, where[i * N_ROWS : (i + 1) * N_ROWS], block.ctypes.data, 0)
            for i, block in enumerate(blocks)
        ]
        slot.restoring = True
        workers.add(transfer, self._copier.works(slot.seq_id, True, pieces))
        transfer.seal()
        return reading

    def _end(self, engine: Any) -> None:
        engine.slots[self._id].restoring = False

    def write(self, content: _Content) -> None:
        """Put the content into the slot."""
        workers, n = Workers(1), len(content.tokens)
        try:
            transfer, appends = self._engine.call(lambda engine: self._begin_write(engine, n)).result()
            error: Exception | None = None
            try:
                if appends:
                    workers.add(transfer, [PlaceWork(self.cells, transfer.seq_id, content.tokens, 0)])
                    workers.add(transfer, self._works(transfer, content, np.arange(n, dtype=np.int32), 0, n))
                for pos in range(0, 0 if appends else n, N_PLACE):
                    self._when_free(partial(self._place, workers, transfer, content, pos, min(pos + N_PLACE, n)))
                transfer.seal()
                transfer.wait()
                if transfer.error is None:
                    self._load(transfer, content)
            except Exception as failed:
                error = failed
            transfer.seal()
            transfer.wait()
        finally:
            workers.stop()
        error = error or transfer.error
        self._engine.call(lambda engine: self._finish(engine, content, error)).result()
        if error is not None:
            raise RuntimeError(f"the slot could not be filled: {error}")

    def _when_free(self, function: Callable[[Any], None]) -> None:
        """Run `function` on the engine thread while nothing is computed in the slot's context: it changes its memory."""

        def tried(engine: Any) -> bool:
            if not engine.runner.is_free(engine.slots[self._id].context):
                return False
            function(engine)
            return True

        while not self._engine.call(tried).result():
            time.sleep(RETRY_S)

    def _begin_write(self, engine: Any, n: int) -> tuple[Transfer, bool]:
        slot = _idle(engine, self._id)
        engine.scheduler.clear(slot)
        slot.restoring = True
        appends = n > 0 and self.cells.appends(slot.seq_id, 0, n)
        return Transfer(slot.seq_id, False, self.cells.fence(slot.seq_id)), appends

    def _place(self, workers: Workers, transfer: Transfer, content: _Content, pos: int, end: int, engine: Any) -> None:
        where = self.cells.place(transfer.seq_id, pos, content.tokens[pos:end])
        workers.add(transfer, self._works(transfer, content, where, pos, end))

    def _works(self, transfer: Transfer, content: _Content, where: Indexes, pos: int, end: int) -> list[Work]:
        pieces = [
            Piece(at, where[at - pos : min(at + N_ROWS, end) - pos], content.blocks[at // N_ROWS].ctypes.data, 0)
            for at in range(pos, end, N_ROWS)
        ]
        return self._copier.works(transfer.seq_id, False, pieces)

    def _load(self, transfer: Transfer, content: _Content) -> None:
        n = len(content.tokens)
        if not n or not self.needs_state:
            return
        data = next((state for c, state in content.states if c.n_tokens == n), None)
        if data is None:
            raise StateFileError("it lacks the state behind its last token")
        staged: list[StateCopy] = []

        def begin(engine: Any) -> None:
            copying = self.cells.load_state(transfer.seq_id, data)
            if copying.detach():
                staged.append(copying)
            else:
                _whole(copying, data)

        self._when_free(begin)
        for copying in staged:
            copying.copy(data, 0, copying.n_bytes)
            self._when_free(lambda engine, copying=copying: copying.put(transfer.seq_id))  # type: ignore[misc]

    def _finish(self, engine: Any, content: _Content, error: Exception | None) -> None:
        slot: Slot = engine.slots[self._id]
        self._end(engine)
        if error is not None:
            engine.scheduler.clear(slot)
            return
        slot.tokens.keep(0)
        slot.tokens.extend(content.tokens)
        slot.checkpoints = [c for c, _ in content.states if engine.kv.needs_checkpoints]
        slot.t_last_used = time.perf_counter()


def _facts(engine: Any) -> tuple[Cells, Config, str, int, bool]:
    cells: Cells | None = engine.cells
    if cells is None or cells.reason:
        raise NotCopied(cells.reason if cells is not None else "this native build is too old: run `llamamg build`")
    return cells, engine.config, engine.model.name, engine.n_ctx_slot, engine.kv.needs_checkpoints
