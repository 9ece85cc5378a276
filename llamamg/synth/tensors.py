"""The tensors of a `qwen4exp` model: names, shapes, and how far their random values spread.

Spreads are gains over sqrt(inputs per output). They are chosen between two needs: logits must react to the
whole context, so that a wrong cache cell shows, and rounding must not be amplified, so that a right one does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from math import prod, sqrt

from llamamg.synth.preset import Preset


class Kind(Enum):
    """What a tensor is for; decides its encoding."""

    VECTOR = auto()  # norms, biases, small F32 projections: never quantised
    DECAY = auto()
    MATRIX = auto()
    EXPERT_IN = auto()
    EXPERT_OUT = auto()
    TABLE = auto()


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor to write. `shape` is in numpy order: the last axis is the contiguous one."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    std: float
    mean: float = 0.0
    skips_silent: bool = False  # rows of tokens that must never be said are zero

    @property
    def n_values(self) -> int:
        return prod(self.shape)

    @property
    def n_rows(self) -> int:
        return prod(self.shape[:-1])


def matrix(name: str, shape: tuple[int, ...], gain: float = 1.0, kind: Kind = Kind.MATRIX) -> Tensor:
    return Tensor(f"{name}.weight", shape, kind, gain / sqrt(shape[-1]))


def norm(name: str, n_values: int, gain: float = 1.0) -> Tensor:
    return Tensor(f"{name}.weight", (n_values,), Kind.VECTOR, 0.1 * gain, gain)


def outward(p: Preset, name: str, shape: tuple[int, ...], gain: float, kind: Kind = Kind.MATRIX) -> Tensor:
    """Last matrix of a block: weaker in deeper models, or what all tokens share drowns what tells them apart."""
    return matrix(name, shape, gain * sqrt(4 / p.n_layer), kind)


def model_tensors(p: Preset, n_vocab: int) -> Iterator[Tensor]:
    """All tensors in file order."""
    yield Tensor("token_embd.weight", (n_vocab, p.n_embd), Kind.MATRIX, 1.0)
    # the last norm leaves values of about 0.5, so this gives logits a spread of about 4
    yield Tensor("output.weight", (n_vocab, p.n_embd), Kind.MATRIX, 8.0 / sqrt(p.n_embd), skips_silent=True)
    yield from mixer(p, "output_hc")
    yield Tensor("per_layer_token_embd.weight", (p.n_ngram_row, p.ngram_dim), Kind.TABLE, 1.0)
    for layer in range(p.n_layer):
        yield from layer_tensors(p, layer)


def layer_tensors(p: Preset, layer: int) -> Iterator[Tensor]:
    block = f"blk.{layer}"
    for part in ("attn", "ffn"):
        yield from mixer(p, f"{block}.hc_{part}")
        inject = f"{block}.hc_{part}_inject.weight"
        yield Tensor(inject, (p.n_stream, p.stream_dim), Kind.VECTOR, 2 / sqrt(p.stream_dim))
    yield from attention(p, block) if p.has_attention(layer) else recurrent(p, block)
    if layer == p.ngram_layer:
        yield from ngram(p, block)
    yield from experts(p, block)


def mixer(p: Preset, name: str) -> Iterator[Tensor]:
    """Gate that merges the residual streams into one block input."""
    yield norm(f"{name}_norm", p.stream_dim)
    yield matrix(f"{name}_down", (p.stream_rank, p.stream_dim))
    yield matrix(f"{name}_up", (p.stream_dim, p.stream_rank), 4.0)


def attention(p: Preset, block: str) -> Iterator[Tensor]:
    n_kv = p.n_head_kv * p.head_dim
    yield matrix(f"{block}.attn_q", (2 * p.n_head * p.head_dim, p.n_embd))  # query and output gate, head by head
    yield matrix(f"{block}.attn_k", (n_kv, p.n_embd))
    yield matrix(f"{block}.attn_v", (n_kv, p.n_embd), 2.0)
    yield norm(f"{block}.attn_q_norm", p.head_dim, 1.5)  # scores of spread 2.25: a few dozen cells carry the result
    yield norm(f"{block}.attn_k_norm", p.head_dim, 1.5)
    yield outward(p, f"{block}.attn_output", (p.n_embd, p.n_head * p.head_dim), 1.0)
    yield matrix(f"{block}.indexer.q_proj", (p.n_index_head * p.index_dim, p.n_embd))
    yield matrix(f"{block}.indexer.k_proj", (p.index_dim, p.n_embd))
    yield norm(f"{block}.indexer.q_norm", p.index_dim)
    yield norm(f"{block}.indexer.k_norm", p.index_dim)


def recurrent(p: Preset, block: str) -> Iterator[Tensor]:
    n_key, n_value = p.n_ssm_k_head * p.ssm_dim, p.n_ssm_v_head * p.ssm_dim
    n_conv = 2 * n_key + n_value
    yield matrix(f"{block}.attn_qkv", (n_conv, p.n_embd), 2.0)
    yield matrix(f"{block}.attn_gate", (n_value, p.n_embd))
    yield outward(p, f"{block}.ssm_out", (p.n_embd, n_value), 1.0)
    yield Tensor(f"{block}.ssm_conv1d.weight", (n_conv, p.ssm_conv), Kind.VECTOR, 0.1, 0.25)
    yield Tensor(f"{block}.ssm_dt.bias", (p.n_ssm_v_head,), Kind.VECTOR, 1.0)
    yield Tensor(f"{block}.ssm_a", (p.n_ssm_v_head,), Kind.DECAY, 0.0)
    for name in ("ssm_beta", "ssm_alpha"):
        yield Tensor(f"{block}.{name}.weight", (p.n_ssm_v_head, p.n_embd), Kind.VECTOR, 1 / sqrt(p.n_embd))
    yield norm(f"{block}.ssm_norm", p.ssm_dim)


def ngram(p: Preset, block: str) -> Iterator[Tensor]:
    n_in = p.n_hash_head * p.ngram_dim
    yield matrix(f"{block}.ple_key", (p.stream_dim, n_in))
    yield matrix(f"{block}.ple_value", (p.n_embd, n_in))
    for name in ("key", "query", "conv"):
        yield norm(f"{block}.ple_norm_{name}", p.stream_dim)
    yield Tensor(f"{block}.ple_conv1d.weight", (p.stream_dim, p.ngram_conv), Kind.VECTOR, 0.2)


def experts(p: Preset, block: str) -> Iterator[Tensor]:
    yield Tensor(f"{block}.ffn_gate_inp.weight", (p.n_expert, p.n_embd), Kind.VECTOR, 2 / sqrt(p.n_embd))
    yield Tensor(f"{block}.ffn_gate_inp_shexp.weight", (p.n_embd,), Kind.VECTOR, 1 / sqrt(p.n_embd))
    for name in ("gate", "up"):
        yield matrix(f"{block}.ffn_{name}_exps", (p.n_expert, p.n_ff, p.n_embd), 2.0, Kind.EXPERT_IN)
    yield outward(p, f"{block}.ffn_down_exps", (p.n_expert, p.n_embd, p.n_ff), 0.5, Kind.EXPERT_OUT)
    for name in ("gate", "up"):
        yield matrix(f"{block}.ffn_{name}_shexp", (p.n_ff_shared, p.n_embd), 2.0)
    yield outward(p, f"{block}.ffn_down_shexp", (p.n_embd, p.n_ff_shared), 0.5)
