"""The GGUF keys of a `qwen4exp` model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from gguf import GGML_QUANT_VERSION, GGUFValueType, GGUFWriter

from llamamg.synth.preset import Preset
from llamamg.synth.vocabulary import Vocabulary

ARCHITECTURE: Final = "qwen4exp"
U32: Final = GGUFValueType.UINT32
U64: Final = GGUFValueType.UINT64
F32: Final = GGUFValueType.FLOAT32

# odd and below 2^62, so that products with token ids spread over all 64 bits
HASH_MULTIPLIERS: Final = (0x2545F4914F6CDD1D, 0x1B873593CC9E2D51, 0x27D4EB2F165667C5)

Key = tuple[str, GGUFValueType, Any]


def write_metadata(writer: GGUFWriter, preset: Preset, vocabulary: Vocabulary, title: str, dense: bool) -> None:
    """All keys: general, architecture, tokenizer. `dense` leaves out the ratios that switch sparse selection on."""
    writer.add_name(title)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    writer.add_uint32(f"{ARCHITECTURE}.vocab_size", len(vocabulary.tokens))
    keys = [*model_keys(preset), *ssm_keys(preset), *ngram_keys(preset, vocabulary.eos)]
    if not dense:
        keys += sparse_keys(preset)
    for name, kind, value in keys:
        if isinstance(value, list):
            writer.add_key_value(f"{ARCHITECTURE}.{name}", value, GGUFValueType.ARRAY, kind)
        else:
            writer.add_key_value(f"{ARCHITECTURE}.{name}", value, kind)
    vocabulary.write(writer)


def model_keys(p: Preset) -> Iterator[Key]:
    yield "context_length", U32, p.n_ctx_train
    yield "embedding_length", U32, p.n_embd
    yield "block_count", U32, p.n_layer
    yield "full_attention_interval", U32, p.attention_interval
    yield "feed_forward_length", U32, p.n_ff
    yield "attention.head_count", U32, p.n_head
    yield "attention.head_count_kv", U32, p.n_head_kv
    yield "attention.key_length", U32, p.head_dim
    yield "attention.value_length", U32, p.head_dim
    yield "attention.layer_norm_rms_epsilon", F32, 1e-6
    yield "attention.indexer.head_count", U32, p.n_index_head
    yield "attention.indexer.key_length", U32, p.index_dim
    yield "attention.indexer.top_k", U32, p.index_top_k
    yield "rope.dimension_count", U32, p.n_rot
    yield "rope.dimension_sections", U32, list(p.rope_sections)
    yield "rope.freq_base", F32, 1e7
    yield "expert_count", U32, p.n_expert
    yield "expert_used_count", U32, p.n_expert_used
    yield "expert_feed_forward_length", U32, p.n_ff
    yield "expert_shared_feed_forward_length", U32, p.n_ff_shared
    yield "hyper_connection.count", U32, p.n_stream
    yield "hyper_connection.low_rank", U32, p.stream_rank


def sparse_keys(p: Preset) -> Iterator[Key]:
    # libllama takes a layer without a ratio as dense, and says nothing
    yield "attention.compress_ratios", U32, [p.block_size if p.has_attention(i) else 0 for i in range(p.n_layer)]


def ssm_keys(p: Preset) -> Iterator[Key]:
    yield "ssm.conv_kernel", U32, p.ssm_conv
    yield "ssm.inner_size", U32, p.n_ssm_v_head * p.ssm_dim
    yield "ssm.state_size", U32, p.ssm_dim
    yield "ssm.time_step_rank", U32, p.n_ssm_v_head
    yield "ssm.group_count", U32, p.n_ssm_k_head


def ngram_keys(p: Preset, eos: int) -> Iterator[Key]:
    n_row = p.n_ngram_row // p.n_hash_head
    yield "ple.layers", U32, [p.ngram_layer]
    yield "ple.ngram_size", U32, p.ngram_size
    yield "ple.heads_per_ngram", U32, p.n_ngram_head
    yield "ple.conv_kernel", U32, p.ngram_conv
    yield "ple.eos_token_id", U32, eos
    yield "embedding_length_per_layer_input", U32, p.ngram_dim
    yield "ple.layer_multipliers", U64, list(HASH_MULTIPLIERS[: p.ngram_size])
    yield "ple.head_offsets", U64, [head * n_row for head in range(p.n_hash_head)]
    yield "ple.head_vocab_sizes", U64, [n_row] * p.n_hash_head
