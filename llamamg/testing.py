"""An engine without a model, for tests of plugins and of the engine itself: decoding and sampling are a Python function."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamamg.batch import Batch
from llamamg.blocks import N_ROWS, BlockLayout, Cells, Fence, Plane, StateCopy
from llamamg.config import Config, ContextConfig, ModelConfig, PluginsConfig
from llamamg.engine import Engine
from llamamg.errors import BatchError, NativeError
from llamamg.handover import HandoverError
from llamamg.kvcache import ON_DEVICE, KVCache, Removal
from llamamg.layout import Layout, layout_of, one_context
from llamamg.loading import assemble
from llamamg.model import ModelInfo
from llamamg.plugins import PluginSet
from llamamg.request import Event, Request, SamplingParams, Tokens
from llamamg.runner import Done, Output, Runner
from llamamg.sequence import Sequence
from llamamg.vocab import Vocabulary

NextToken = Callable[[Sequence, list[int]], int]
EOS = 2
UNKNOWN = -7  # what a cell holds that nobody has filled


def count_up(sequence: Sequence, so_far: list[int]) -> int:
    """A stand-in model: the next token is one more than the last, kept among the printable ones."""
    return 32 + (so_far[-1] + 1 - 32) % 95


class FakeSampler:
    """What the scheduler expects of a sampler, without a native chain."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.closed = False

    def close(self) -> None:
        """Remember that it was given back."""
        self.closed = True


class FakeVocabulary(Vocabulary):
    """256 tokens, each its own byte; 0 to 31 are special, 2 ends a generation."""

    def __init__(self) -> None:
        self.n_vocab, self.type, self.bos, self.eos, self.add_bos = 256, 2, 1, EOS, False
        self.chat_template = None
        self.bos_piece, self.eos_piece = "<s>", "</s>"

    def tokenize(self, text: str | bytes, add_special: bool, parse_special: bool) -> Tokens:
        data = text.encode() if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def piece(self, token: int, special: bool = True) -> bytes:
        if token < 32 and token != 10:
            return f"<{token}>".encode() if special else b""
        return bytes([token])

    def is_eog(self, token: int) -> bool:
        return token == EOS


