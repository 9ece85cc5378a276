"""What each layer of a model takes: memory on its device, and time there, from the header of its file and a device's rates.

The time is an estimate: weights read for one token over the rate of reading, plus a start for every operation. Measured
times of layers replace it where there are some.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llamamg.config import Config
from llamamg.devices.speed import Speed
from llamamg.memory import CPU, Need, layer_memory, overrides
from llamamg.memory_shape import LayerShapes
from llamamg.modelfile import ModelHeader

OPS_PER_TENSOR = 3  # graph operations for each weight; 2.7 to 3.3 in llama, qwen3moe and qwen4exp
HEAD = ("output",)  # tensors of the last stage


@dataclass(slots=True)
class Item:
    """A layer, or the head as the last one."""

    name: str
    kind: tuple[bool, bool] | str  # layers of a kind do the same work
    weights: int = 0  # bytes on its device
    read: float = 0.0  # bytes read there for a token
    read_on_host: float = 0.0  # bytes of overridden tensors, read in main memory
    n_tensors: int = 0
    memory: Need = field(default_factory=Need)

    @property
    def n_bytes(self) -> int:
        """What it takes of its device."""
        return self.weights + self.memory.cache + self.memory.indexer + self.memory.recurrent

    def seconds(self, device: Speed, host: Speed | None = None) -> float:
        """Estimate for one token."""
        s = self.read / device.read_bytes_per_s + OPS_PER_TENSOR * self.n_tensors * device.op_s
        return s + (self.read_on_host / host.read_bytes_per_s if host is not None else 0.0)


def items(config: Config, header: ModelHeader, pooled_keys: bool = False) -> list[Item]:
    """All layers and the head, in order. Tables that stay in main memory are in none: a token reads a row of them."""
    shapes = LayerShapes(header)
    n_expert = int(header.get("expert_count", 0) or 0)
    part = int(header.get("expert_used_count", 0) or 0) / n_expert if n_expert else 1.0
    elsewhere = [(pattern, buffer) for pattern, buffer in overrides(config)]
    found = [
        Item(
            f"layer {layer}",
            (shapes.is_recurrent(layer), shapes.has_attention(layer)),
            memory=layer_memory(config, header, shapes, layer, pooled_keys),
        )
        for layer in range(shapes.n_layer)
    ]
    found.append(Item("head", "head"))
    names = {tensor.name for tensor in header.tensors}
    for tensor in header.tensors:
        if tensor.name.startswith("blk."):
            layer = int(tensor.name.split(".")[1])
            if layer >= shapes.n_layer:
                continue
            item = found[layer]
        elif tensor.name.startswith(HEAD) or (tensor.name == "token_embd.weight" and "output.weight" not in names):
            item = found[-1]
        else:
            continue
        read = tensor.n_bytes * (part if "_exps" in tensor.name else 1.0)
        item.n_tensors += 1
        if any(pattern.search(tensor.name) and buffer == CPU for pattern, buffer in elsewhere):
            item.read_on_host += read
        else:
            item.weights += tensor.n_bytes
            item.read += read
    return found


def estimated(every: Sequence[Item], speeds: Sequence[Speed], host: Speed | None = None) -> list[list[float]]:
    """Seconds of every item (inner) on every device (outer)."""
    return [[item.seconds(speed, host) for item in every] for speed in speeds]


def from_measured(
    every: Sequence[Item], guess: Sequence[Sequence[float]], measured: Sequence[float], where: Sequence[int]
) -> list[list[float]]:
    """Seconds of every item on every device, from what was measured on the device `where` each item was.

    What a device did not compute itself is that of the same kind there; failing that, the measured time in the estimates'
    proportion.
    """
    seen: dict[tuple[int, object], list[float]] = {}
    for item, seconds, device in zip(every, measured, where, strict=True):
        seen.setdefault((device, item.kind), []).append(seconds)
    out = []
    for device, row in enumerate(guess):
        times = []
        for i, item in enumerate(every):
            same = seen.get((device, item.kind))
            if device == where[i]:
                times.append(measured[i])
            elif same:
                times.append(sum(same) / len(same))
            else:
                times.append(measured[i] * row[i] / guess[where[i]][i])
        out.append(times)
    return out
