"""Sizes of the models that `llamamg synth` can write."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

MAX_EXPERTS: Final = 1024  # libllama's compile-time limit


class SynthError(Exception):
    """A model that cannot be written; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Preset:
    """Shape of a `qwen4exp` model. Counts are per layer, widths are in values."""

    name: str
    vocab_file: str
    n_vocab_min: int  # the vocabulary is padded up to this
    n_ctx_train: int
    n_layer: int
    attention_interval: int  # every such layer has softmax attention, the rest are recurrent
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_rot: int
    rope_sections: tuple[int, int, int, int]
    n_index_head: int
    index_dim: int
    index_top_k: int  # tokens, so index_top_k / block_size blocks
    block_size: int  # tokens per pooled indexer key
    n_ssm_k_head: int
    n_ssm_v_head: int
    ssm_dim: int
    ssm_conv: int
    n_expert: int
    n_expert_used: int
    n_ff: int
    n_ff_shared: int
    n_stream: int  # parallel residual streams (hyper-connections)
    stream_rank: int
    ngram_layer: int
    ngram_size: int
    n_ngram_head: int  # hash heads per n-gram length
    ngram_dim: int
    n_ngram_row: int
    ngram_conv: int

    @property
    def n_hash_head(self) -> int:
        return (self.ngram_size - 1) * self.n_ngram_head

    @property
    def stream_dim(self) -> int:
        return self.n_stream * self.n_embd

    def has_attention(self, layer: int) -> bool:
        return (layer + 1) % self.attention_interval == 0


MICRO: Final = Preset(
    name="micro",
    vocab_file="ggml-vocab-gpt-2.gguf",
    n_vocab_min=0,
    n_ctx_train=262_144,
    n_layer=4,
    attention_interval=2,  # two sparse layers: they share one set of graph inputs
    n_embd=256,  # the smallest width that Q4_K rows allow
    n_head=4,
    n_head_kv=2,
    head_dim=64,
    n_rot=64,
    rope_sections=(11, 11, 10, 0),
    n_index_head=4,  # fewer heads leave many block scores at exactly zero, and ties are cut arbitrarily
    index_dim=64,
    index_top_k=64,
    block_size=4,
    n_ssm_k_head=2,
    n_ssm_v_head=4,
    ssm_dim=64,
    ssm_conv=4,
    n_expert=8,
    n_expert_used=2,
    n_ff=128,
    n_ff_shared=128,
    n_stream=4,
    stream_rank=32,
    ngram_layer=2,
    ngram_size=3,
    n_ngram_head=2,
    ngram_dim=64,
    n_ngram_row=4096,
    ngram_conv=4,
)

FULL: Final = Preset(
    name="full",
    vocab_file="ggml-vocab-qwen35.gguf",
    n_vocab_min=248_320,
    n_ctx_train=262_144,
    n_layer=48,
    attention_interval=4,
    n_embd=2560,
    n_head=24,
    n_head_kv=2,
    head_dim=256,
    n_rot=64,
    rope_sections=(11, 11, 10, 0),
    n_index_head=4,
    index_dim=128,
    index_top_k=2048,
    block_size=4,
    n_ssm_k_head=16,
    n_ssm_v_head=48,
    ssm_dim=128,
    ssm_conv=4,
    n_expert=64,
    n_expert_used=10,
    n_ff=640,
    n_ff_shared=640,
    n_stream=4,
    stream_rank=320,
    ngram_layer=1,
    ngram_size=3,
    n_ngram_head=8,
    ngram_dim=160,
    n_ngram_row=2_000_000,
    ngram_conv=4,
)

PRESETS: Final = {preset.name: preset for preset in (MICRO, FULL)}


def choose_preset(name: str, n_expert: int | None = None, n_ctx: int | None = None) -> Preset:
    """The named preset with the caller's expert count and context; raises `SynthError` for sizes that cannot work."""
    if name not in PRESETS:
        raise SynthError(f"there is no preset {name!r}: choose one of {', '.join(PRESETS)}")
    preset = PRESETS[name]
    if n_expert is not None:
        if n_expert < preset.n_expert_used:
            raise SynthError(
                f"--experts {n_expert} is too few: preset {name} uses {preset.n_expert_used} experts per token, "
                f"so give at least {preset.n_expert_used}"
            )
        if n_expert > MAX_EXPERTS:
            raise SynthError(f"--experts {n_expert} is too many: libllama allows at most {MAX_EXPERTS}")
        preset = replace(preset, n_expert=n_expert)
    if n_ctx is not None:
        if n_ctx < 1 or n_ctx >= 2**31:
            raise SynthError(f"--ctx {n_ctx} is out of range: give 1 to {2**31 - 1} tokens")
        preset = replace(preset, n_ctx_train=n_ctx)
    return preset
