"""Load a model and make its context: the configuration in words becomes libllama's parameter structs here, and only here."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamamg.config import Config, ContextConfig, ModelConfig
from llamamg.errors import LoadError
from llamamg.library import Library
from llamamg.placement import Placement

CACHE_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30,
}  # fmt: skip
SPLIT_MODES = {"none": 0, "layer": 1, "row": 2, "tensor": 3}
LOAD_MODES = {"auto": -1, "none": 0, "mmap": 1, "mlock": 2, "mmap+mlock": 3, "dio": 4}
LAZY_MODES = {"off": 0, "auto": 1, "on": 2}
FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}
ROPE_SCALING = {None: -1, "none": 0, "linear": 1, "yarn": 2}
N_SLOTS_AUTO = 4  # llama-server's choice when -np is not given


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What clients and plugins may want to know of the model."""

    name: str
    path: str
    architecture: str
    ftype: str
    n_params: int
    size_bytes: int
    n_ctx_train: int
    n_embd: int
    n_layer: int
    n_vocab: int
    vocab_type: int
    n_swa: int
    is_recurrent: bool
    is_hybrid: bool
    chat_template: str | None


def n_slots(context: ContextConfig) -> int:
    """Slots the configuration asks for."""
    return context.n_parallel if context.n_parallel > 0 else N_SLOTS_AUTO


def is_unified(context: ContextConfig) -> bool:
    """Whether all slots share one KV cache: as said, else only when the number of slots was left open."""
    return context.kv_unified if context.kv_unified is not None else context.n_parallel <= 0


def n_spare(config: Config) -> int:
    """Sequences that no slot has: one for idle replays."""
    return int(config.plugins.guard_replay > 0)


def load_model(library: Library, config: ModelConfig, progress: Callable[[float], None] | None = None) -> Any:
    """A llama_model handle. Raises LoadError with a sentence."""
    llama = library.llama
    params = llama.llama_model_default_params()
    ngl = config.n_gpu_layers
    params.n_gpu_layers = -1 if ngl in ("auto", "all") else int(ngl)
    params.split_mode = SPLIT_MODES[config.split_mode]
    params.main_gpu = config.main_gpu
    params.load_mode = LOAD_MODES[config.load_mode]
    params.lazy_mode = LAZY_MODES[config.lazy_mode]
    params.check_tensors = config.check_tensors
    params.use_extra_bufts = config.repack
    params.no_host = config.no_host
    placement = Placement(library, config)
    placement.apply(params)
    stopped: list[BaseException] = []
    if progress is not None:

        def report(fraction: float, _: Any) -> bool:
            try:
                progress(fraction)
            except BaseException as error:  # ctypes would drop it; False ends the loading
                stopped.append(error)
            return not stopped

        params.progress_callback = llama.llama_progress_callback(report)
    if not config.path.is_file():
        raise LoadError(f"no model at {config.path}: give -m the path of a .gguf file")
    model = llama.llama_model_load_from_file(str(config.path).encode(), params)
    if stopped:
        raise stopped[0]
    if not model:
        raise LoadError(f"llama.cpp could not load {config.path}: its last words are in the log above (run with -lv 4)")
    return model


