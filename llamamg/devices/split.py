"""`--tensor-split auto`: from devices and a model's header to the part of the model that each device gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from llamamg.abi import Device
from llamamg.config import Config
from llamamg.devices import balance, layers, profile, speed
from llamamg.devices.layers import Item
from llamamg.devices.speed import Speed
from llamamg.library import Library
from llamamg.memory import gpus, graph_memory
from llamamg.model import default_threads
from llamamg.modelfile import ModelHeader
from llamamg.placement import Placement

N_COPIES = 4  # libllama keeps so many sets of inputs where stages overlap
Measure = Callable[[Device], Speed]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of every item on every device, what each takes, and what there is."""

    items: Sequence[Item]
    seconds: Sequence[Sequence[float]]
    room: Sequence[int | None]
    fixed: int
    how: str

    def split(self, order: Sequence[int] | None = None) -> balance.Split | None:
        """The best split over the devices in this order."""
        order = range(len(self.seconds)) if order is None else order
        return balance.balance(
            [self.seconds[i] for i in order],
            [item.n_bytes for item in self.items],
            [self.room[i] for i in order],
            self.fixed,
        )


def costs(
    config: Config,
    header: ModelHeader,
    devices: Sequence[Device],
    speeds: Sequence[Speed],
    host: Speed | None = None,
    pooled_keys: bool = False,
    known: profile.Profile | None = None,
) -> Costs:
    """Measured times of the layers where `known` has them, else estimates from the devices' rates."""
    every = layers.items(config, header, pooled_keys)
    seconds = layers.estimated(every, speeds, host)
    how = "estimated from the rates of the devices"
    if known is not None:
        seconds = layers.from_measured(every, seconds, known.seconds, known.where)
        how = "measured by `llamamg doctor --devices`"
    n_gpu = config.model.n_gpu_layers
    first = 0 if isinstance(n_gpu, str) else max(0, len(every) - n_gpu)  # the layers before stay in main memory
    room = [device.memory_free if device.memory_free > 0 else None for device in devices]
    graph = graph_memory(config, header, pooled_keys)
    fixed = graph.total(has_logits=True) + (N_COPIES - 1) * graph.inputs + balance.SPARE
    return Costs(every[first:], [row[first:] for row in seconds], room, fixed, how)


def resolve(
    library: Library,
    config: Config,
    header: ModelHeader,
    say: Say,
    pooled_keys: bool = False,
    measure: Measure | None = None,
) -> Config:
    """The same start with numbers in place of `auto`; without any, by free memory, where nothing can be balanced."""
    if config.model.tensor_split != "auto":
        return config
    Placement(library, config.model)  # devices of other machines are known from here on
    return chosen(config, header, library.mg.devices(), measure or measurer(library, config), say, pooled_keys)


def chosen(
    config: Config,
    header: ModelHeader,
    present: Sequence[Device],
    measure: Measure,
    say: Say,
    pooled_keys: bool = False,
) -> Config:
    """`resolve` for the devices that are present."""

    def by_memory(why: str) -> Config:
        say(f"--tensor-split auto: {why}; the model is spread by free memory")
        return replace(config, model=replace(config.model, tensor_split=()))

    if config.model.split_mode not in ("layer", "none"):
        return by_memory(f"stages exist with --split-mode layer only, not with {config.model.split_mode}")
    devices = list(gpus(config, present))
    if len(devices) < 2:
        return by_memory(f"there is {'one device' if devices else 'no GPU'}, so there is nothing to balance")
    try:
        speeds = [measure(device) for device in devices]
        host = next((measure(device) for device in present if device.type == "cpu"), None)
        known = profile.load(header, devices, len(layers.items(config, header)))
        found = costs(config, header, devices, speeds, host, pooled_keys, known)
    except (RuntimeError, ValueError, TypeError, LookupError, ZeroDivisionError) as error:
        return by_memory(f"the devices or the model could not be measured ({error})")
    split = found.split()
    if split is None:
        return by_memory("by the estimate the model and its context do not fit on the devices")
    say(f"--tensor-split auto: {sentence(devices, found, split)}")
    parts = tuple(float(count) for count in split.counts)
    return replace(config, model=replace(config.model, tensor_split=parts))


def sentence(devices: Sequence[Device], found: Costs, split: balance.Split) -> str:
    """Which device gets what, and how long it takes."""
    stages = [
        f"{device.name} {_content(found.items, part)} ({1e3 * seconds:.2f} ms)"
        for device, part, seconds in zip(devices, split.ranges(), split.stages, strict=True)
    ]
    text = ", ".join(stages)
    return f"{','.join(map(str, split.counts))}: {text}; a token's time in each stage, {found.how}"


def _content(items: Sequence[Item], part: range) -> str:
    if not part:
        return "nothing"
    head = items[part[-1]].kind == "head"
    n = len(part) - head
    return " and ".join(
        text for text in (f"{n} layer{'s' * (n != 1)}" if n else "", "the head" if head else "") if text
    )


def measurer(library: Library, config: Config) -> Measure:
    """Measures a device of the loaded build."""
    n_threads = config.context.n_threads if config.context.n_threads > 0 else default_threads()

    def measure(device: Device) -> Speed:
        sizes = speed.sizes_for(device.type, device.backend)
        if 0 < device.memory_free < 4 * speed.GPU.n_bytes:
            sizes = speed.SMALL
        return speed.measure(library.dir, device.name, sizes, n_threads)

    return measure
