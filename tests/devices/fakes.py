"""Devices and a model that are not there."""

from __future__ import annotations

from pathlib import Path

from llamamg.abi import Device
from llamamg.devices.speed import Speed
from llamamg.modelfile import ModelHeader, TensorInfo

MIB, GIB = 2**20, 2**30


def gpu(i: int, free: int = 80 * GIB, name: str = "", backend: str = "CUDA") -> Device:
    return Device(name or f"CUDA{i}", "a card", backend, f"0000:{i:02x}", "gpu", True, True, free, 80 * GIB)


CPU = Device("CPU", "a processor", "CPU", "", "cpu", False, False, 64 * GIB, 64 * GIB)


def speed(gb_s: float) -> Speed:
    """No time for starting operations, so that times are bytes over rate."""
    return Speed(1e9 * gb_s, 1e12, 0.0)


def header(n_layer: int = 8, layer_mib: int = 100, head_mib: int = 100, experts: int = 0) -> ModelHeader:
    """`n_layer` equal layers and a head; of `experts` experts two are used."""
    keys = {
        "block_count": n_layer, "embedding_length": 1024, "context_length": 256,
        "attention.head_count": 8, "attention.head_count_kv": 8,
    }  # fmt: skip
    if experts:
        keys |= {"expert_count": experts, "expert_used_count": 2}
    tensors = [TensorInfo("token_embd.weight", (1024, 1000), "f16", 500 * MIB)]
    for layer in range(n_layer):
        tensors.append(TensorInfo(f"blk.{layer}.attn_k.weight", (1024, 1024), "f16", layer_mib * MIB // 2))
        name = "ffn_up_exps" if experts else "ffn_up"
        tensors.append(TensorInfo(f"blk.{layer}.{name}.weight", (1024, 1024), "f16", layer_mib * MIB // 2))
    tensors.append(TensorInfo("output.weight", (1024, 1000), "f16", head_mib * MIB))
    metadata = {"general.architecture": "x", **{f"x.{key}": value for key, value in keys.items()}}
    return ModelHeader((Path("x.gguf"),), metadata, tuple(tensors))