def new_context(library: Library, model: Any, config: Config, n_seq: int | None = None, n_ubatch: int = 0) -> Any:
    """A llama_context handle of `model`: for all slots, or for `n_seq` sequences of them. Raises LoadError with a sentence."""
    llama, c = library.llama, config.context
    slots = n_slots(c)
    if n_seq is None:
        n_seq = slots + n_spare(config) + c.n_prefill_slots  # as many as several contexts have together
    params = llama.llama_context_default_params()
    n_ctx = c.n_ctx or llama.llama_model_n_ctx_train(model) * (1 if is_unified(c) else slots)
    params.n_ctx = n_ctx if is_unified(c) else n_ctx + (n_seq - slots) * (n_ctx // slots)
    params.n_batch = c.n_batch
    params.n_ubatch = min(n_ubatch or c.n_ubatch, c.n_batch)
    check_sizes(config, n_seq, params.n_ubatch)
    params.n_seq_max = n_seq
    params.n_rs_seq = c.n_rs_seq
    # Left at 0 every token of a ubatch may have logits, and that buffer alone is 485 MiB at 248k vocabulary entries.
    params.n_outputs_max = c.n_outputs_max or min(n_seq * (1 + c.n_draft_max), c.n_batch)
    threads = c.n_threads if c.n_threads > 0 else default_threads()
    params.n_threads = threads
    params.n_threads_batch = c.n_threads_batch if c.n_threads_batch > 0 else threads
    params.rope_scaling_type = ROPE_SCALING[c.rope_scaling]
    params.rope_freq_base = c.rope_freq_base
    params.rope_freq_scale = c.rope_freq_scale or (1.0 / c.rope_scale if c.rope_scale else 0.0)
    params.yarn_orig_ctx = c.yarn_orig_ctx
    params.yarn_ext_factor = c.yarn_ext_factor
    params.yarn_attn_factor = c.yarn_attn_factor
    params.yarn_beta_fast = c.yarn_beta_fast
    params.yarn_beta_slow = c.yarn_beta_slow
    params.flash_attn_type = FLASH_ATTN[c.flash_attn]
    params.type_k = CACHE_TYPES[c.cache_type_k]
    params.type_v = CACHE_TYPES[c.cache_type_v]
    params.offload_kqv = c.offload_kqv
    params.op_offload = c.op_offload
    params.swa_full = c.swa_full
    params.kv_unified = is_unified(c)
    params.no_perf = True
    context = llama.llama_init_from_model(model, params)
    if not context:
        raise LoadError(
            f"no context of {n_ctx} tokens could be made: try a smaller -c, a smaller -ub, "
            "or a quantized cache (-ctk q8_0 -ctv q8_0 -fa on)"
        )
    return context


def check_sizes(config: Config, n_seq: int, n_ubatch: int) -> None:
    """Raise LoadError with a sentence where libllama would end the process: a batch or ubatch too small for `n_seq` sequences."""
    c = config.context
    if c.n_batch < n_seq:
        n_left = c.n_batch - n_spare(config)  # right for groups too, if not the most they could have
        raise LoadError(
            f"a batch of {c.n_batch} tokens has no room for one of each of the {n_seq} sequences"
            f"{' (the replay guard has one)' if n_spare(config) else ''}: use -b {n_seq} or more"
            + (f", or -np {n_left} or fewer" if n_left > 0 else "")
        )
    if min(n_ubatch, c.n_batch) < n_ubatch_min(c.n_rs_seq):
        raise LoadError(
            f"a ubatch of {min(n_ubatch, c.n_batch)} tokens is too small to keep {c.n_rs_seq} states of each sequence: "
            f"use -b and -ub {n_ubatch_min(c.n_rs_seq)} or more"
        )


def n_ubatch_min(n_rs_seq: int) -> int:
    """The smallest ubatch with `n_rs_seq` recurrent states to go back to: libllama ends the process with a smaller one."""
    return n_rs_seq + 2 if n_rs_seq else 1


def default_threads() -> int:
    """Threads when -t is not given: the cores this process may use."""
    import os

    return max(1, len(os.sched_getaffinity(0)))


def describe(
    library: Library, model: Any, path: Path, n_vocab: int, vocab_type: int, template: str | None
) -> ModelInfo:
    """Read a loaded model's facts."""
    llama = library.llama

    def meta(key: str) -> str:
        buffer = ctypes.create_string_buffer(512)
        n = llama.llama_model_meta_val_str(model, key.encode(), buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace") if n >= 0 else ""

    ftype = llama.llama_ftype_name(llama.llama_model_ftype(model))
    return ModelInfo(
        name=meta("general.name"),
        path=str(path),
        architecture=meta("general.architecture"),
        ftype=ftype.decode() if ftype else "",
        n_params=llama.llama_model_n_params(model),
        size_bytes=llama.llama_model_size(model),
        n_ctx_train=llama.llama_model_n_ctx_train(model),
        n_embd=llama.llama_model_n_embd(model),
        n_layer=llama.llama_model_n_layer(model),
        n_vocab=n_vocab,
        vocab_type=vocab_type,
        n_swa=llama.llama_model_n_swa(model),
        is_recurrent=bool(llama.llama_model_is_recurrent(model)),
        is_hybrid=bool(llama.llama_model_is_hybrid(model)),
        chat_template=template,
    )
