"""Everything a server is started with, as frozen values: the command line is parsed into these and nothing else reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamamg.request import SamplingParams


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and where its tensors go. Names and defaults are llama-server's."""

    path: Path
    n_gpu_layers: int | str = "auto"  # a number, "auto" or "all"
    split_mode: str = "layer"  # none | layer | row | tensor
    tensor_split: tuple[float, ...] | str = ()  # parts, or "auto" until the devices are known
    main_gpu: int = 0
    devices: tuple[str, ...] | None = None  # None: all; () : none
    override_tensor: tuple[tuple[str, str], ...] = ()  # (regex, buffer type name)
    cpu_moe: bool = False
    n_cpu_moe: int = 0
    n_cpu_ffn: int = 0
    load_mode: str = "auto"  # auto | none | mmap | mlock | mmap+mlock | dio
    lazy_mode: str = "auto"  # on | auto | off
    rpc: tuple[str, ...] = ()  # host:port of ggml rpc-servers
    check_tensors: bool = False
    repack: bool = True  # extra buffer types of backends
    no_host: bool = False
    override_kv: tuple[tuple[str, str, str], ...] = ()  # (key, type, value)


@dataclass(frozen=True, slots=True)
class ContextConfig:
    """Context, batch and cache. `n_ctx` is the total over all slots; 0 takes the model's training context."""

    n_ctx: int = 0
    n_parallel: int = -1  # -1: 4 slots over one unified cache, as llama-server does
    kv_unified: bool | None = None
    n_batch: int = 2048
    n_ubatch: int = 512
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attn: str = "auto"  # on | off | auto
    n_threads: int = -1
    n_threads_batch: int = -1
    n_ctx_checkpoints: int = 32
    checkpoint_min_step: int = 8192
    n_outputs_max: int = 0  # 0: slots x (1 + draft width)
    n_draft_max: int = 0  # draft width of one slot; plugins that draft raise it in `configure`
    draft_types: tuple[str, ...] = ()  # what drafts are made of, as clients are told; the same plugins name it
    n_rs_seq: int = 0
    swa_full: bool = False
    offload_kqv: bool = True
    op_offload: bool = True
    rope_scaling: str | None = None  # none | linear | yarn
    rope_scale: float = 0.0
    rope_freq_base: float = 0.0
    rope_freq_scale: float = 0.0
    yarn_orig_ctx: int = 0
    yarn_ext_factor: float = -1.0
    yarn_attn_factor: float = -1.0
    yarn_beta_slow: float = -1.0
    yarn_beta_fast: float = -1.0
    warmup: bool = True
    n_groups: int = 1  # contexts that the slots are shared out over; plugins set this and the next three in `configure`
    n_prefill_slots: int = 0  # prompts that one more context, only for prompts, has room for; 0: no such context
    n_ubatch_decode: int = 0  # ubatch of the slots' contexts where prompts have their own; 0: like n_ubatch
    stall_s: float = 600.0  # with several contexts: requests fail when nothing ends for so long; 0: wait for ever
    n_prompt_local: int = (
        64  # of a prompt, so much at most is computed where the slot is, although prompts have a context
    )


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """Defaults of a request, and what the slots do with prompts."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    n_predict: int = -1
    n_keep: int = 0
    cache_prompt: bool = True
    context_shift: bool = False
    slot_prompt_similarity: float = 0.10
    special: bool = False  # render special tokens in the output
    chat_template: str | None = None  # a template's text; None: the model's own
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reasoning_format: str = "auto"
    jinja: bool = True
    prefill_assistant: bool = True


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """HTTP: address, keys, CORS and which endpoints answer."""

    host: str = "127.0.0.1"
    port: int = 8080
    api_prefix: str = ""
    api_keys: tuple[str, ...] = ()
    alias: tuple[str, ...] = ()  # first one is the name reported as `model`
    tags: tuple[str, ...] = ()
    timeout_s: float = 3600.0
    sse_ping_interval_s: float = 30.0
    endpoint_metrics: bool = False
    endpoint_props: bool = False
    endpoint_slots: bool = True
    slot_save_path: Path | None = None
    static_path: Path | None = None
    cors_origins: str = "*"
    cors_methods: str = "GET, POST, DELETE, OPTIONS"
    cors_headers: str = "*"
    cors_credentials: bool = True
    parse_inline_bytes: int = 65536  # larger bodies are parsed and tokenized in a process of their own
    log_level: int = 3  # llama.cpp's verbosity scale
    ssl_key_file: Path | None = None
    ssl_cert_file: Path | None = None


@dataclass(frozen=True, slots=True)
class PluginsConfig:
    """Which plugins are on, and their options."""

    enable: tuple[str, ...] = ()  # names added to auto; see `only` and `none`
    disable: tuple[str, ...] = ()
    only: bool = False  # `--enable only:a,b`
    none: bool = False  # `--enable none`
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # plugin -> option -> text as typed
    ignore_missing: bool = False
    guard_replay: int = 0  # one in so many finished requests is replayed without plugins while nothing runs; 0: none


@dataclass(frozen=True, slots=True)
class Config:
    """The whole of it."""

    model: ModelConfig
    context: ContextConfig = field(default_factory=ContextConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    plugins: PluginsConfig = field(default_factory=PluginsConfig)
    build: Path | None = None  # which native build to load; None: the patched one
    native_switches: Mapping[str, bool] = field(default_factory=dict)  # name -> on, as given by --native-switch
