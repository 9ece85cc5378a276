"""decode-groups: when it applies, and how many contexts of which kind it makes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from llamamg import Unavailable, has_room, n_stages
from llamamg.config import Config, ContextConfig, ModelConfig
from llamamg.layout import layout_of
from llamamg.memory import estimate
from llamamg.modelfile import open_model
from llamamg_plugins.decode_groups import DecodeGroups


@dataclass
class Device:
    """What is read of a device."""

    name: str
    type: str = "gpu"
    device_id: str = ""
    backend: str = "CUDA"
    memory_free: int = 0


CPU = Device("CPU", "cpu", "", "CPU")
TWO = [Device("CUDA0", device_id="01:00"), Device("CUDA1", device_id="02:00"), CPU]
THREE = [*TWO, Device("CUDA2", device_id="03:00")]


def config_of(n_parallel: int = 5, **model: Any) -> Config:
    return Config(ModelConfig(Path("none.gguf"), **model), ContextConfig(n_parallel=n_parallel))


@pytest.mark.parametrize(
    ("model", "devices", "n"),
    [
        ({}, [CPU], 1),
        ({}, TWO, 2),
        ({}, [Device(f"CUDA{i}", device_id="01:00") for i in range(6)], 1),  # virtual devices of one GPU
        ({"split_mode": "none"}, TWO, 1),
        ({"split_mode": "row"}, TWO, 1),
        ({"n_gpu_layers": 0}, TWO, 1),
        ({"tensor_split": (1.0, 0.0)}, TWO, 1),
        ({"tensor_split": "auto"}, TWO, 2),
        ({"devices": ("CUDA1",)}, TWO, 1),
        ({"devices": ("CUDA1", "CUDA0")}, TWO, 2),
        ({"rpc": ("a:1", "b:1")}, [CPU], 2),
        ({"rpc": ("a:1",)}, TWO, 3),
    ],
)
def test_stages(model: dict[str, Any], devices: list[Device], n: int) -> None:
    assert n_stages(config_of(**model), devices) == n


def context_of(config: Config, devices: list[Device], **options: Any) -> ContextConfig:
    return DecodeGroups(**options).configure(config, devices).context


def test_auto_makes_a_group_for_each_stage_and_a_context_for_prompts() -> None:
    context = context_of(config_of(4), TWO)
    assert (context.n_groups, context.n_prefill_slots, context.n_ubatch_decode) == (2, 1, 16)
    assert layout_of(context).groups == (range(0, 2), range(2, 4))
    assert layout_of(context).prefill == range(4, 5)
    assert context_of(config_of(2), THREE).n_groups == 2  # not more than slots


@pytest.mark.parametrize(
    ("n_slots", "devices", "n"),
    [(2, TWO, 2), (4, TWO, 2), (5, TWO, 3), (16, TWO, 3), (5, THREE, 3), (6, THREE, 3), (7, THREE, 4)],
)
def test_auto_makes_one_group_more_where_slots_are_many(n_slots: int, devices: list[Device], n: int) -> None:
    assert context_of(config_of(n_slots), devices).n_groups == n


def test_auto_makes_one_group_on_one_device_however_many_slots() -> None:
    with pytest.raises(Unavailable, match="one device holds all layers"):
        context_of(config_of(64), [TWO[0], CPU])
    assert context_of(config_of(64), [TWO[0], CPU], prefill_slots=1).n_groups == 1


ROOMY = Device("CUDA0", device_id="01:00", memory_free=1 << 36)


def on_gpu(path: Path, **model: Any) -> Config:
    return Config(ModelConfig(path, **model), ContextConfig(n_parallel=5, n_ctx=5 * 1024))


@pytest.mark.parametrize(
    ("model", "n_groups"),
    [
        ({}, 1),
        ({"n_gpu_layers": 99}, 1),
        ({"n_gpu_layers": -1}, 1),
        ({"split_mode": "none"}, 1),
        ({"n_gpu_layers": 1}, 3),
    ],
)
def test_auto_makes_a_context_for_prompts_on_one_gpu(micro_model: Path, model: dict[str, Any], n_groups: int) -> None:
    """With one layer on the GPU the CPU is a second stage."""
    made = context_of(on_gpu(micro_model, **model), [ROOMY, CPU])
    n_prefill = 1 if n_groups > 1 else 2  # what the CPU has free is not looked at
    assert (made.n_groups, made.n_prefill_slots, made.n_ubatch_decode) == (n_groups, n_prefill, 16)


@pytest.mark.parametrize(
    ("model", "context", "device"),
    [
        ({"n_gpu_layers": 0}, {}, {}),
        ({"n_gpu_layers": "all but the head"}, {}, {}),
        ({"n_cpu_moe": 1}, {}, {}),
        ({"override_tensor": (("ffn", "CPU"),)}, {}, {}),
        ({}, {"offload_kqv": False}, {}),
        ({"devices": ("none",)}, {}, {}),
        ({}, {}, {"backend": "Vulkan"}),
        ({}, {}, {"type": "igpu", "backend": "SYCL"}),
    ],
)
def test_auto_makes_none_where_the_cpu_has_a_part_or_streams_have_no_priority(
    micro_model: Path, model: dict[str, Any], context: dict[str, Any], device: dict[str, Any]
) -> None:
    n_layers = int(open_model(micro_model).get("block_count", 0))
    if model.get("n_gpu_layers") == "all but the head":
        model = {"n_gpu_layers": n_layers}  # the head is one of those that go to the GPU
    config = on_gpu(micro_model, **model)
    config = replace(config, context=replace(config.context, **context))
    with pytest.raises(Unavailable, match="one device holds all layers"):
        context_of(config, [replace(ROOMY, **device), CPU])


def test_auto_makes_none_on_virtual_devices_or_for_one_group_that_was_asked_for_elsewhere(micro_model: Path) -> None:
    config = on_gpu(micro_model)
    with pytest.raises(Unavailable, match="one device holds all layers"):
        context_of(config, [ROOMY, replace(ROOMY, name="CUDA1"), CPU])
    assert context_of(config, [ROOMY, CPU], groups=1).n_prefill_slots == 2
    assert context_of(config, [ROOMY, CPU], prefill_sms=96).n_prefill_slots == 2
    with pytest.raises(Unavailable, match="one device holds all layers"):
        context_of(config, [ROOMY, CPU], prefill_slots=0)
    with pytest.raises(Unavailable, match="one group is asked for"):
        context_of(config, [ROOMY, CPU], groups=1, prefill_slots=0)


def test_a_library_without_priorities_has_no_context_for_prompts(
    micro_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamamg_plugins.decode_groups.has_switch", lambda name: name != "stream-priority")
    with pytest.raises(Unavailable, match="one device holds all layers"):
        context_of(on_gpu(micro_model), [ROOMY, CPU])


def enough_for(n_prefill: int, config: Config, devices: list[Device]) -> int:
    """Free bytes of the first device from which on so many prompts have room beside a tenth that stays free."""
    made = replace(config, context=replace(context_of(config, devices), n_prefill_slots=n_prefill))
    need = estimate(made, open_model(config.model.path), devices, pooled_keys=True).devices["CUDA0"]
    return -(-10 * (need.weights + need.context) // 9)


def test_auto_asks_for_a_context_for_prompts_only_where_a_tenth_stays_free(micro_model: Path) -> None:
    config = on_gpu(micro_model)

    def n_prefill(n_bytes: int, **options: Any) -> int:
        return context_of(config, [replace(ROOMY, memory_free=n_bytes), CPU], **options).n_prefill_slots

    one, two = (enough_for(n, config, [ROOMY, CPU]) for n in (1, 2))
    assert one < two
    assert [n_prefill(n_bytes) for n_bytes in (one, two - 2, two)] == [1, 1, 2]
    for n_bytes in (one - 2, 0):  # 0: not known
        with pytest.raises(Unavailable, match="has no room for a context for prompts"):
            n_prefill(n_bytes)
        assert n_prefill(n_bytes, prefill_slots=1) == 1


def test_embeddings_that_are_the_head_too_need_their_room_twice(smol_model: Path) -> None:
    config, header = on_gpu(smol_model), open_model(smol_model)
    sizes = {tensor.name: tensor.n_bytes for tensor in header.tensors}
    assert "output.weight" not in sizes
    made = replace(config, context=context_of(config, [ROOMY, CPU]))
    need = estimate(made, header, [ROOMY], pooled_keys=True).devices["CUDA0"]
    for n_bytes, has_it in ((need.weights + need.context, False), (sizes["token_embd.weight"], True)):
        enough = need.weights + need.context + n_bytes * has_it
        assert has_room(made, [replace(ROOMY, memory_free=enough), CPU], spare=0.0) is has_it


def test_several_groups_have_a_context_for_prompts_whatever_is_free(micro_model: Path) -> None:
    config = on_gpu(micro_model)
    devices = [ROOMY, replace(ROOMY, name="CUDA1", device_id="02:00"), CPU]
    assert context_of(config, devices).n_prefill_slots == 2
    for n_bytes in (enough_for(2, config, devices) // 2, 0):
        less = [replace(device, memory_free=n_bytes) for device in devices[:2]]
        assert context_of(config, less).n_prefill_slots == 1
    config = replace(config, context=replace(config.context, n_parallel=2))
    assert context_of(config, devices).n_prefill_slots == 2


def test_numbers_are_taken_as_given() -> None:
    context = context_of(config_of(), [CPU], groups=4, prefill_slots=0, ubatch=32, local_prompt=8)
    assert (context.n_groups, context.n_prefill_slots, context.n_prompt_local) == (4, 0, 8)
    context = context_of(config_of(), [CPU], groups=1, prefill_slots=2)
    assert (context.n_groups, context.n_prefill_slots) == (1, 2)


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        (config_of(1), {}, "one slot"),
        (config_of(-1), {}, "one KV cache"),
        (config_of(), {}, "one device holds all layers"),
        (config_of(), {"groups": 0}, "told so"),
        (config_of(), {"pipeline": 0}, "told so"),
        (config_of(), {"groups": 1}, "one group is asked for"),
        (config_of(), {"groups": 2, "prefill_slots": 0, "prefill_sms": 96}, "there is none"),
    ],
)
def test_it_says_why_it_is_off(config: Config, options: dict[str, Any], words: str) -> None:
    with pytest.raises(Unavailable, match=words):
        DecodeGroups(**options).configure(config, [CPU])


def test_contexts_share_an_rpc_server_only_where_the_library_keeps_them_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(rpc=("a:1", "b:1"))
    assert context_of(config, [CPU]).n_groups == 3
    monkeypatch.setattr("llamamg_plugins.decode_groups.has_patch", lambda name: False)
    with pytest.raises(Unavailable, match="llamamg build"):
        DecodeGroups().configure(config, [CPU])
    assert context_of(config_of(), TWO).n_groups == 3  # no server, no matter


def test_a_unified_cache_is_refused() -> None:
    config = replace(config_of(), context=ContextConfig(n_parallel=4, kv_unified=True))
    with pytest.raises(Unavailable, match="one KV cache"):
        DecodeGroups().configure(config, TWO)
