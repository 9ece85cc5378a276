"""What plugins may ask about the model and the native library. Importing this loads nothing native."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from llamamg.abi import QsaStats
    from llamamg.config import Config


def architecture(config: Config) -> str:
    """The model's architecture, from its file; empty without a model. Raises ModelFileError."""
    from llamamg.modelfile import open_model

    return open_model(config.model.path).architecture if config.model.path.is_file() else ""


def n_experts(config: Config) -> int:
    """Experts of a mixture, in each layer that is one; 0 in a model without, and without a model. Raises ModelFileError."""
    from llamamg.modelfile import open_model

    return int(open_model(config.model.path).get("expert_count", 0)) if config.model.path.is_file() else 0


def n_stages(config: Config, devices: Sequence[Any]) -> int:
    """Devices that a token passes one after the other: those that hold layers. Virtual devices of one GPU are one.

    `devices` as in the hook `configure`. Each rpc-server counts as one device.
    """
    from llamamg.modelfile import open_model

    m = config.model
    if m.split_mode != "layer":
        return 1
    gpus = [d for d in devices if d.type == "gpu"] or [d for d in devices if d.type == "igpu"]
    remote = [("rpc", endpoint) for endpoint in m.rpc]
    if m.devices is None:
        # libllama puts rpc devices before its own ones.
        chosen = [*remote, *[(d.backend, d.device_id or d.name) for d in gpus]]
    else:
        by_name = {d.name: (d.backend, d.device_id or d.name) for d in devices}
        chosen = [by_name.get(name, ("rpc", name)) for name in m.devices]
    given = m.tensor_split if isinstance(m.tensor_split, tuple) else ()
    shares = given or (1.0,) * len(chosen)
    held = [device for device, share in zip(chosen, shares, strict=False) if share > 0]
    if not held or m.n_gpu_layers == 0:
        return 1
    n_layer = int(open_model(m.path).get("block_count", 0)) if m.path.is_file() else 0
    has_host_layers = isinstance(m.n_gpu_layers, int) and 0 <= m.n_gpu_layers < n_layer
    return len(set(held)) + has_host_layers


def has_switch(name: str) -> bool:
    """Does the loaded library have this native switch? True while none is loaded: nothing speaks against it."""
    from llamamg import library

    loaded = library.current()
    return loaded is None or any(switch.name == name for switch in loaded.mg.switches())


def set_switch(name: str, value: int) -> bool:
    """Turn a native switch now, from any thread; False where no loaded library has it. A plugin that names it in
    `native_switches` too should give the same value there: each toggle of a plugin sets all switches again."""
    from llamamg import library

    loaded = library.current()
    if loaded is None or not has_switch(name):
        return False
    loaded.mg.set_switch(name, value)
    return True


def has_patch(name: str) -> bool:
    """Was the loaded library built with this patch, such as "graph-check-and-send"? True while none is loaded."""
    from llamamg import library

    loaded = library.current()
    return loaded is None or any(p["name"].endswith(f"-{name}.patch") for p in loaded.build_info.get("patches", ()))


def has_lookup() -> bool:
    """Does the loaded library have an index for drafts (`DraftIndex`)? True while none is loaded."""
    from llamamg import library

    loaded = library.current()
    return loaded is None or hasattr(loaded.mg.lib, "mg_lookup_new")


def keeps_state(config: Config) -> bool:
    """Does the model have recurrent layers, whose state cannot be cut back? False without a model. Raises ModelFileError."""
    from llamamg.memory_shape import LayerShapes
    from llamamg.modelfile import open_model

    if not config.model.path.is_file():
        return False
    layers = LayerShapes(open_model(config.model.path))
    return any(layers.is_recurrent(layer) for layer in range(layers.n_layer))


def affordable_rollback(config: Config, devices: Sequence[Any], n_most: int) -> int:
    """Tokens, at most `n_most`, that recurrent states can be kept for (`n_rs_seq`): each takes the memory of all states."""
    from dataclasses import replace

    from llamamg.memory import MemoryShortage, check_memory
    from llamamg.modelfile import open_model

    header = open_model(config.model.path)
    for n in range(n_most, 0, -1):
        context = replace(config.context, n_rs_seq=n)
        try:
            check_memory(replace(config, context=context), header, devices)
        except MemoryShortage:
            continue
        return n
    return 0


def only_gpus(config: Config, devices: Sequence[Any]) -> list[Any]:
    """The GPUs of this machine that hold every layer and its memory; [] where the CPU or another machine has a part of them.

    `devices` as in the hook `configure`; the virtual devices of one GPU are several. [] without a model. Raises ModelFileError.
    """
    from llamamg.memory import gpus, overrides
    from llamamg.modelfile import open_model

    m = config.model
    if m.rpc or overrides(config) or not config.context.offload_kqv or not m.path.is_file():
        return []
    n_layer = int(open_model(m.path).get("block_count", 0))
    # libllama counts the head as one layer more, and takes the last ones.
    has_all = isinstance(m.n_gpu_layers, str) or not 0 <= m.n_gpu_layers <= n_layer
    return list(gpus(config, devices)) if has_all else []


def has_room(config: Config, devices: Sequence[Any], spare: float = 0.1) -> bool:
    """Does it fit on the GPUs, by a lower bound and with this share of their free memory left? False where nobody knows.

    `devices` as in the hook `configure`. Raises ModelFileError.
    """
    from llamamg.memory import estimate, gpus, place
    from llamamg.modelfile import open_model

    if config.model.rpc or not config.model.path.is_file():
        return False
    header = open_model(config.model.path)
    try:
        needs = estimate(config, header, devices, pooled_keys=True)
        sizes = {tensor.name: tensor.n_bytes for tensor in header.tensors}
        if "output.weight" not in sizes:  # then most models have their embeddings there once more
            head = place(config, devices, int(header.get("block_count", 0)))[-1]
            needs.on(head).weights += sizes.get("token_embd.weight", 0)
    except (TypeError, ValueError, LookupError):
        return False  # metadata of an odd shape
    used = [(device.memory_free, needs.on(device.name)) for device in gpus(config, devices)]
    return all(need.weights + need.context <= (1 - spare) * free for free, need in used)


def qsa_stats() -> QsaStats:
    """Counters of native QSA of the loaded library; zeros while none is loaded."""
    from llamamg import library
    from llamamg.abi import QsaStats

    loaded = library.current()
    return loaded.mg.qsa_stats() if loaded else QsaStats(0, 0, 0, 0)


def native_count(name: str) -> int:
    """How often the loaded library came to a point it counts, such as "rebuilt" (see native/src/mg_trace.h); 0 while none
    is loaded, or one that does not count. Raises KeyError for a name that it does not know."""
    from llamamg import library

    loaded = library.current()
    return loaded.mg.trace_count(name) if loaded and has_switch("trace") else 0
