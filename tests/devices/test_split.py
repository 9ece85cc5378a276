"""`--tensor-split auto` with devices that are not there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from llamamg import paths
from llamamg.abi import Device
from llamamg.config import Config, ContextConfig, ModelConfig
from llamamg.devices import layers, profile, split
from llamamg.devices.ggml import DeviceError
from llamamg.devices.speed import Speed
from llamamg.memory import estimate, place
from llamamg.modelfile import ModelHeader

from .fakes import CPU, GIB, MIB, gpu, header, speed

CONTEXT = ContextConfig(n_ctx=256, n_parallel=1)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No profile of an earlier run counts."""
    monkeypatch.setattr(paths, "home", lambda: tmp_path)


def auto(
    devices: Sequence[Device], rates: Mapping[str, float], model: ModelHeader | None = None, **more: object
) -> tuple[tuple[float, ...] | str, str]:
    """The split for devices of these GB/s, and what was said."""
    said: list[str] = []
    config = Config(replace(ModelConfig(Path("x.gguf"), tensor_split="auto"), **more), CONTEXT)  # type: ignore[arg-type]

    def measure(device: Device) -> Speed:
        return speed(rates[device.name])

    done = split.chosen(config, model or header(), devices, measure, said.append)
    assert len(said) == 1
    return done.model.tensor_split, said[0]


def test_uneven_speeds_get_uneven_parts() -> None:
    parts, said = auto([CPU, gpu(0), gpu(1)], {"CPU": 50, "CUDA0": 2000, "CUDA1": 1000})
    assert parts == (6.0, 3.0)
    assert "CUDA0 6 layers" in said
    assert "CUDA1 2 layers and the head" in said


def test_equal_devices_share_evenly_and_the_head_counts() -> None:
    rates = {"CPU": 50, "CUDA0": 1000, "CUDA1": 1000}
    assert auto([CPU, gpu(0), gpu(1)], rates)[0] in ((5.0, 4.0), (4.0, 5.0))
    assert auto([CPU, gpu(0), gpu(1)], rates, header(head_mib=400))[0] == (6.0, 3.0)


def test_memory_bounds_the_fast_device() -> None:
    small = gpu(0, 256 * MIB + 250 * MIB)
    parts, said = auto([CPU, small, gpu(1)], {"CPU": 50, "CUDA0": 9000, "CUDA1": 1000})
    assert parts == (2.0, 7.0)
    assert "CUDA0 2 layers" in said


def test_no_room_falls_back_with_a_sentence() -> None:
    parts, said = auto([CPU, gpu(0, 300 * MIB), gpu(1, 300 * MIB)], {"CPU": 50, "CUDA0": 1, "CUDA1": 1})
    assert parts == ()
    assert "do not fit" in said
    assert "by free memory" in said


@pytest.mark.parametrize(("devices", "word"), [([CPU], "no GPU"), ([CPU, gpu(0)], "one device")])
def test_one_device_has_nothing_to_balance(devices: list[Device], word: str) -> None:
    parts, said = auto(devices, {"CPU": 50, "CUDA0": 1000})
    assert parts == ()
    assert word in said


def test_more_devices_than_layers() -> None:
    devices = [CPU, *(gpu(i) for i in range(6))]
    parts, said = auto(devices, {device.name: 1000.0 for device in devices}, header(n_layer=2))
    assert isinstance(parts, tuple)
    assert sorted(parts) == [0, 0, 0, 1, 1, 1]
    assert "nothing" in said


def test_other_split_modes_are_left_alone() -> None:
    parts, said = auto([CPU, gpu(0), gpu(1)], {"CPU": 1, "CUDA0": 1, "CUDA1": 1}, split_mode="row")
    assert parts == ()
    assert "row" in said


def test_a_device_that_cannot_be_measured_falls_back() -> None:
    said: list[str] = []

    def measure(device: Device) -> Speed:
        raise DeviceError(f"{device.name} is broken")

    config = Config(ModelConfig(Path("x.gguf"), tensor_split="auto"), CONTEXT)
    done = split.chosen(config, header(), [CPU, gpu(0), gpu(1)], measure, said.append)
    assert done.model.tensor_split == ()
    assert "CUDA0 is broken" in said[0]


