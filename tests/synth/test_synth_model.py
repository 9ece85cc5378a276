"""The micro model inside libllama: it loads, talks, and its sparse selection acts."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from llamamg.library import Library
from llamamg.synth.preset import MICRO

Logits = np.ndarray  # float32[n_vocab] or float32[n_tokens, n_vocab]
N_SPEAKABLE = 50_256
PROMPT = np.random.default_rng(0).integers(0, N_SPEAKABLE, 200).tolist()


class Session:
    """One model and one context of two sequences, driven through the low-level API."""

    def __init__(self, llama: ModuleType, path: Path) -> None:
        self.llama = llama
        params = llama.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = llama.llama_model_load_from_file(str(path).encode(), params)
        assert self.model, f"libllama refused {path}"
        context = llama.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch, context.n_seq_max = 1024, 512, 512, 2
        context.n_threads = context.n_threads_batch = 1
        self.context = llama.llama_init_from_model(self.model, context)
        assert self.context
        self.vocab = llama.llama_model_get_vocab(self.model)
        self.n_vocab = llama.llama_vocab_n_tokens(self.vocab)

    def decode(self, rows: Sequence[tuple[int, int, int]]) -> Logits:
        """Decodes (token, position, sequence) rows as one batch: float32[n_rows, n_vocab]."""
        batch = self.llama.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, 1
            batch.seq_id[i][0] = sequence
        code = self.llama.llama_decode(self.context, batch)
        self.llama.llama_batch_free(batch)
        assert code == 0
        rows_out = range(len(rows))
        pointers = [self.llama.llama_get_logits_ith(self.context, i) for i in rows_out]
        return np.stack([np.ctypeslib.as_array(pointer, (self.n_vocab,)) for pointer in pointers])

    def prefill(self, tokens: Sequence[int], sequence: int = 0) -> Logits:
        return self.decode([(token, i, sequence) for i, token in enumerate(tokens)])

    def greedy(self, prompt: Sequence[int], n_predict: int) -> tuple[list[int], list[float]]:
        """Tokens and the gap between the two best logits at each."""
        logits = self.prefill(prompt)[-1]
        tokens, margins = [], []
        for i in range(n_predict):
            second, first = np.partition(logits, -2)[-2:]
            margins.append(float(first - second))
            tokens.append(int(logits.argmax()))
            logits = self.decode([(tokens[-1], len(prompt) + i, 0)])[0]
        return tokens, margins

    def piece(self, token: int) -> bytes:
        buffer = ctypes.create_string_buffer(64)
        n_bytes = self.llama.llama_token_to_piece(self.vocab, token, buffer, 64, 0, True)
        return buffer.raw[:n_bytes]

    def clear(self) -> None:
        self.llama.llama_memory_clear(self.llama.llama_get_memory(self.context), True)

    def close(self) -> None:
        self.llama.llama_free(self.context)
        self.llama.llama_model_free(self.model)


@contextmanager
def opened(library: Library, path: Path) -> Iterator[Session]:
    session = Session(library.llama, path)
    try:
        yield session
    finally:
        session.close()


@pytest.fixture(scope="module")
def shared_session(library: Library, micro_model: Path) -> Iterator[Session]:
    with opened(library, micro_model) as session:
        yield session


@pytest.fixture
def session(shared_session: Session) -> Session:
    shared_session.clear()
    return shared_session


def test_generation_varies(session: Session) -> None:
    tokens, margins = session.greedy(PROMPT[:20], 20)
    assert len(set(tokens)) >= 15
    assert max(tokens) < N_SPEAKABLE
    assert np.median(margins) > 0.2


def test_logits_are_finite_and_spread(session: Session) -> None:
    logits = session.prefill(PROMPT)[:, :N_SPEAKABLE]
    assert np.isfinite(logits).all()
    assert 2 < logits.std(axis=1).min() < logits.std(axis=1).max() < 8


@pytest.mark.parametrize("weights", ["q8_0", "f32"])
def test_other_weight_types_decode(library: Library, synth_model: Callable[..., Path], weights: str) -> None:
    with opened(library, synth_model(weights=weights)) as session:
        tokens, _ = session.greedy(PROMPT[:20], 20)
        assert len(set(tokens)) >= 15


def test_selection_acts_beyond_its_budget(session: Session, library: Library, synth_model: Callable[..., Path]) -> None:
    sparse = session.prefill(PROMPT)
    with opened(library, synth_model(dense=True)) as dense_session:
        dense = dense_session.prefill(PROMPT)
    difference = np.abs(sparse - dense).max(axis=1)
    n_visible_at_most = MICRO.index_top_k + MICRO.block_size - 1
    assert difference[:n_visible_at_most].max() == 0
    assert difference[n_visible_at_most + MICRO.block_size :].min() > 0.1


def test_an_early_token_reaches_the_end(session: Session) -> None:
    before = session.prefill(PROMPT)[-1].copy()
    session.clear()
    after = session.prefill([(PROMPT[0] + 1) % N_SPEAKABLE, *PROMPT[1:]])[-1]
    assert np.abs(after - before).max() > 0.1


def test_two_sequences_are_independent(session: Session) -> None:
    alone = session.prefill(PROMPT[:100])[-1].copy()
    session.clear()
    other = [(token, i, 1) for i, token in enumerate(reversed(PROMPT[:100]))]
    mixed = session.decode([(token, i, 0) for i, token in enumerate(PROMPT[:100])] + other)
    assert np.abs(mixed[99] - alone).max() < 0.5 < np.abs(mixed[199] - alone).max()
    assert mixed[99].argmax() == alone.argmax()
    step = session.decode([(5, 100, 0), (5, 100, 1)])
    assert np.abs(step[0] - step[1]).max() > 0.1


def test_text_survives_the_tokenizer(session: Session) -> None:
    text = "Grüße, 你好 🙂\n".encode()
    tokens = (session.llama.llama_token * 64)()
    n = session.llama.llama_tokenize(session.vocab, text, len(text), tokens, 64, True, False)
    assert 0 < n <= len(text)
    assert b"".join(session.piece(token) for token in tokens[:n]) == text


def test_chat_markers_end_generation(session: Session) -> None:
    marker = b"<|im_end|>"
    tokens = (session.llama.llama_token * 8)()
    assert session.llama.llama_tokenize(session.vocab, marker, len(marker), tokens, 8, False, True) == 1
    assert session.llama.llama_vocab_is_eog(session.vocab, tokens[0])
