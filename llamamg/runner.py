"""The only caller of llama_decode: batches in, sampled tokens out."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from llamamg.abi import ffi
from llamamg.batch import Batch, Row
from llamamg.errors import BatchError, KVFull
from llamamg.request import TokenProb
from llamamg.sampler import RowSampler


@dataclass(slots=True)
class Output:
    """What one row gave: the tokens it adds to its sequence (several when a draft was accepted)."""

    row: Row
    tokens: list[int]
    probs: list[TokenProb] = field(default_factory=list)


@dataclass(slots=True)
class Done:
    """A computed batch, or one that was in flight when `error` happened."""

    batch: Batch
    outputs: list[Output]
    elapsed_s: float
    error: BatchError | None = None


class Runner(Protocol):
    """Computes batches, one at a time in each of its contexts. Used by the engine thread only."""

    n_batch: int
    n_ubatch: int
    n_contexts: int

    @property
    def n_in_flight(self) -> int:
        """Batches and jobs submitted and not collected."""

    def is_free(self, context: int) -> bool:
        """Whether nothing is in flight in a context, so that it takes a batch and its memory may be changed."""

    def submit(self, batch: Batch) -> None:
        """Hand a batch to the context `batch.group`. May raise KVFull or BatchError; then nothing of it is in flight."""

    def start(self) -> None:
        """Everything that may be in flight now was submitted: begin what was held back to see whether more comes."""

    def run(self, contexts: tuple[int, ...], job: Callable[[], Any], finished: Callable[[Any, Any], None]) -> None:
        """Do something else with free contexts; `finished(result, error)` is called while collecting."""

    def settle(self) -> None:
        """Wait until no context computes. What is in flight stays to be collected."""

    def collect(self) -> Done | None:
        """Wait for whatever ends first and sample it. None when nothing is in flight, a job ended or `wake` was called."""

    def wake(self) -> None:
        """End a `collect` that waits. Any thread may call it."""

    def abort(self) -> None:
        """Make a decode that is running end as soon as it can, and every later one too. Any thread may call it."""

    def close(self) -> None:
        """Free the context."""


ABORTED = 2  # llama_decode: the abort callback said so
_MESSAGES = {ABORTED: "the computation was aborted", -1: "Invalid input batch."}


class ModelRunner:
    """One context, on the thread that calls. llama_decode returns at once on a GPU and blocks on a CPU; sampling waits for
    the logits. `first_seq_id` is the id of a slot that the context itself calls 0.
    """

    n_contexts = 1

    def __init__(
        self,
        llama: Any,
        mg: Any,
        context: Any,
        n_batch: int,
        n_ubatch: int,
        n_outputs_max: int,
        first_seq_id: int = 0,
    ) -> None:
        self._llama, self._mg, self._first = llama, mg, first_seq_id
        self.context = context
        mg.lib.mg_abort_install(ffi.cast("void *", context))
        mg.lib.mg_abort_set(0)  # an engine before this one may have been aborted when it was through already
        self.n_batch, self.n_ubatch = n_batch, n_ubatch
        self._sampler = RowSampler(mg, context, max(n_outputs_max, 1))
        self._in_flight: deque[tuple[Batch, float]] = deque()
        self._token = np.zeros(n_batch, np.int32)
        self._pos = np.zeros(n_batch, np.int32)
        self._n_seq_id = np.ones(n_batch, np.int32)
        self._seq_id = np.zeros(n_batch, np.int32)
        # libllama wants one pointer per token; they never change, only what they point at does.
        base, step = self._seq_id.ctypes.data, self._seq_id.itemsize
        self._seq_id_pointers = np.array([base + i * step for i in range(n_batch)], np.uintp)
        self._logits = np.zeros(n_batch, np.int8)
        self._batch = self._bind()

    def _bind(self) -> Any:
        batch = self._llama.llama_batch()
        int32 = ctypes.POINTER(ctypes.c_int32)
        batch.token = self._token.ctypes.data_as(int32)
        batch.pos = self._pos.ctypes.data_as(int32)
        batch.n_seq_id = self._n_seq_id.ctypes.data_as(int32)
        batch.seq_id = self._seq_id_pointers.ctypes.data_as(ctypes.POINTER(int32))
        batch.logits = self._logits.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))
        return batch

    @property
    def n_in_flight(self) -> int:
        return len(self._in_flight)

    def is_free(self, context: int) -> bool:
        return not self._in_flight

    def start(self) -> None:
        pass

    def run(self, contexts: tuple[int, ...], job: Callable[[], Any], finished: Callable[[Any, Any], None]) -> None:
        finished(job(), None)

    def settle(self) -> None:
        pass

    def synchronize(self) -> None:
        """Wait until the device has computed everything handed to it."""
        self._llama.llama_synchronize(self.context)

    def wake(self) -> None:
        pass

    def submit(self, batch: Batch) -> None:
        n, first = 0, self._first
        token, pos, seq_id, logits = self._token, self._pos, self._seq_id, self._logits
        for row in batch.rows:
            size = len(row.tokens)
            end = n + size
            if size == 1:
                token[n], pos[n] = row.tokens[0], row.pos0
                seq_id[n], logits[n] = row.sequence.slot.seq_id - first, row.n_logits
            else:
                token[n:end] = row.tokens
                pos[n:end] = range(row.pos0, row.pos0 + size) if size < 64 else np.arange(row.pos0, row.pos0 + size)
                seq_id[n:end] = row.sequence.slot.seq_id - first
                logits[n:end] = 0
                if row.n_logits:
                    logits[end - row.n_logits : end] = 1
            n = end
        self._batch.n_tokens = n
        started = time.perf_counter()
        code = self._llama.llama_decode(self.context, self._batch)
        if code == 1:
            raise KVFull(code, f"no room in the KV cache for a batch of {n} tokens")
        if code != 0:
            raise BatchError(code, _MESSAGES.get(code, "Compute error."))
        self._in_flight.append((batch, started))

    def collect(self) -> Done | None:
        if not self._in_flight:
            return None
        batch, started = self._in_flight.popleft()
        outputs = self._sample(batch)
        return Done(batch, outputs, time.perf_counter() - started)

    def _sample(self, batch: Batch) -> list[Output]:
        plain: list[Row] = []
        index: list[int] = []
        special: list[tuple[Row, int]] = []
        end = 0
        for row in batch.rows:
            end += len(row.tokens)
            if not row.n_logits:
                continue
            if row.n_logits == 1 and not row.sequence.sampler.params.n_probs:
                plain.append(row)
                index.append(end - 1)
            else:
                special.append((row, end - row.n_logits))
        outputs = []
        if plain:
            tokens = self._sampler.sample([row.sequence.sampler for row in plain], index)
            outputs = [Output(row, [token]) for row, token in zip(plain, tokens, strict=True)]
        outputs += [self._sample_run(row, first) for row, first in special]
        return outputs

    def _sample_run(self, row: Row, first: int) -> Output:
        """Sample a row's outputs one after the other, while they agree with the draft that was computed."""
        sampler = row.sequence.sampler
        params = sampler.params
        out = Output(row, [])
        draft = [int(token) for token in row.tokens[len(row.tokens) - row.n_logits + 1 :]]
        if not params.n_probs and self._sampler.has_run:
            out.tokens = self._sampler.sample_run(sampler, first, draft)
            return out
        for i in range(row.n_logits):
            if params.n_probs and params.post_sampling_probs:
                prob = self._sampler.sample_with_probs(sampler, first + i, params.n_probs)
                out.probs.append(prob)
                token = prob.id
            else:
                token = self._sampler.sample([sampler], [first + i])[0]
                if params.n_probs and token >= 0:
                    out.probs.append(self._sampler.logprobs(first + i, token, params.n_probs))
            out.tokens.append(token)
            if i >= len(draft) or token != draft[i]:
                break
        return out

    def abort(self) -> None:
        self._mg.lib.mg_abort_set(1)

    def close(self) -> None:
        if self.context:
            self._llama.llama_synchronize(self.context)
            self._llama.llama_free(self.context)
            self.context = None
            self._mg.lib.mg_abort_set(0)
