"""A sequence's state, as libllama writes it for contexts of n sequences, made fit for contexts of another number.

A KV cache with one stream per sequence is written as a count of streams, a count of cells for each stream, and the cells
behind their count. Only one stream of a single sequence has any, so changing the number of streams is adding or taking away
zeros on both sides of it. A reader puts the cells into the stream of the sequence it was asked for.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
_WORD = 4
_MAGIC = 0x6D67_7374_6174_6531
_NOTE = 24
_HEADER = 8  # a magic number and the sequence id it was saved from, which readers ignore


class OddState(ValueError):
    """The state does not look as described above."""


def with_streams(state: Bytes, partial: Bytes, stream: int, n_from: int, n_to: int, *, partial_is_kv: bool) -> Bytes:
    """`state` of the sequence in `stream` of `n_from`, for a context that has `n_to`.

    `partial` is the same state with the flag PARTIAL_ONLY: the part in the middle that is a recurrent state, or, with
    `partial_is_kv`, a cache of a sliding window. Raises OddState.
    """
    if n_from == n_to:
        return state
    head, state, partial = state[:_HEADER], state[_HEADER:], partial[_HEADER:]
    if len(partial) == len(state):
        return np.concatenate([head, _block(state, stream, n_from, n_to) if partial_is_kv else state])
    at = state.tobytes().find(partial.tobytes())
    if at < 0:
        raise OddState("the partial state is no part of the whole state")
    pieces = [state[:at], partial, state[at + len(partial) :]]
    is_kv = (True, partial_is_kv, True)
    made = [_block(p, stream, n_from, n_to) if kv and len(p) else p for p, kv in zip(pieces, is_kv, strict=True)]
    return np.concatenate([head, *made])


def _block(block: Bytes, stream: int, n_from: int, n_to: int) -> Bytes:
    head, tail = _WORD * (1 + stream), _WORD * (n_from - 1 - stream)
    if len(block) < head + _WORD + tail or int(block[:_WORD].view("<u4")[0]) != n_from:
        raise OddState(f"a cache of {n_from} streams does not begin so")
    end = len(block) - tail
    if block[_WORD:head].any() or block[end:].any():
        raise OddState("cells of other sequences are in it")
    count = np.array([n_to], "<u4").view(np.uint8)
    return np.concatenate([count, block[head:end], np.zeros(_WORD * (n_to - 1), np.uint8)])


def portable(state: Bytes, partial: Bytes, stream: int, n_streams: int, partial_is_kv: bool) -> Bytes:
    """`state` for one stream, with a note of where its partial state is, so that `fitted` can make it fit again."""
    made = with_streams(state, partial, stream, n_streams, 1, partial_is_kv=partial_is_kv)
    middle = with_streams(partial, partial, stream, n_streams, 1, partial_is_kv=partial_is_kv)[_HEADER:]
    at = 0 if len(partial) == len(state) else made[_HEADER:].tobytes().find(middle.tobytes())
    note = np.array([_MAGIC, at, len(middle)], "<u8")
    return np.concatenate([made, note.view(np.uint8)])


def fitted(data: Bytes, n_streams: int, partial_is_kv: bool) -> Bytes:
    """What `portable` made, for a context of `n_streams`. Raises OddState."""
    if len(data) < _HEADER + _NOTE:
        raise OddState("it is too short")
    magic, at, n = (int(word) for word in data[len(data) - _NOTE :].view("<u8"))
    state = data[: len(data) - _NOTE]
    if magic != _MAGIC or _HEADER + at + n > len(state):
        raise OddState("it was not made to fit other contexts")
    begin = _HEADER + at
    partial = np.concatenate([state[:_HEADER], state[begin : begin + n]])
    return with_streams(state, partial, 0, 1, n_streams, partial_is_kv=partial_is_kv)
