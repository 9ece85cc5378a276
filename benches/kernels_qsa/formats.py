"""Random cache rows of every type and their float64 meaning, from the block formats alone (no quantiser involved)."""

from __future__ import annotations

from typing import Any

F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, BF16 = 0, 1, 2, 3, 6, 7, 8, 20, 30
NAMES = {
    F32: "f32",
    F16: "f16",
    BF16: "bf16",
    Q8_0: "q8_0",
    Q5_1: "q5_1",
    Q5_0: "q5_0",
    Q4_1: "q4_1",
    Q4_0: "q4_0",
    IQ4_NL: "iq4_nl",
}
BLOCK_BYTES = {F32: 128, F16: 64, BF16: 64, Q8_0: 34, Q5_1: 24, Q5_0: 22, Q4_1: 20, Q4_0: 18, IQ4_NL: 18}
IQ4_NL_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# typical scale and offset that make values of unit size
SCALE = {
    Q8_0: (0.012, None),
    Q5_1: (0.1, -1.6),
    Q5_0: (0.1, None),
    Q4_1: (0.2, -1.5),
    Q4_0: (0.2, None),
    IQ4_NL: (0.013, None),
}


def row_bytes(kind: int, n: int) -> int:
    return BLOCK_BYTES[kind] * n // 32


def random_rows(xp: Any, kind: int, n_rows: int, n: int, rng: Any) -> Any:
    """Random rows as bytes [n_rows, row_bytes]."""
    if kind in (F32, F16, BF16):
        x = rng.standard_normal((n_rows, n), dtype=xp.float32)
        if kind == F16:
            return x.astype(xp.float16).view(xp.uint8)
        if kind == BF16:
            return xp.ascontiguousarray(x.view(xp.uint16)[:, 1::2]).view(xp.uint8)
        return x.view(xp.uint8)
    raw = rng.integers(0, 256, (n_rows, n // 32, BLOCK_BYTES[kind]), dtype=xp.int32).astype(xp.uint8)
    d, m = SCALE[kind]
    scale = (d * (0.5 + rng.random((n_rows, n // 32, 1), dtype=xp.float32))).astype(xp.float16)
    raw[:, :, 0:2] = scale.view(xp.uint8)
    if m is not None:
        offset = (m * (0.5 + rng.random((n_rows, n // 32, 1), dtype=xp.float32))).astype(xp.float16)
        raw[:, :, 2:4] = offset.view(xp.uint8)
    return raw.reshape(n_rows, -1)


def values(xp: Any, kind: int, raw: Any) -> Any:
    """float64 values of rows given as bytes [n_rows, row_bytes]."""
    raw = xp.ascontiguousarray(raw)
    n_rows = raw.shape[0]
    if kind == F32:
        return raw.view(xp.float32).astype(xp.float64)
    if kind == F16:
        return raw.view(xp.float16).astype(xp.float64)
    if kind == BF16:
        wide = xp.zeros((n_rows, raw.shape[1] // 2, 2), dtype=xp.uint16)
        wide[:, :, 1] = raw.view(xp.uint16)
        return wide.reshape(n_rows, -1).view(xp.float32).astype(xp.float64)
    b = raw.reshape(n_rows, -1, BLOCK_BYTES[kind])
    f16 = lambda at: xp.ascontiguousarray(b[:, :, at : at + 2]).view(xp.float16).astype(xp.float64)  # noqa: E731
    d = f16(0)
    if kind == Q8_0:
        return (d * xp.ascontiguousarray(b[:, :, 2:]).view(xp.int8).astype(xp.float64)).reshape(n_rows, -1)
    at = {Q4_0: 2, Q4_1: 4, Q5_0: 6, Q5_1: 8, IQ4_NL: 2}[kind]
    q = xp.concatenate([b[:, :, at:] & 15, b[:, :, at:] >> 4], axis=2).astype(xp.int32)
    if kind in (Q5_0, Q5_1):
        bits = xp.ascontiguousarray(b[:, :, at - 4 : at]).view(xp.uint32)
        q = q + (((bits >> xp.arange(32, dtype=xp.uint32)) & 1) << 4).astype(xp.int32)
    if kind == IQ4_NL:
        return (d * xp.asarray(IQ4_NL_VALUES, dtype=xp.float64)[q]).reshape(n_rows, -1)
    offset = f16(2) if kind in (Q4_1, Q5_1) else -d * {Q4_0: 8, Q5_0: 16}[kind]
    return (d * q + offset).reshape(n_rows, -1)
