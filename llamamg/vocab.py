"""Tokens to bytes and back. Works on a loaded model, or on the vocabulary alone (the parse process uses that)."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

from llamamg.errors import LoadError
from llamamg.request import Tokens


class Vocabulary:
    """A model's tokenizer. Thread-safe: libllama only reads the vocabulary, and the caches only grow."""

    def __init__(self, llama: Any, model: Any, *, owned: bool = False) -> None:
        self._llama, self._model, self._owned = llama, model, owned
        self.handle = llama.llama_model_get_vocab(model)
        self.n_vocab: int = llama.llama_vocab_n_tokens(self.handle)
        self.type: int = llama.llama_vocab_type(self.handle)
        self.bos: int = llama.llama_vocab_bos(self.handle)
        self.eos: int = llama.llama_vocab_eos(self.handle)
        self.add_bos: bool = bool(llama.llama_vocab_get_add_bos(self.handle))
        template = llama.llama_model_chat_template(model, None)
        self.chat_template: str | None = template.decode() if template else None
        self._shown: dict[int, bytes] = {}  # special tokens rendered
        self._plain: dict[int, bytes] = {}  # special tokens empty
        self._eog: dict[int, bool] = {}
        self.bos_piece = self.piece(self.bos).decode(errors="replace") if self.bos >= 0 else ""
        self.eos_piece = self.piece(self.eos).decode(errors="replace") if self.eos >= 0 else ""

    @classmethod
    def open(cls, path: Path) -> Vocabulary:
        """Load only the vocabulary of `path`: no tensor is read."""
        import llama_cpp as llama

        params = llama.llama_model_default_params()
        params.vocab_only = True
        model = llama.llama_model_load_from_file(str(path).encode(), params)
        if not model:
            raise LoadError(f"{path} holds no vocabulary that this build of llama.cpp can read")
        return cls(llama, model, owned=True)

    def close(self) -> None:
        """Free a vocabulary made by `open`."""
        if self._owned and self._model:
            self._llama.llama_model_free(self._model)
            self._model = None

    def tokenize(self, text: str | bytes, add_special: bool, parse_special: bool) -> Tokens:
        """The tokens of `text` as int32 [n]."""
        data = text.encode("utf-8", "replace") if isinstance(text, str) else text
        n_max = len(data) // 2 + 16
        while True:
            out = np.empty(n_max, np.int32)
            pointer = out.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
            n = self._llama.llama_tokenize(self.handle, data, len(data), pointer, n_max, add_special, parse_special)
            if n >= 0:
                tokens: Tokens = out[:n].copy()
                return tokens
            if n == -(2**31):
                raise ValueError("the text has more tokens than fit into 31 bits")
            n_max = -n

    def _render(self, token: int, special: bool) -> bytes:
        size = 32
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = self._llama.llama_token_to_piece(self.handle, token, buffer, size, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    def piece(self, token: int, special: bool = True) -> bytes:
        """The bytes of one token; a special token is empty unless `special`."""
        cache = self._shown if special else self._plain
        found = cache.get(token)
        if found is None:
            found = cache[token] = self._render(token, special)
        return found

    def detokenize(self, tokens: Any) -> str:
        """The text of tokens, special ones rendered, invalid UTF-8 replaced."""
        return b"".join(self.piece(int(t)) for t in tokens).decode("utf-8", "replace")

    def is_eog(self, token: int) -> bool:
        """Whether `token` ends a generation."""
        found = self._eog.get(token)
        if found is None:
            found = self._eog[token] = bool(self._llama.llama_vocab_is_eog(self.handle, token))
        return found

    def eog_tokens(self) -> list[int]:
        """Every token that ends a generation (a scan, done once for `ignore_eos`)."""
        return [t for t in range(self.n_vocab) if self._llama.llama_vocab_is_eog(self.handle, t)]

    def suppressed_tokens(self) -> list[int]:
        """Tokens the model's metadata forbids to sample."""
        n = ctypes.c_int32(0)
        pointer = self._llama.llama_vocab_get_suppress_tokens(self.handle, ctypes.byref(n))
        return [int(pointer[i]) for i in range(n.value)] if n.value else []