class FakeKV(KVCache):
    """Sequence memory as sets of positions, with the rules of a plain, or of a hybrid, cache. Misuse is an AssertionError."""

    def __init__(
        self,
        n_seq: int,
        *,
        hybrid: bool = False,
        n_rs_seq: int = 0,
        snapshots: bool = True,
        layout: Layout | None = None,
    ) -> None:
        self.layout = layout or one_context(n_seq)
        n_ids = self.layout.prefill.stop or n_seq
        self.held: dict[int, list[int]] = {i: [] for i in range(n_ids)}
        self.rows: dict[int, list[int]] = {i: [] for i in range(n_ids)}  # cells as they are in memory, cut off or not
        self.cells_are_positions = True
        self.transfers: list[tuple[int, int]] = []
        self.fail_transfer: Callable[[int, int], bool] = lambda source, target: False
        self.computing: set[int] = set()  # contexts that are in flight: nobody may touch their memory
        self.n_swa, self.n_rs_seq, self.can_shift = 0, n_rs_seq, not hybrid
        self.removal = Removal.PART if not hybrid else Removal.BOUNDED if n_rs_seq else Removal.FULL
        self.copies: list[tuple[int, int]] = []
        self.can_snapshot = snapshots  # on the device
        self._snapshots = {}
        self.cut: set[int] = set()  # a recurrent state goes back at the next decode, and once only
        self.n_written: dict[int, int] = {}  # states of its last tokens that the last decode of a sequence left

    def put(self, seq_id: int, pos0: int, tokens: list[int]) -> None:
        """What a decode does; positions must follow each other."""
        assert pos0 == len(self.held[seq_id]), (
            f"sequence {seq_id} holds {len(self.held[seq_id])} tokens, got position {pos0}"
        )
        self.held[seq_id].extend(tokens)
        self.rows[seq_id][pos0 : pos0 + len(tokens)] = tokens
        self.cut.discard(seq_id)
        self.n_written[seq_id] = len(tokens)

    def _touch(self, seq_id: int) -> None:
        context = self.layout.context(seq_id)
        assert context not in self.computing, f"context {context} computes and its sequence {seq_id} is touched"

    def remove(self, seq_id: int, p0: int, p1: int = -1) -> bool:
        self._touch(seq_id)
        n = len(self.held[seq_id])
        begin, end = max(p0, 0), n if p1 < 0 else min(p1, n)
        if self.removal is not Removal.PART and 0 < begin < n:
            if begin < n - self.n_rs_seq or seq_id in self.cut:
                return False
            assert n - begin < self.n_written[seq_id], (
                f"sequence {seq_id} goes back by {n - begin} tokens to a state that its last decode did not write"
            )
            self.cut.add(seq_id)
        if begin == 0 and end == n:
            self.cut.discard(seq_id)
        del self.held[seq_id][begin:end]
        return True

    def copy(self, source: int, target: int) -> None:
        self._touch(source)
        assert self.layout.context(source) == self.layout.context(target)
        assert source not in self.cut, (
            f"sequence {source} goes back at its next decode, and libllama would not copy that"
        )
        self.held[target] = list(self.held[source])
        self.rows[target] = list(self.held[source])
        self.copies.append((source, target))

    def shift(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        assert self.can_shift

    def pos_min(self, seq_id: int) -> int:
        self._touch(seq_id)
        n = len(self.held[seq_id])
        return n - 1 if self.removal is not Removal.PART or n == 0 else 0

    def pos_max(self, seq_id: int) -> int:
        return len(self.held[seq_id]) - 1

    def clear(self) -> None:
        for tokens in self.held.values():
            tokens.clear()

    def save(self, seq_id: int, flags: int = 1) -> NDArray[np.uint8] | None:
        self._touch(seq_id)
        if flags & ON_DEVICE and not self.can_snapshot:
            return None
        return np.array(self.held[seq_id], np.int32).view(np.uint8)

    def size(self, seq_id: int, flags: int = 0) -> int:
        return 4 * len(self.held[seq_id])

    def restore(self, seq_id: int, data: NDArray[np.uint8], flags: int = 1) -> bool:
        self._touch(seq_id)
        self.held[seq_id] = data.view(np.int32).tolist()
        self.rows[seq_id] = list(self.held[seq_id])
        self.cut.discard(seq_id)
        self.n_written[seq_id] = 0
        return True

    def transfer(self, source: int, target: int, swap_bytes_max: int = 0) -> bool:
        """As ContextsKV's."""
        assert self.layout.context(source) != self.layout.context(target)
        if self.fail_transfer(source, target):
            self.held[target] = []
            raise HandoverError("told to fail")
        self.transfers.append((source, target))
        swap = 0 < 4 * len(self.held[target]) <= swap_bytes_max
        self.held[source], self.held[target] = (self.held[target] if swap else []), self.held[source]
        for seq_id in (source, target):
            self.rows[seq_id] = list(self.held[seq_id])
        self.cut = (self.cut - {source, target}) | ({target} if source in self.cut else set())
        return swap


class FakeCells(Cells):
    """The cells of a FakeKV: one plane, whose rows are the tokens themselves. `slow` runs before each copy."""

    def __init__(self, kv: FakeKV) -> None:
        self.kv, self.reason, self.layout = kv, "", BlockLayout(((26, 4, 1),))
        self.slow: Callable[[], None] = lambda: None
        self.appending = True
        self.n_state_bytes_max = 0
        self.detached: weakref.WeakSet[FakeStateCopy] = weakref.WeakSet()

    def planes(self, seq_id: int) -> list[Plane]:
        """One in host memory."""
        return [Plane(0, 4, 1 << 20, 1, "", 26)]

    def find(self, seq_id: int, pos: int, n: int) -> NDArray[np.int32]:
        """Cells are positions."""
        if pos + n > len(self.kv.held[seq_id]):
            raise NativeError(f"sequence {seq_id} does not hold positions {pos} to {pos + n - 1}")
        return np.arange(pos, pos + n, dtype=np.int32)

    def place(self, seq_id: int, pos: int, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """Rows of nobody, until they are copied in."""
        self.kv.put(seq_id, pos, [UNKNOWN] * len(tokens))
        return np.arange(pos, pos + len(tokens), dtype=np.int32)

    def adopt(self, seq_id: int, tokens: NDArray[np.int32]) -> int:
        """A few."""
        self.kv.put(seq_id, 0, [UNKNOWN] * min(len(tokens), 100))
        return min(len(tokens), 100)

    def copy(self, seq_id: int, to_host: bool, planes: range, cell: int, n: int, block: int, row: int) -> None:
        """Rows of four bytes."""
        self.slow()
        rows = np.ctypeslib.as_array((ctypes.c_int32 * N_ROWS).from_address(block))[row : row + n]
        held = self.kv.held[seq_id]
        if to_host:
            rows[:] = self.kv.rows[seq_id][cell : cell + n]
        else:
            held[cell : cell + n] = self.kv.rows[seq_id][cell : cell + n] = rows.tolist()

    def appends(self, seq_id: int, pos: int, n: int) -> bool:
        """Cells are positions."""
        return self.appending

    def fence(self, seq_id: int) -> Fence | None:
        """Nothing is computed asynchronously."""
        return None

    def limit_states(self, n_bytes: int, n_left: int) -> None:
        """Remember it."""
        self.n_state_bytes_max = n_bytes

    def state_bytes(self) -> int:
        """Those of living copies."""
        return sum(copy.n_bytes for copy in self.detached)

    def memory_free(self) -> list[int]:
        """In main memory."""
        return []

    def save_state(self, seq_id: int) -> StateCopy:
        """The tokens again."""
        return FakeStateCopy(self, seq_id, len(self.kv.held[seq_id]))

    def load_state(self, seq_id: int, state: NDArray[np.uint8]) -> StateCopy:
        """Checks that the state belongs to the cells, unless it is detached."""
        return FakeStateCopy(self, seq_id, len(state) // 4, to_host=False)


class FakeStateCopy(StateCopy):
    """A state of a FakeKV, which is its tokens."""

    def __init__(self, cells: FakeCells, seq_id: int, n: int, to_host: bool = True) -> None:
        self.n_bytes, self._seq_id, self._cells, self._to_host = 4 * n, seq_id, cells, to_host
        self._own: NDArray[np.uint8] | None = None  # memory of its own
        self.closed = False

    def copy(self, state: NDArray[np.uint8], begin: int, end: int) -> None:
        """To or from the sequence, or what it was when this was detached."""
        self.copy_at(state.ctypes.data + begin, begin, end)

    def copy_at(self, address: int, begin: int, end: int) -> None:
        """As `copy`."""
        self._cells.slow()
        there = np.ctypeslib.as_array((ctypes.c_uint8 * (end - begin)).from_address(address))
        if self._own is None:
            mine = np.array(self._cells.kv.held[self._seq_id], np.int32).view(np.uint8)
            assert len(mine) == self.n_bytes, "the state does not belong to the cells"
        else:
            mine = self._own
        if self._to_host:
            there[:] = mine[begin:end]
        elif self._own is not None:
            self._own[begin:end] = there

    def detach(self) -> bool:
        """While they fit."""
        if self.n_bytes + self._cells.state_bytes() > self._cells.n_state_bytes_max:
            return False
        held = self._cells.kv.held[self._seq_id]
        self._own = np.array(held, np.int32).view(np.uint8) if self._to_host else np.zeros(self.n_bytes, np.uint8)
        self._cells.detached.add(self)
        return True

    def put(self, seq_id: int) -> None:
        """Checks that it belongs to the cells, and forgets those behind it."""
        assert self._own is not None
        kv, n = self._cells.kv, self.n_bytes // 4
        if kv.held[seq_id][:n] != self._own.view(np.int32).tolist():
            raise NativeError("this state is of another sequence")
        del kv.held[seq_id][n:]
        kv.cut.discard(seq_id)

    def close(self) -> None:
        """Remember that."""
        self.closed = True


@dataclass(slots=True)
class FakeRunner(Runner):
    """Computes batches with `next_token`. `batches` records the shapes; `fail` may raise a BatchError for a batch."""

    kv: FakeKV
    next_token: NextToken = count_up
    n_batch: int = 64
    n_ubatch: int = 16
    batches: list[list[tuple[int, int, int, int]]] = field(
        default_factory=list
    )  # rows of (seq_id, pos0, n_tokens, n_logits)
    fail: Callable[[Batch], BatchError | None] = lambda batch: None
    closed: bool = False
    aborted: bool = False
    pick: Callable[[int], int] = lambda n: 0  # which of n flights ends first
    n_most: int = 0  # flights at once, so far
    _in_flight: list[Any] = field(default_factory=list)

    @property
    def n_contexts(self) -> int:  # type: ignore[override]
        return self.kv.layout.n_contexts

    @property
    def n_in_flight(self) -> int:
        return len(self._in_flight)

    def is_free(self, context: int) -> bool:
        return context not in self.kv.computing

    def _fly(self, contexts: tuple[int, ...], flight: Any) -> None:
        for context in contexts:
            assert context not in self.kv.computing, f"context {context} gets a second flight"
            self.kv.computing.add(context)
        self._in_flight.append((contexts, flight))
        self.n_most = max(self.n_most, len(self._in_flight))

    def run(self, contexts: tuple[int, ...], job: Callable[[], Any], finished: Callable[[Any, Any], None]) -> None:
        self._fly(contexts, (job, finished))

    def settle(self) -> None:
        """Nothing runs on threads."""

    def wake(self) -> None:
        """Nobody waits."""

    def submit(self, batch: Batch) -> None:
        assert batch.rows
        assert batch.n_tokens <= self.n_batch
        for row in batch.rows:
            assert self.kv.layout.context(row.sequence.slot.seq_id) == batch.group == row.sequence.slot.context
        error = self.fail(batch)
        if error is not None and self.n_contexts == 1:
            raise error
        if error is not None:
            self._fly((batch.group,), Done(batch, [], 0.001, error))
            return
        for row in batch.rows:
            self.kv.put(row.sequence.slot.seq_id, row.pos0, [int(t) for t in row.tokens])
        self.batches.append([(row.sequence.slot.seq_id, row.pos0, len(row), row.n_logits) for row in batch.rows])
        self._fly((batch.group,), batch)

    def collect(self) -> Done | None:
        if not self._in_flight:
            return None
        contexts, flight = self._in_flight.pop(self.pick(len(self._in_flight)))
        self.kv.computing.difference_update(contexts)
        if isinstance(flight, Done):
            return flight
        if isinstance(flight, tuple):
            self._job(*flight)
            return None
        batch: Batch = flight
        return Done(batch, [self._output(row) for row in batch.rows if row.n_logits], 0.001)

    def _job(self, job: Callable[[], Any], finished: Callable[[Any, Any], None]) -> None:
        try:
            result = job()
        except HandoverError as error:
            finished(None, error)
        else:
            finished(result, None)

    def _output(self, row: Any) -> Output:
        held = self.kv.held[row.sequence.slot.seq_id]
        tokens: list[int] = []
        draft = list(row.tokens)[len(row) - row.n_logits + 1 :]
        for i in range(row.n_logits):
            tokens.append(self.next_token(row.sequence, held[: row.pos0 + len(row) - row.n_logits + i + 1]))
            if i >= len(draft) or tokens[-1] != draft[i]:
                break
        return Output(row, tokens)

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        self.closed = True


def model_info() -> ModelInfo:
    """Facts of the stand-in model."""
    return ModelInfo("fake", "fake.gguf", "fake", "F32", 1, 1, 4096, 8, 1, 256, 2, 0, False, False, None)


def fake_engine(
    n_slots: int = 2,
    *,
    n_ctx_slot: int = 512,
    hybrid: bool = False,
    n_rs_seq: int = 0,
    snapshots: bool = True,
    next_token: NextToken = count_up,
    plugins: PluginSet | None = None,
    config: Config | None = None,
    n_batch: int = 64,
    n_ubatch: int = 16,
    n_groups: int = 1,
    n_prefill_slots: int = 0,
) -> tuple[Engine, FakeRunner, list[tuple[int, Event]]]:
    """An engine whose thread is not started (call `engine.step()`), its runner, and the list its events go to."""
    config = config or Config(ModelConfig(Path("fake.gguf")), plugins=PluginsConfig(none=True))
    context: ContextConfig = replace(
        config.context, n_parallel=n_slots, n_groups=n_groups, n_prefill_slots=n_prefill_slots
    )
    config = replace(config, context=context)
    if plugins is None:
        plugins = PluginSet.discover(config.plugins)
        config = plugins.configure(config, [])
    layout = layout_of(config.context)
    kv = FakeKV(n_slots, hybrid=hybrid, n_rs_seq=n_rs_seq, snapshots=snapshots, layout=layout)
    runner = FakeRunner(kv, next_token, n_batch, n_ubatch)

    def new_sampler(request: Request) -> Any:
        return FakeSampler(request.sampling)

    engine = assemble(
        config,
        plugins,
        runner,
        kv,
        FakeVocabulary(),
        model_info(),
        n_ctx_slot=n_ctx_slot,
        new_sampler=new_sampler,
        layout=layout,
    )
    events: list[tuple[int, Event]] = []
    engine.deliver = events.extend
    engine.cells = FakeCells(kv)
    return engine, runner, events


def ask(text: str | list[int], **fields: Any) -> Request:
    """A request for the stand-in model; fields of SamplingParams may be given beside those of Request."""
    names = SamplingParams.__dataclass_fields__
    sampling = SamplingParams(**{key: fields.pop(key) for key in list(fields) if key in names})
    tokens = list(text.encode()) if isinstance(text, str) else text
    return Request(np.array(tokens, np.int32), sampling, **fields)


def run(engine: Engine, n_steps_max: int = 10_000) -> int:
    """Step until nothing is left to do; how many steps did something."""
    n = 0
    while engine.step():
        n += 1
        if n >= n_steps_max:
            raise AssertionError(f"still busy after {n} steps")
    return n
