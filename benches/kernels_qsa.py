"""The three operations of block-sparse attention (native/src/qsa.h), at the published model's sizes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from llamamg import library as native

from .kernels_case import Case, Check
from .kernels_device import Device
from .kernels_ggml import F16, F32, FLOAT, I32, I64, INT, POINTER, Graph, bind

D_INDEX, N_INDEX_HEAD, R, N_TOP = 128, 4, 4, 512
HEAD_SIZE, N_HEAD, N_KV_HEAD, N_ROT = 256, 24, 2, 64
EPS, FREQ_BASE = 1e-6, 1e7
N_CELLS = {"cpu": (16384,), "cuda": (131072, 262144)}
TOKENS = (1, 5)
LAUNCHES = {"cpu": 1, "cuda": 16}
NONE = "this native build has no QSA operations: run `llamamg build`"


class Rope(ctypes.Structure):
    """struct qsa_rope."""

    _fields_ = (
        ("n_rot", INT),
        ("n_ctx_orig", INT),
        *((name, FLOAT) for name in ("freq_base", "freq_scale", "ext_factor", "attn_factor", "beta_fast", "beta_slow")),
    )


FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "ggml_qsa_pool": (POINTER, [POINTER] * 5 + [INT, INT, FLOAT, ctypes.POINTER(Rope)]),
    "ggml_qsa_select": (POINTER, [POINTER] * 4 + [INT] * 3),
    "ggml_qsa_select_list": (POINTER, [POINTER] * 2),
    "ggml_qsa_attn": (POINTER, [POINTER] * 6 + [INT] * 3 + [FLOAT]),
    "ggml_qsa_attn_out": (POINTER, [POINTER] * 2),
}


def cases(device: Device) -> list[Case]:
    """For each size of the cache POOL of all of it, SELECT and ATTN for one and five tokens at its end."""
    folder = native.load().dir
    base = bind(folder, FUNCTIONS)

    def graph(*arguments: Any) -> Graph:
        return Graph(device, folder, base, *arguments, LAUNCHES[device.kind])

    made = []
    for n_cells in N_CELLS[device.kind]:
        made.append(_pool(device, n_cells, graph))
        for n_tokens in TOKENS:
            made += [_select(device, n_cells, n_tokens, graph), _attn(device, n_cells, n_tokens, graph)]
    common = {"launches_per_run": LAUNCHES[device.kind], "unavailable": "" if base is not None else NONE}
    return [Case(**{**fields, **common}) for fields in made]


def _normal(device: Device, seed: int, *shape: int) -> Any:
    return device.xp.random.default_rng(seed).standard_normal(shape, dtype=device.xp.float32)


def _positions(n_cells: int, n_tokens: int) -> Any:
    return np.arange(n_cells - 1 - n_tokens, n_cells - 1, dtype=np.int64)


def _on(device: Device, values: Any) -> Any:
    return device.xp.asarray(values)


Make = Callable[..., Graph]


def _pool(device: Device, n_cells: int, graph: Make) -> dict[str, Any]:
    n_blocks = n_cells // R
    rope = Rope(N_ROT, 4096, FREQ_BASE, 1.0, 0.0, 1.0, 32.0, 1.0)

    def inputs() -> tuple[Any, Any]:
        return _normal(device, 1, n_cells, D_INDEX).astype(np.float16), _normal(device, 2, D_INDEX)

    def build(base: Any, context: Any, *t: Any) -> Any:
        return base.ggml_qsa_pool(context, *t, R, n_cells, EPS, ctypes.byref(rope))

    def prepare() -> Graph:
        raw, gamma = inputs()
        ranges = _on(device, np.array([[0, 0, n_blocks, 0]], np.int32))
        tensors = [
            (F16, (D_INDEX, n_cells), raw), (F32, (D_INDEX, n_blocks), 0.0), (F32, (D_INDEX,), gamma), (I32, (4, 1), ranges),
        ]  # fmt: skip
        return graph(tensors, build, (F32, (D_INDEX, n_blocks)))

    def check(got: Any) -> Check:
        xp = device.xp
        raw, gamma = inputs()
        mean = raw.astype(xp.float64).reshape(n_blocks, R, D_INDEX).mean(axis=1)
        x = mean / xp.sqrt((mean**2).mean(axis=1, keepdims=True) + EPS) * gamma
        half = N_ROT // 2
        angle = (R * xp.arange(n_blocks, dtype=xp.float64))[:, None] * FREQ_BASE ** (-2.0 * xp.arange(half) / N_ROT)
        a, b, c, s = x[:, :half].copy(), x[:, half:N_ROT].copy(), xp.cos(angle), xp.sin(angle)
        x[:, :half], x[:, half:N_ROT] = a * c - b * s, a * s + b * c
        error = float(xp.abs(got - x).max())
        return Check(error < 1e-4 + 5e-7 * n_cells, error, "largest error (angles are F32, so it grows with the depth)")

    return {
        "name": "qsa-pool",
        "size": f"{n_blocks} blocks of {R} x {D_INDEX} f16",
        "n_bytes": 2 * n_cells * D_INDEX + 4 * n_blocks * D_INDEX,
        "n_flops": n_cells * D_INDEX + 6 * n_blocks * D_INDEX,
        "prepare": prepare,
        "check": check,
        "upstream_note": "upstream pools the whole cache again in every step, with eight operations; see `grid`",
    }


def _select(device: Device, n_cells: int, n_tokens: int, graph: Make) -> dict[str, Any]:
    n_blocks, cells = n_cells // R, _positions(n_cells, n_tokens)

    def inputs() -> tuple[Any, Any]:
        return _normal(device, 3, n_tokens, N_INDEX_HEAD, D_INDEX), _normal(device, 4, n_blocks, D_INDEX)

    def build(base: Any, context: Any, *t: Any) -> Any:
        return base.ggml_qsa_select_list(context, base.ggml_qsa_select(context, *t, R, n_cells, N_TOP))

    def prepare() -> Graph:
        q, pooled = inputs()
        tensors = [
            (F32, (D_INDEX, N_INDEX_HEAD, n_tokens), q),
            (F32, (D_INDEX, n_blocks), pooled),
            (I64, (n_tokens,), _on(device, cells)),
        ]
        return graph(tensors, build, (I32, (N_TOP, n_tokens)))

    width = N_TOP * R

    def stock(base: Any, context: Any, q: Any, pooled: Any, block_of: Any) -> Any:
        """Scores of blocks, spread to their cells, of which the best are taken."""
        flat = base.ggml_reshape_3d(context, q, D_INDEX, N_INDEX_HEAD * n_tokens, 1)
        score = base.ggml_relu(context, base.ggml_mul_mat(context, pooled, flat))
        row = 4 * n_blocks
        heads = [
            base.ggml_view_2d(context, score, n_blocks, n_tokens, row * N_INDEX_HEAD, row * head)
            for head in range(N_INDEX_HEAD)
        ]
        total = base.ggml_cont(context, heads[0])
        for head in heads[1:]:
            total = base.ggml_add(context, total, head)
        spread = base.ggml_get_rows(
            context, base.ggml_cont(context, base.ggml_permute(context, total, 1, 0, 2, 3)), block_of
        )
        spread = base.ggml_cont(context, base.ggml_permute(context, spread, 1, 0, 2, 3))
        return base.ggml_cont(context, base.ggml_top_k(context, spread, width))

    def upstream() -> Graph:
        q, pooled = inputs()
        block_of = _on(device, np.repeat(np.arange(n_blocks, dtype=np.int32), R))
        tensors = [
            (F32, (D_INDEX, N_INDEX_HEAD, n_tokens), q), (F32, (D_INDEX, n_blocks), pooled), (I32, (n_cells,), block_of),
        ]  # fmt: skip
        return graph(tensors, stock, (I32, (width, n_tokens)))

    def wrong(lists: list[Any], hidden: bool) -> Check:
        """Blocks that are clearly not among the best, or clearly missing. `hidden`: some blocks are not visible yet."""
        q, pooled = (_host(x).astype(np.float64) for x in inputs())
        n_wrong = 0
        for t, got in enumerate(lists):
            n_visible = (int(cells[t]) + 1) // R if hidden else n_blocks
            score = np.maximum(pooled[:n_visible] @ q[t].T, 0).sum(axis=1)
            best = np.argsort(-score, kind="stable")[:N_TOP]
            differs = np.setxor1d(got, best)
            n_wrong += int((differs < 0).sum() + (differs >= n_visible).sum())
            differs = differs[(differs >= 0) & (differs < n_visible)]
            edge = score[best[-1]]
            n_wrong += int((np.abs(score[differs] - edge) > 1e-5 * abs(edge)).sum())
        return Check(n_wrong == 0, float(n_wrong), "wrong blocks")

    return {
        "name": "qsa-select",
        "size": f"{n_tokens} tokens, best {N_TOP} of {n_blocks} blocks",
        "n_bytes": 4 * n_blocks * D_INDEX + 4 * n_tokens * (N_INDEX_HEAD * D_INDEX + N_TOP),
        "n_flops": 2 * n_tokens * N_INDEX_HEAD * n_blocks * D_INDEX,
        "prepare": prepare,
        "check": lambda got: wrong(list(_host(got)), True),
        "upstream": upstream,
        "upstream_check": lambda got: wrong([np.unique(row // R) for row in _host(got)], False),
        "upstream_note": "stock: the same scores and top-k as upstream's graph, without its mask",
    }


def _attn(device: Device, n_cells: int, n_tokens: int, graph: Make) -> dict[str, Any]:
    cells, n_embd, scale = _positions(n_cells, n_tokens), HEAD_SIZE * N_KV_HEAD, HEAD_SIZE**-0.5
    random = np.random.default_rng(7)
    lists = np.stack([np.sort(random.choice((int(c) + 1) // R, N_TOP, replace=False)) for c in cells]).astype(np.int32)
    own = [
        np.concatenate([(R * row[:, None] + np.arange(R)).ravel(), np.arange((int(c) + 1) // R * R, int(c) + 1)])
        for row, c in zip(lists.astype(np.int64), cells, strict=True)
    ]

    def inputs() -> tuple[Any, Any, Any]:
        q = _normal(device, 5, n_tokens, N_HEAD, HEAD_SIZE)
        k, v = (_normal(device, seed, n_cells, n_embd).astype(np.float16) for seed in (6, 7))
        return q, k, v

    def build(base: Any, context: Any, *t: Any) -> Any:
        node = base.ggml_qsa_attn(context, *t, R, n_cells, N_KV_HEAD, scale)
        return base.ggml_qsa_attn_out(context, node)

    result = (F32, (HEAD_SIZE, N_HEAD, n_tokens))

    def prepare() -> Graph:
        q, k, v = inputs()
        tensors = [
            (*result, q),
            (F16, (n_embd, n_cells), k),
            (F16, (n_embd, n_cells), v),
            (I64, (n_tokens,), _on(device, cells)),
            (I32, (N_TOP, n_tokens), _on(device, lists)),
        ]
        return graph(tensors, build, result)

    def stock(base: Any, context: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
        keys, values = (
            base.ggml_view_3d(context, x, HEAD_SIZE, n_cells, N_KV_HEAD, 2 * n_embd, 2 * HEAD_SIZE, 0) for x in (k, v)
        )
        turned = base.ggml_permute(context, q, 0, 2, 1, 3)
        return base.ggml_flash_attn_ext(context, turned, keys, values, mask, scale, 0.0, 0.0)

    def upstream() -> Graph:
        q, k, v = inputs()
        mask = np.full((n_tokens, n_cells), -np.inf, np.float16)
        for row, mine in zip(mask, own, strict=True):
            row[mine] = 0
        tensors = [
            (*result, q), (F16, (n_embd, n_cells), k), (F16, (n_embd, n_cells), v),
            (F16, (n_cells, n_tokens), _on(device, mask)),
        ]  # fmt: skip
        return graph(tensors, stock, result)

    def check(got: Any, most: float = 2e-3) -> Check:
        xp = device.xp
        q, k, v = (x.astype(xp.float64) for x in inputs())
        exact = xp.empty((n_tokens, N_HEAD, HEAD_SIZE))
        group = N_HEAD // N_KV_HEAD
        for t, mine in enumerate(own):
            at = _on(device, mine)
            keys, values = (x[at].reshape(-1, N_KV_HEAD, HEAD_SIZE) for x in (k, v))
            for head in range(N_HEAD):
                logits = scale * keys[:, head // group] @ q[t, head]
                weights = xp.exp(logits - logits.max())
                exact[t, head] = weights @ values[:, head // group] / weights.sum()
        error = float(xp.linalg.norm(got - exact) / xp.linalg.norm(exact))
        return Check(error < most, error, "relative error")

    n_read = len(np.unique(np.concatenate(own)))
    return {
        "name": "qsa-attn",
        "size": f"{n_tokens} tokens, {N_TOP} blocks each of {n_cells} cells f16",
        "n_bytes": 2 * 2 * n_read * n_embd + 2 * 4 * n_tokens * N_HEAD * HEAD_SIZE,
        "n_flops": 4 * sum(map(len, own)) * N_HEAD * HEAD_SIZE,
        "prepare": prepare,
        "check": check,
        "upstream": upstream,
        "upstream_check": lambda got: check(got, 2e-2),  # on the CPU it adds F16 values up in F16
        "upstream_note": "stock: flash attention over all cells under a ready mask, as upstream's graph has it",
    }


def _host(array: Any) -> Any:
    return array.get() if hasattr(array, "get") else array
