"""`llamamg doctor --devices`: what the devices can do, what each would hold, and in which order they are best used."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llamamg.abi import Device
from llamamg.config import Config, ModelConfig
from llamamg.devices import hops, hops_cupy, order, profile, split, stages
from llamamg.devices.ggml import DeviceError
from llamamg.devices.hops import Hop
from llamamg.devices.layers import items
from llamamg.devices.speed import Speed
from llamamg.devices.stages import Times
from llamamg.errors import LoadError
from llamamg.library import Library
from llamamg.memory import Estimate, estimate, gpus, place
from llamamg.model import load_model
from llamamg.modelfile import ModelHeader, open_model
from llamamg.placement import Placement

F32 = 4
Told = Callable[[str], None]  # hears what is being measured


def survey(library: Library, config: Config | None, told: Told) -> dict[str, Any]:
    """Everything, as JSON types; with a `config` also what its model would make of the devices. Raises LoadError."""
    if config is not None:
        Placement(library, config.model)  # registers the devices of other machines
    present = library.mg.devices()
    wanted = config or Config(ModelConfig(Path()))
    devices = list(gpus(wanted, present)) or [device for device in present if device.type == "cpu"][:1]
    if not devices:
        raise LoadError("this build has no device: run `llamamg build`")
    measure = split.measurer(library, wanted)
    speeds: dict[str, Speed] = {}
    for device in [*devices, *(d for d in present if d.type == "cpu")]:
        if device.name not in speeds:
            told(f"speed of {device.name}")
            speeds[device.name] = measure(device)
    found, note = _hops(library, devices, told)
    out: dict[str, Any] = {
        "devices": [_device(device, speeds[device.name]) for device in devices],
        "host": speeds[devices_host(present)].json() if devices_host(present) else None,
        "hops": [hop.json() for hop in found],
        "hops_note": note,
    }
    hop_of = {(hop.source, hop.target): hop for hop in found if hop.path == "ggml"}
    if config is None:
        out["order"] = _order(devices, hop_of, None, hops.SMALL_BYTES)
        return out
    header = open_model(config.model.path)
    return {**out, **_with_model(library, config, header, present, devices, speeds, hop_of, told)}


def _with_model(
    library: Library,
    config: Config,
    header: ModelHeader,
    present: Sequence[Device],
    devices: list[Device],
    speeds: dict[str, Speed],
    hop_of: dict[tuple[str, str], Hop],
    told: Told,
) -> dict[str, Any]:
    pooled_keys = bool(config.native_switches.get("qsa"))
    as_given = config
    if config.model.tensor_split == "auto":  # what is there to be balanced is measured as libllama spreads it
        as_given = replace(config, model=replace(config.model, tensor_split=()))
    every = items(config, header, pooled_keys)
    names = [device.name for device in devices]
    placed = place(as_given, present, len(every) - 1)
    where = [names.index(name) if name in names else -1 for name in placed]  # -1: in main memory, beside the devices
    needs = estimate(as_given, header, present, pooled_keys)
    told(f"time of the layers of {config.model.path.name}")
    times, why = _stages(library, as_given, len(every) - 1)
    known = None
    if times and min(where) >= 0:
        of_items = _of_items(times["decode"], where)
        known = profile.Profile(tuple(of_items), tuple(where))
        profile.save(header, devices, known)
    host = speeds.get(devices_host(present))
    found = split.costs(config, header, devices, [speeds[name] for name in names], host, pooled_keys, known)
    balanced = found.split()
    n_hop = F32 * int(header.get("embedding_length", 0)) * int(header.get("hyper_connection.count", 1))
    return {
        "model": {"file": config.model.path.name, "n_layers": len(every) - 1, "hop_bytes_per_token": n_hop},
        "stages": [
            _stage(i, device, where, every, times, needs) for i, device in enumerate(devices)
        ],
        "stages_note": why or "as libllama spreads the model; layers are timed one by one, so stages do not overlap",
        "layers": {name: value.json() for name, value in times.items()},
        "split": None if balanced is None else {
            "tensor_split": ",".join(map(str, balanced.counts)),
            "stages_ms": [round(1e3 * s, 3) for s in balanced.stages],
            "how": found.how,
            "sentence": split.sentence(devices, found, balanced),
        },
        "order": _order(devices, hop_of, found, n_hop),
    }  # fmt: skip


def devices_host(present: Sequence[Device]) -> str:
    """Name of the CPU's device; "" where there is none."""
    return next((device.name for device in present if device.type == "cpu"), "")


def _device(device: Device, speed: Speed) -> dict[str, Any]:
    return {
        "name": device.name,
        "description": device.description,
        "type": device.type,
        "memory_free": device.memory_free,
        "memory_total": device.memory_total,
        **speed.json(),
    }


