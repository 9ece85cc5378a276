"""Errors whose text is meant for the person at the keyboard: a sentence that says what to do."""

from __future__ import annotations


class LoadError(RuntimeError):
    """The library, the model or the context could not be had."""


class BatchError(RuntimeError):
    """libllama refused or failed a batch. `code` is llama_decode's return value."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class KVFull(BatchError):
    """No room in the KV cache for this batch: free a slot or send a smaller one."""


class NativeError(RuntimeError):
    """A call into libllamamg failed; the text is its own."""
