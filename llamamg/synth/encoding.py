"""Random weights, drawn directly in the encodings that GGUF stores.

Quantised blocks are made of random bits under one scale per tensor: nothing is quantised, so writing runs at
the speed of the random generator.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from gguf.quants import IQ4_NL

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
BitGenerator = np.random.SFC64

Q4_K_SCALE: Final = 32  # of 63; the same for every sub-block
Q4_K_MEAN: Final = 7.5  # of the 4-bit values, taken off again through the minimum


@dataclass(frozen=True, slots=True)
class Encoding:
    """How one tensor type is drawn. `unit_std` is the spread of the decoded values at scale 1."""

    type: Type
    unit_std: float
    set_scale: Callable[[Bytes, float], None]  # writes into uint8[n_blocks, n_bytes] that holds random bits

    def n_bytes(self, n_values: int) -> int:
        block: int
        size: int
        block, size = GGML_QUANT_SIZES[self.type]
        return n_values // block * size

    def draw(self, bits: BitGenerator, n_values: int, std: float) -> Bytes:
        """uint8[n_blocks, block_bytes] that decodes to `n_values` values of zero mean (nearly) and spread `std`."""
        block, size = GGML_QUANT_SIZES[self.type]
        n_blocks = n_values // block
        blocks = random_bytes(bits, n_blocks * size).reshape(n_blocks, size)
        self.set_scale(blocks, std / self.unit_std)
        return blocks


def generator(seed: int, name: str) -> BitGenerator:
    """A stream of its own for each tensor name, so that one tensor's size never changes another's values."""
    return BitGenerator(np.random.SeedSequence([seed, zlib.crc32(name.encode())]))


def random_bytes(bits: BitGenerator, n_bytes: int) -> Bytes:
    words: np.ndarray[Any, np.dtype[np.uint64]] = bits.random_raw(-(-n_bytes // 8))
    return words.view(np.uint8)[:n_bytes]


def half(value: float) -> Bytes:
    """uint8[2]: a float16 as GGUF stores it."""
    return np.frombuffer(np.array(value, "<f2").tobytes(), np.uint8)


def _scale_first(blocks: Bytes, scale: float) -> None:
    blocks[:, 0:2] = half(scale)


def _scale_q8_0(blocks: Bytes, scale: float) -> None:
    _scale_first(blocks, scale)
    quants = blocks[:, 2:].view(np.int8)
    np.maximum(quants, -127, out=quants)  # a quantiser never emits -128


def _scale_q4_k(blocks: Bytes, scale: float) -> None:
    blocks[:, 0:2] = half(scale / Q4_K_SCALE)
    blocks[:, 2:4] = half(scale * Q4_K_MEAN / Q4_K_SCALE)
    # eight 6-bit scales and eight minima: sub-blocks 0-3 in the low bits of bytes 0-7, the top two bits of
    # sub-blocks 4-7 above them, and their low four bits in bytes 8-11
    blocks[:, 4:12] = (Q4_K_SCALE >> 4) << 6 | Q4_K_SCALE
    blocks[:, 12:16] = (Q4_K_SCALE & 15) << 4 | (Q4_K_SCALE & 15)


def _uniform_std(n_levels: int) -> float:
    return float(np.sqrt((n_levels**2 - 1) / 12))


ENCODINGS: Final = {
    encoding.type: encoding
    for encoding in (
        Encoding(Type.Q8_0, _uniform_std(256), _scale_q8_0),
        Encoding(Type.Q5_0, _uniform_std(32), _scale_first),
        Encoding(Type.Q4_K, _uniform_std(16), _scale_q4_k),
        Encoding(Type.IQ4_NL, float(np.std(IQ4_NL.kvalues)), _scale_first),
    )
}


def draw_f32(bits: BitGenerator, n_values: int, mean: float, std: float) -> Bytes:
    """uint8[n_values * 4]: normal float32 values."""
    values = np.random.Generator(bits).standard_normal(n_values, dtype=np.float32)
    stored: Bytes = (values * np.float32(std) + np.float32(mean)).astype("<f4").view(np.uint8)
    return stored


def draw_decay(bits: BitGenerator, n_values: int) -> Bytes:
    """uint8[n_values * 4]: negative float32 decay rates, from nearly none to forgetting within a few tokens."""
    exponents = np.random.Generator(bits).uniform(-4.0, 1.0, n_values)
    stored: Bytes = (-np.exp(exponents)).astype("<f4").view(np.uint8)
    return stored
