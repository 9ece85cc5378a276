"""Checks that need more than one option, with sentences that say what to change."""

from __future__ import annotations

from dataclasses import replace

from llamamg.config import Config
from llamamg.options.option import OptionError

QUANTIZED = ("q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


def check(config: Config, notes: list[str]) -> Config:
    """The config with values clamped as llama-server clamps them. Raises OptionError with one sentence."""
    context, server, model = config.context, config.server, config.model
    if context.n_ubatch > context.n_batch:
        notes.append(
            f"--ubatch-size {context.n_ubatch} is larger than --batch-size {context.n_batch}; "
            f"{context.n_batch} is used for both."
        )
        context = replace(context, n_ubatch=context.n_batch)
    if context.cache_type_v in QUANTIZED and context.flash_attn == "off":
        raise OptionError(
            f"--cache-type-v {context.cache_type_v} needs flash attention: "
            "drop --flash-attn off, or use f16 for the values."
        )
    if (server.ssl_key_file is None) != (server.ssl_cert_file is None):
        raise OptionError("HTTPS needs both --ssl-key-file and --ssl-cert-file; give the other one too, or neither.")
    parts = model.tensor_split if isinstance(model.tensor_split, tuple) else ()
    if model.devices is not None and len(parts) > max(1, len(model.devices)):
        raise OptionError(
            f"--tensor-split has {len(parts)} parts for {len(model.devices)} devices; "
            "give at most one part for each name in --device."
        )
    if model.devices == () and model.n_gpu_layers not in ("auto", 0):
        notes.append("--gpu-layers has no effect: --device none keeps everything on the CPU.")
    return replace(config, context=context)
