"""Sees what a graph on the CPU selects, blocks and experts, and can put another choice in its place."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamamg.library import Library

BLOCKS, EXPERTS, QUERY, PROBS = "indexer_top_k", "ffn_moe_topk", "indexer_q", "ffn_moe_probs"


class Tensor(ctypes.Structure):
    """The head of struct ggml_tensor, up to the name."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
    )


def rows(t: Tensor, n: int, n_rows: int, stride: int, kind: Any) -> NDArray[Any]:
    """A writable view [n_rows, n] of a tensor's data."""
    raw = np.ctypeslib.as_array(ctypes.cast(t.data, ctypes.POINTER(ctypes.c_uint8)), (n_rows * stride,))
    return np.lib.stride_tricks.as_strided(raw.view(kind), (n_rows, n), (stride, 4))


class Watch:
    """For one sequence that starts at position 0. `chosen[name, layer]` has a row per position.

    `forced`: choices of another run that replace this one's own, row by row.
    """

    def __init__(self, library: Library, n_top: int, forced: dict[tuple[str, int], NDArray[Any]] | None = None) -> None:
        self.n_top, self.forced = n_top, forced
        self.n_before = self.n_now = 0  # tokens of earlier ubatches, and of this one
        self.keys: dict[int, NDArray[Any]] = {}  # pooled keys [n_block, d] of a layer, while the context lives
        self.taken: dict[tuple[str, int], list[NDArray[Any]]] = defaultdict(list)
        self.callback = library.llama.ggml_backend_sched_eval_callback(self._called)

    @property
    def chosen(self) -> dict[tuple[str, int], NDArray[Any]]:
        return {key: np.concatenate(parts) for key, parts in self.taken.items()}

    def _called(self, pointer: Any, ask: bool, _: Any) -> bool:
        t = Tensor.from_address(pointer)
        name, _, layer = t.name.decode().partition("-")
        if name not in (BLOCKS, EXPERTS, QUERY, PROBS) or not layer.isdigit():
            return not ask
        if not ask:
            self._seen(t, name, int(layer))
        return True

    def _seen(self, t: Tensor, name: str, layer: int) -> None:
        if (name, layer) == (EXPERTS, 0):
            self.n_before, self.n_now = self.n_before + self.n_now, t.ne[1]
        if name == BLOCKS:
            n_tokens = Tensor.from_address(t.src[0]).ne[2]
            mine = rows(t, self.n_top, n_tokens, 4 * self.n_top, np.int32)
            keys = Tensor.from_address(t.src[1])
            self.keys[layer] = rows(keys, keys.ne[0], keys.ne[1], keys.nb[1], np.float32)
        elif name == QUERY:
            mine = rows(t, t.ne[0] * t.ne[1], t.ne[2], t.nb[2], np.float32)
        else:
            mine = rows(t, t.ne[0], t.ne[1], t.nb[1], np.int32 if name == EXPERTS else np.float32)
        if self.forced is not None and name in (BLOCKS, EXPERTS):
            start = self.n_before
            if len(mine) < self.n_now:  # the last layer goes on with rows that have an output: the last one
                start = self.n_before + self.n_now - len(mine)
            mine[:] = self.forced[name, layer][start : start + len(mine)]
        self.taken[name, layer].append(mine.copy())