def test_numbers_are_not_touched() -> None:
    config = Config(ModelConfig(Path("x.gguf"), tensor_split=(3.0, 1.0)), CONTEXT)
    assert split.resolve(None, config, header(), pytest.fail) is config  # type: ignore[arg-type]


def test_layers_in_main_memory_are_left_out() -> None:
    """-ngl 5 keeps four of eight layers away from the devices: four and the head are shared."""
    devices = [CPU, gpu(0), gpu(1)]
    parts, _ = auto(devices, {"CPU": 50, "CUDA0": 1000, "CUDA1": 1000}, n_gpu_layers=5)
    assert parts in ((3.0, 2.0), (2.0, 3.0))


def test_libllama_spreads_layers_as_the_split_says() -> None:
    """The same rule that the memory estimate is tested with against libllama."""
    devices = [CPU, gpu(0), gpu(1), gpu(2)]
    for rates in ((1000, 1000, 1000), (700, 100, 300), (1, 2, 3), (100, 900, 901)):
        parts, _ = auto(devices, {"CPU": 50, **{f"CUDA{i}": rate for i, rate in enumerate(rates)}}, header(n_layer=47))
        assert isinstance(parts, tuple)
        placed = place(Config(ModelConfig(Path("x"), tensor_split=parts), CONTEXT), devices, 47)
        assert [placed.count(f"CUDA{i}") for i in range(3)] == list(parts)


def test_devices_of_other_machines_come_first() -> None:
    devices = [CPU, gpu(0), gpu(1, name="RPC0", backend="RPC")]
    parts, said = auto(devices, {"CPU": 50, "CUDA0": 1000, "RPC0": 500})
    assert parts == (3.0, 6.0)
    assert said.index("RPC0") < said.index("CUDA0")


def test_measured_layers_replace_the_estimate() -> None:
    """By the bytes both devices are equal; the layers measured on the second one took three times as long."""
    devices = [gpu(0), gpu(1)]
    n = 9
    where = [0] * 4 + [1] * 5
    seconds = [1.0] * 4 + [3.0] * 4 + [0.1]
    profile.save(header(), devices, profile.Profile(tuple(seconds), tuple(where)))
    assert profile.load(header(), devices, n) == profile.Profile(tuple(seconds), tuple(where))
    assert profile.load(header(), devices[::-1], n) is None, "another order of devices is another box"
    parts, said = auto([CPU, *devices], {"CPU": 50, "CUDA0": 1000, "CUDA1": 1000})
    assert parts == (6.0, 3.0)
    assert "doctor --devices" in said


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"seconds": [1], "where": [0]}', '{"seconds": [0], "where": [0]}'])
def test_a_damaged_profile_is_none(text: str) -> None:
    path = profile.save(header(), [gpu(0)], profile.Profile((1.0,), (0,)))
    path.write_text(text)
    assert profile.load(header(), [gpu(0)], 2) is None


def test_only_used_experts_are_read_and_overridden_ones_on_the_host() -> None:
    config = Config(ModelConfig(Path("x")), CONTEXT)
    plain, sparse = layers.items(config, header()), layers.items(config, header(experts=8))
    assert plain[0].read == 100 * MIB
    assert sparse[0].read == (50 + 50 * 2 / 8) * MIB
    assert sparse[0].weights == plain[0].weights == 100 * MIB
    away = Config(ModelConfig(Path("x"), n_cpu_moe=1), CONTEXT)
    first, second = layers.items(away, header(experts=8))[:2]
    assert (first.weights, first.read, first.read_on_host) == (50 * MIB, 50 * MIB, 12.5 * MIB)
    assert second.read_on_host == 0
    assert first.seconds(speed(1000), speed(10)) > second.seconds(speed(1000), speed(10))


def test_items_take_what_the_memory_estimate_says() -> None:
    config = Config(ModelConfig(Path("x"), tensor_split=(1.0, 1.0)), ContextConfig(n_ctx=8192, n_parallel=2))
    devices = [CPU, gpu(0), gpu(1)]
    every = layers.items(config, header())
    need = estimate(config, header(), devices).devices
    placed = place(config, devices, len(every) - 1)
    for name in ("CUDA0", "CUDA1"):
        mine = sum(item.n_bytes for item, at in zip(every, placed, strict=True) if at == name)
        assert mine == need[name].weights + need[name].context - need[name].compute
        assert mine < 80 * GIB
