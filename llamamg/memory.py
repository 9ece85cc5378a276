"""What a model needs in memory, from the header of its file alone, so that a start that cannot work is refused before loading.

The figures are lower bounds: nothing that would fit is refused. Weights that are mapped from the file live in the page
cache, which the system can drop, so they are never a reason to refuse; nor are buffers that a context does without where
they find no room, as those for further graphs of small ubatches.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Protocol, TypeVar

from llamamg.config import Config, ContextConfig
from llamamg.errors import LoadError
from llamamg.layout import by_context
from llamamg.memory_graph import GraphMemory
from llamamg.memory_shape import LayerShapes, padded
from llamamg.model import is_unified, n_slots
from llamamg.modelfile import TYPES, ModelHeader
from llamamg.placement import DENSE, EXPERTS

CPU = "CPU"
_ROW = {name: (per_block, block_bytes) for name, per_block, block_bytes in TYPES.values()}
_F32 = 4


class MemoryShortage(LoadError):
    """The model or its context does not fit. The text is a sentence with what is needed and what there is, in GiB."""


class DeviceMemory(Protocol):
    """What is read of a device; `llamamg.abi.Device` has it."""

    @property
    def name(self) -> str: ...
    @property
    def type(self) -> str: ...
    @property
    def memory_free(self) -> int: ...


DeviceT = TypeVar("DeviceT", bound=DeviceMemory)


@dataclass(slots=True)
class Need:
    """Bytes on one device."""

    weights: int = 0
    cache: int = 0  # keys and values
    indexer: int = 0  # keys of a sparse attention's indexer
    recurrent: int = 0  # states of recurrent layers
    compute: int = 0  # an allowance

    @property
    def context(self) -> int:
        return self.cache + self.indexer + self.recurrent + self.compute


@dataclass(slots=True)
class Estimate:
    """Bytes per device name; main memory is "CPU"."""

    n_ctx: int
    devices: dict[str, Need] = field(default_factory=dict)

    def on(self, device: str) -> Need:
        return self.devices.setdefault(device, Need())

    @property
    def total(self) -> Need:
        """The sum over all devices."""
        out = Need()
        for need in self.devices.values():
            for name in Need.__slots__:
                setattr(out, name, getattr(out, name) + getattr(need, name))
        return out


def check_memory(
    config: Config,
    header: ModelHeader,
    devices: Sequence[DeviceMemory] = (),
    warn: Callable[[str], None] = lambda _: None,
    pooled_keys: bool = False,
    raw_keys: bool = True,
) -> None:
    """Compare what is needed with what is free on each device. Raises MemoryShortage.

    `pooled_keys`: native QSA is on and keeps pooled keys beside the cache; `raw_keys`: beside those they come from.
    `warn` gets a sentence when it will work, but slowly: weights larger than main memory.
    """
    names = {device.name for device in devices}
    if config.model.rpc or set(config.model.devices or ()) - names:
        return  # devices of other machines are not known before loading
    try:
        needs = estimate(config, header, devices, pooled_keys, raw_keys)
    except (TypeError, ValueError, LookupError):
        return  # metadata of an odd shape: whether such a model loads is for libllama to say
    for device in devices:
        need = needs.devices.get(device.name)
        if (
            need is not None
            and device.name != CPU
            and device.memory_free
            and need.weights + need.context > device.memory_free
        ):
            raise MemoryShortage(
                f"{device.name} has {_gib(device.memory_free)} free, but needs {_gib(need.weights + need.context)}: "
                f"{_gib(need.weights)} of weights and {_gib(need.context)} for a context of {needs.n_ctx} tokens; "
                "lower --ctx-size or --gpu-layers, or take a smaller --cache-type-k and --cache-type-v"
            )
    need = needs.on(CPU)
    mapped = config.model.load_mode in ("auto", "mmap")
    wanted = need.context + (0 if mapped else need.weights)
    free, total = main_memory()
    if wanted > free:
        weights = "" if mapped else f" and {_gib(need.weights)} of weights (--load-mode {config.model.load_mode})"
        raise MemoryShortage(
            f"a context of {needs.n_ctx} tokens needs {_gib(need.context)} of main memory{weights}, but {_gib(free)} is free: "
            "lower --ctx-size, or take a smaller --cache-type-k and --cache-type-v"
        )
    if need.weights + need.context > total:
        warn(
            f"the weights ({_gib(need.weights)}) and the context ({_gib(need.context)}) are larger than main memory "
            f"({_gib(total)}): weights will be read from disk again and again"
        )


def estimate(
    config: Config,
    header: ModelHeader,
    devices: Sequence[DeviceMemory] = (),
    pooled_keys: bool = False,
    raw_keys: bool = True,
) -> Estimate:
    """Bytes needed on each device for weights, context and computing."""
    c = config.context
    layers = LayerShapes(header)
    place = _Placement(config, layers.n_layer, devices)
    out = Estimate(_cells(c, header)[2])
    for tensor in header.tensors:
        out.on(place.weight(tensor.name)).weights += tensor.n_bytes
    for layer in range(layers.n_layer):
        need = out.on(place.cache(layer))
        of_layer = layer_memory(config, header, layers, layer, pooled_keys, raw_keys)
        need.cache += of_layer.cache
        need.indexer += of_layer.indexer
        need.recurrent += of_layer.recurrent
    for device, need in out.devices.items():
        on_it = [layer for layer in range(layers.n_layer) if place.layer(layer) == device]
        has_logits = place.weight("output.weight") == device or (device == CPU and not place.devices)
        for of_context in by_context(c):
            graph = GraphMemory(of_context, header, on_it, _cells(c, header)[0], pooled_keys)
            need.compute += graph.total(has_logits)
            if device == CPU:
                need.compute += graph.logits  # the host's copy
    return out


def layer_memory(
    config: Config, header: ModelHeader, layers: LayerShapes, layer: int, pooled_keys: bool, raw_keys: bool = True
) -> Need:
    """What one layer remembers of all sequences: cache, indexer keys, recurrent state."""
    c, need = config.context, Need()
    n_cells, n_streams, _ = _cells(c, header)
    if layers.has_attention(layer):
        cells = layers.cells(layer, n_cells, c, n_streams)
        for kind, n_values in ((c.cache_type_k, layers.n_k(layer)), (c.cache_type_v, layers.n_v(layer))):
            need.cache += n_streams * cells * _row_bytes(kind, n_values)
        if raw_keys:
            need.indexer += n_streams * n_cells * _row_bytes(c.cache_type_k, layers.n_indexer(layer))
        if pooled_keys:
            need.indexer += int(n_streams * n_cells * _F32 * layers.n_pooled(layer))
    if layers.is_recurrent(layer):
        n_rows = (n_slots(c) + c.n_prefill_slots) * (1 + c.n_rs_seq)
        need.recurrent += n_rows * _F32 * layers.n_state(layer)
    return need


def _cells(c: ContextConfig, header: ModelHeader) -> tuple[int, int, int]:
    """Cells per stream, streams, and the context they make together."""
    slots, unified = n_slots(c), is_unified(c)
    n_ctx = c.n_ctx or int(header.get("context_length", 0)) * (1 if unified else slots)
    if unified:
        return padded(n_ctx), 1, n_ctx
    return padded(max(1, n_ctx // slots)), slots + c.n_prefill_slots, n_ctx


def _row_bytes(kind: str, n_values: int) -> int:
    per_block, block_bytes = _ROW[kind]
    return -(-n_values // per_block) * block_bytes


def graph_memory(config: Config, header: ModelHeader, pooled_keys: bool) -> GraphMemory:
    """What computing takes on a device that holds layers of every kind."""
    c = config.context
    every = range(LayerShapes(header).n_layer)
    return GraphMemory(c, header, every, _cells(c, header)[0], pooled_keys)


class _Placement:
    """Which device gets a tensor or a layer's cache, as libllama spreads layers over devices."""

    def __init__(self, config: Config, n_layer: int, devices: Sequence[DeviceMemory]) -> None:
        m = config.model
        self.n_layer, self.offload = n_layer, config.context.offload_kqv
        self.devices = list(gpus(config, devices))
        has_all = isinstance(m.n_gpu_layers, str) or m.n_gpu_layers < 0
        n_gpu = n_layer + 1 if has_all else min(int(m.n_gpu_layers), n_layer + 1)
        self.first = n_layer + 1 - n_gpu if self.devices else n_layer + 1
        given = m.tensor_split if isinstance(m.tensor_split, tuple) else ()
        parts = [*given[: len(self.devices)]] or [float(device.memory_free) for device in self.devices]
        parts = [*parts, *[0.0] * (len(self.devices) - len(parts))]
        total = sum(parts) or 1.0
        self.bounds = [bound / total for bound in accumulate(parts)]
        self.overrides = overrides(config)

    def weight(self, tensor: str) -> str:
        for pattern, buffer in self.overrides:
            if pattern.search(tensor):
                return buffer
        if tensor.startswith("blk."):
            return self.layer(int(tensor.split(".")[1]))
        return self.layer(self.n_layer) if tensor.startswith("output") else CPU

    def cache(self, layer: int) -> str:
        return self.layer(layer) if self.offload else CPU

    def layer(self, layer: int) -> str:
        if layer < self.first or not self.devices:
            return CPU
        part = (layer - self.first) / max(1, self.n_layer + 1 - self.first)
        return self.devices[min(bisect_right(self.bounds, part), len(self.devices) - 1)].name