def _hops(library: Library, devices: Sequence[Device], told: Told) -> tuple[list[Hop], str]:
    names = [device.name for device in devices]
    if len(names) < 2:
        return [], f"{names[0]} has no neighbour: there is nothing to hop to"
    remote = {device.name for device in devices if device.backend == "RPC"}
    found = []
    for a, b in hops.all_pairs(names):
        told(f"hop from {a} to {b}")
        try:
            found.append(hops.measure(library.dir, a, b, remote=a in remote or b in remote))
        except DeviceError as error:
            return found, str(error)
    cupy, why = hops_cupy.available(names)
    if cupy is None:
        return found, why
    for a, b in hops.all_pairs([name for name in names if hops_cupy.is_cuda(name)]):
        told(f"hop from {a} to {b} by cupy")
        try:
            found += hops_cupy.measure(cupy, a, b)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            return found, f"cupy could not copy from {a} to {b}: {error}"
    return found, ""


def _stages(library: Library, config: Config, n_layer: int) -> tuple[dict[str, Times], str]:
    """Times of the layers, or why there are none."""
    try:
        model = load_model(library, config.model)
    except LoadError as error:
        return {}, f"not measured: {error}"
    try:
        return stages.measure(library, model, config, n_layer), ""
    except LoadError as error:
        return {}, f"not measured: {error}"
    finally:
        library.llama.llama_model_free(model)


def _of_items(times: Times, where: Sequence[int]) -> list[float]:
    """Seconds of each layer and of the head. What came before a layer is its own, unless a hop is in it."""
    out = []
    for i, seconds in enumerate(times.layers):
        inside = i > 0 and where[i - 1] == where[i]
        out.append(max(1e-9, seconds + (times.before[i] if inside else 0.0)))
    return [*out, max(1e-9, times.head)]


def _stage(
    i: int, device: Device, where: Sequence[int], every: Sequence[Any], times: dict[str, Times], needs: Estimate
) -> dict[str, Any]:
    mine = [n for n, at in enumerate(where) if at == i]
    need = needs.devices.get(device.name)
    row: dict[str, Any] = {
        "device": device.name,
        "n_layers": sum(every[n].kind != "head" for n in mine),
        "has_head": any(every[n].kind == "head" for n in mine),
        "weights_bytes": sum(every[n].weights for n in mine),
        "context_bytes": need.context if need is not None else 0,
    }
    for phase, value in times.items():
        of_items = _of_items(value, where)
        row[f"{phase}_ms"] = round(1e3 * sum(of_items[n] for n in mine), 3)
        if i > 0 and mine:
            row[f"{phase}_hop_ms"] = round(1e3 * value.before[mine[0]], 3) if mine[0] < len(value.before) else None
    return row


def _order(
    devices: Sequence[Device], hop_of: dict[tuple[str, str], Hop], found: split.Costs | None, n_bytes: int
) -> dict[str, Any] | None:
    """The order to use, and how to ask for it."""
    names = [device.name for device in devices]
    if len(names) < 2 or any(pair not in hop_of for pair in hops.all_pairs(names)):
        return None
    hop = [[hop_of[a, b].seconds(n_bytes) if a != b else 0.0 for b in names] for a in names]

    def stage(tried: tuple[int, ...]) -> float:
        best = found.split(tried) if found is not None else None
        return best.slowest if best is not None else float("inf")

    if found is None:
        choice = order.choose(len(names), lambda _: 0.0, hop, 0.0)
    else:
        fastest = [min(column) for column in zip(*found.seconds, strict=True)]
        choice = order.choose(len(names), stage, hop, sum(fastest) / len(names))
    chosen = [names[i] for i in choice.order]
    best = found.split(choice.order) if found is not None else None
    return {
        "devices": chosen,
        "is_present": choice.order == tuple(range(len(names))),
        "cost_ms": _ms(choice.cost_s),
        "present_ms": _ms(choice.present_s),
        "n_tried": choice.tried,
        "tensor_split": ",".join(map(str, best.counts)) if best is not None else None,
        "how": _how(chosen),
    }


def _ms(seconds: float) -> float | None:
    return round(1e3 * seconds, 4) if seconds < float("inf") else None


def _how(names: Sequence[str]) -> str:
    """The flag, and for CUDA devices the variable that does the same for every program."""
    flag = f"--device {','.join(names)}"
    if not all(hops_cupy.is_cuda(name) for name in names) or os.environ.get("GGML_CUDA_DEVICES"):
        return flag
    numbers = [name.removeprefix("CUDA") for name in names]
    if seen := os.environ.get("CUDA_VISIBLE_DEVICES"):  # our numbers count within what it lets through
        known = seen.split(",")
        numbers = [known[int(number)] for number in numbers if int(number) < len(known)]
    return f"{flag}, or CUDA_VISIBLE_DEVICES={','.join(numbers)}"