def place(config: Config, devices: Sequence[DeviceMemory], n_layer: int) -> list[str]:
    """The device of each layer, and of the head as the last one."""
    spread = _Placement(config, n_layer, devices)
    return [spread.layer(layer) for layer in range(n_layer + 1)]


def gpus(config: Config, devices: Sequence[DeviceT]) -> Iterator[DeviceT]:
    """The devices that take layers, in libllama's order: those of other machines first."""
    m = config.model
    found = {device.name: device for device in devices if device.type in ("gpu", "igpu")}
    discrete = [device for device in found.values() if device.type == "gpu"]
    discrete.sort(key=lambda device: not device.name.startswith("RPC"))
    chosen = (
        (discrete or list(found.values()))
        if m.devices is None
        else [found[name] for name in m.devices if name in found]
    )
    if m.split_mode == "none":
        chosen = chosen[m.main_gpu : m.main_gpu + 1]
    yield from chosen


def overrides(config: Config) -> list[tuple[re.Pattern[str], str]]:
    """Which tensors go to which buffer type, whatever device their layer is on. The first that matches counts."""
    m = config.model
    wanted = list(m.override_tensor)
    if m.cpu_moe:
        wanted.append((EXPERTS, CPU))
    wanted += [(rf"blk\.{layer}{EXPERTS}", CPU) for layer in range(m.n_cpu_moe)]
    wanted += [(rf"blk\.{layer}{DENSE}", CPU) for layer in range(m.n_cpu_ffn)]
    return [(re.compile(pattern), buffer) for pattern, buffer in wanted]


def main_memory() -> tuple[int, int]:
    """Bytes of main memory that can be had and that there are. Swap and droppable page cache count, a container's limit too."""
    values = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        values[name] = int(rest.split()[0]) * 1024
    free, total = values["MemAvailable"] + values.get("SwapFree", 0), values["MemTotal"]
    return min(free, _container_free(free)), total


def _container_free(otherwise: int) -> int:
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        if limit == "max":
            return otherwise
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        used = int((root / "memory.current").read_text())
        return int(limit) - used + int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
    except (OSError, ValueError):
        return otherwise


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f} GiB"
