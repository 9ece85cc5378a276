"""The memory estimate against what libllama allocates, and its verdicts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from llamamg import contexts, memory
from llamamg.config import Config, ContextConfig, ModelConfig, PluginsConfig
from llamamg.library import Library
from llamamg.loading import load
from llamamg.memory import MemoryShortage, check_memory, estimate
from llamamg.model import describe, load_model, new_context
from llamamg.modelfile import ModelHeader, TensorInfo, open_model
from llamamg.plugins import PluginSet
from llamamg.vocab import Vocabulary

MIB, GIB = 2**20, 2**30


@dataclass
class Gpu:
    name: str
    memory_free: int
    type: str = "gpu"


@contextmanager
def log_of(library: Library, file: Path) -> Iterator[None]:
    """libllama's information goes to `file`, where it says what it allocates."""
    library.mg.set_log("info", file)
    try:
        yield
    finally:
        library.mg.set_log("warn")


def make_context(library: Library, config: Config) -> None:
    """A model and a context, and away with them."""
    handle = load_model(library, config.model)
    library.llama.llama_free(new_context(library, handle, config))
    library.llama.llama_model_free(handle)


def mib(log: Path, pattern: str) -> float:
    """All buffers of this kind."""
    return sum(float(size) for size in re.findall(pattern + r" buffer size = +([\d.]+) MiB", log.read_text()))


@pytest.mark.parametrize(
    "context",
    [
        ContextConfig(n_ctx=4096, n_parallel=2),
        ContextConfig(n_ctx=3000, n_parallel=3, cache_type_k="q8_0", cache_type_v="q4_0", flash_attn="on"),
        ContextConfig(n_ctx=1024, n_parallel=4, kv_unified=True, n_ubatch=64),
    ],
    ids=["f16", "quantized", "unified"],
)
@pytest.mark.parametrize("model", ["micro_model", "smol_model"])
def test_estimate_is_what_libllama_allocates(
    model: str, context: ContextConfig, library: Library, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(model)
    config = Config(ModelConfig(path, devices=()), replace(context, n_threads=1, n_threads_batch=1))
    log = tmp_path / "log"
    with log_of(library, log):
        make_context(library, config)
    need = estimate(config, open_model(path)).total
    measured = mib(log, "KV")
    assert measured > 0
    assert (need.cache + need.indexer) / MIB == pytest.approx(measured, rel=0.01)
    assert need.recurrent / MIB == pytest.approx(mib(log, "RS"), rel=0.02, abs=0.01)
    assert need.weights / MIB == pytest.approx(mib(log, "(?:Mapped|CPU) model"), rel=0.01)
    assert 0 < need.compute / MIB <= mib(log, "(?:compute|output)")  # a lower bound


def test_estimate_of_several_contexts(library: Library, micro_model: Path, tmp_path: Path) -> None:
    context = ContextConfig(
        n_ctx=3 * 1024, n_parallel=3, n_groups=2, n_prefill_slots=1, n_ubatch_decode=8, n_threads=1, warmup=False
    )
    config = Config(ModelConfig(micro_model, devices=()), context)
    log = tmp_path / "log"
    with log_of(library, log):
        handle = load_model(library, config.model)
        vocab = Vocabulary(library.llama, handle)
        info = describe(library, handle, micro_model, vocab.n_vocab, vocab.type, None)
        made = contexts.make(library, handle, config, info, vocab)
        made.runner.close()
        library.llama.llama_model_free(handle)
    need = estimate(config, open_model(micro_model)).total
    one = estimate(
        replace(config, context=replace(context, n_groups=1, n_prefill_slots=0)), open_model(micro_model)
    ).total
    assert (need.cache + need.indexer) / MIB == pytest.approx(mib(log, "KV"), rel=0.01)
    assert need.recurrent / MIB == pytest.approx(mib(log, "RS"), rel=0.02, abs=0.01)
    assert one.compute / MIB < need.compute / MIB <= mib(log, "(?:compute|output)")


def header(n_layer: int = 8, n_ctx: int = 4096) -> ModelHeader:
    """A model of `n_layer` layers of 100 MiB; a cell takes 4 KiB per layer at f16 (8 heads of 128)."""
    keys = {"block_count": n_layer, "embedding_length": 1024, "context_length": n_ctx}
    heads = {"attention.head_count": 8, "attention.head_count_kv": 8}
    tensors = [TensorInfo("token_embd.weight", (1024, 1000), "f16", 50 * MIB)]
    for layer in range(n_layer):
        tensors.append(TensorInfo(f"blk.{layer}.attn_k.weight", (1024, 1024), "f16", 40 * MIB))
        tensors.append(TensorInfo(f"blk.{layer}.ffn_up_exps.weight", (1024, 1024), "f16", 60 * MIB))
    tensors.append(TensorInfo("output.weight", (1024, 1000), "f16", 50 * MIB))
    metadata = {"general.architecture": "x", **{f"x.{key}": value for key, value in {**keys, **heads}.items()}}
    return ModelHeader((Path("x"),), metadata, tuple(tensors))


def config(model: dict[str, Any] | None = None, **context: Any) -> Config:
    return Config(ModelConfig(Path("x"), **(model or {})), ContextConfig(**{"n_ctx": 4096, "n_parallel": 1, **context}))


def test_context_comes_from_the_model_when_not_given() -> None:
    assert estimate(config(n_ctx=0), header(n_ctx=512)).n_ctx == 512
    assert estimate(config(n_ctx=0), header(n_ctx=512)).total.cache == 8 * 512 * 4096


def test_layers_go_to_devices_as_split() -> None:
    gpus = [Gpu("G0", GIB), Gpu("G1", 3 * GIB)]
    needs = estimate(config(), header(), gpus).devices
    weights = {name: need.weights // MIB for name, need in needs.items()}
    assert weights == {"CPU": 50, "G0": 300, "G1": 550}
    assert needs["G0"].cache == 3 * 4096 * 4096
    half = estimate(config({"tensor_split": (1.0, 1.0)}), header(), gpus).devices
    assert half["G0"].weights // MIB == 500
    four = estimate(config({"n_gpu_layers": 5}), header(), gpus[:1]).devices
    assert (four["CPU"].weights // MIB, four["G0"].weights // MIB) == (450, 450)
    assert four["G0"].cache == 4 * 4096 * 4096


@pytest.mark.parametrize(
    ("model", "on_cpu"),
    [
        ({"devices": ()}, 900),
        ({"n_gpu_layers": 0}, 900),
        ({"n_gpu_layers": -1}, 50),
        ({"cpu_moe": True}, 50 + 8 * 60),
        ({"n_cpu_moe": 2}, 50 + 2 * 60),
        ({"override_tensor": (("attn_k", "CPU"),)}, 50 + 8 * 40),
        ({"override_tensor": ((r"blk\.[01]\.", "CPU"),)}, 50 + 2 * 100),
    ],
)
def test_placement_options(model: dict[str, Any], on_cpu: int) -> None:
    needs = estimate(config(model), header(), [Gpu("G0", 8 * GIB)]).devices
    assert needs["CPU"].weights // MIB == on_cpu


def test_too_small_a_device_is_said_with_figures() -> None:
    with pytest.raises(MemoryShortage) as shortage:
        check_memory(config(), header(), [Gpu("CUDA0", 512 * MIB)])
    sentence = str(shortage.value)
    assert "CUDA0 has 0.50 GiB free, but needs 0.9" in sentence
    assert "0.83 GiB of weights" in sentence
    assert "4096 tokens" in sentence
    check_memory(config(), header(), [Gpu("CUDA0", 2 * GIB)])


def test_too_large_a_context_is_said_with_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "main_memory", lambda: (GIB, 2 * GIB))
    with pytest.raises(
        MemoryShortage, match=r"a context of 65536 tokens needs 2\.\d\d GiB of main memory, but 1\.00 GiB is free"
    ):
        check_memory(config(n_ctx=65536), header())
    check_memory(config(n_ctx=8192), header())


def test_mapped_weights_never_refuse_but_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "main_memory", lambda: (200 * MIB, 500 * MIB))
    said: list[str] = []
    check_memory(config(n_ctx=1024), header(), warn=said.append)
    assert len(said) == 1
    assert "larger than main memory" in said[0]
    with pytest.raises(MemoryShortage, match=r"0\.88 GiB of weights \(--load-mode none\)"):
        check_memory(config({"load_mode": "none"}, n_ctx=1024), header())


def test_odd_metadata_is_left_to_libllama() -> None:
    odd = header()
    check_memory(config(n_ctx=2**40), replace(odd, metadata={**odd.metadata, "x.block_count": "many"}))
    check_memory(config(n_ctx=2**40), replace(odd, metadata={**odd.metadata, "x.attention.head_count_kv": [1]}))


def test_devices_of_other_machines_are_not_judged() -> None:
    check_memory(config({"rpc": ("there:1",)}, n_ctx=2**40), header())
    check_memory(config({"devices": ("RPC0",)}, n_ctx=2**40), header(), [Gpu("G0", 1)])


def test_main_memory_is_that_of_this_machine() -> None:
    free, total = memory.main_memory()
    assert free > 0
    assert total == int(re.search(r"MemTotal: +(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024  # type: ignore[index]


def test_pooled_keys_of_native_qsa_are_counted(micro_model: Path) -> None:
    config = Config(ModelConfig(micro_model), ContextConfig(n_ctx=8192, n_parallel=1))
    header = open_model(micro_model)
    plain = estimate(config, header).on("CPU").indexer
    pooled = estimate(config, header, pooled_keys=True).on("CPU").indexer - plain
    ratios, width = (
        header.metadata["qwen4exp.attention.compress_ratios"],
        header.metadata["qwen4exp.attention.indexer.key_length"],
    )
    assert pooled == sum(8192 // ratio * width * 4 for ratio in ratios if ratio)
    assert pooled > 0
    dropped = estimate(config, header, pooled_keys=True, raw_keys=False).on("CPU").indexer
    assert dropped == pooled


@pytest.mark.usefixtures("default_switches")
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(("n_ctx", "n_ubatch"), [(8192, 512), (65536, 256), (65536, 64)])
def test_compute_buffers_of_sparse_attention(
    native: bool, n_ctx: int, n_ubatch: int, library: Library, micro_model: Path, tmp_path: Path
) -> None:
    """Upstream's grows with the context, the native one does not; the estimate follows both and stays below."""
    if not library.patched:
        pytest.skip("the unpatched build has no native QSA")
    context = ContextConfig(
        n_ctx=n_ctx, n_parallel=1, n_ubatch=n_ubatch, flash_attn="on", n_threads=1, n_threads_batch=1
    )
    config = Config(ModelConfig(micro_model, devices=()), context)
    log = tmp_path / "log"
    with library.mg.held({"qsa": int(native)}), log_of(library, log):
        make_context(library, config)
    measured = mib(log, "(?:compute|output)")
    estimated = estimate(config, open_model(micro_model), pooled_keys=native).total.compute / MIB
    assert estimated <= measured
    if not native and n_ctx * n_ubatch >= 2**22:
        assert estimated > 0.7 * measured


def test_six_devices_hold_natively_what_they_cannot_hold_otherwise(micro_model: Path) -> None:
    """Mask, bias and scores of 512 tokens and 262144 cells are 1.4 GiB on every device that has a sparse layer."""
    context = ContextConfig(n_ctx=5 * 262144, n_parallel=5, n_ubatch=512, cache_type_k="q8_0", cache_type_v="q8_0")
    config = Config(ModelConfig(micro_model), replace(context, flash_attn="on"))
    gpus = [Gpu(f"CUDA{i}", int(1.3 * GIB)) for i in range(6)]
    header = open_model(micro_model)
    with pytest.raises(MemoryShortage, match=r"CUDA\d has 1\.30 GiB free, but needs .* context of 1310720 tokens"):
        check_memory(config, header, gpus)
    check_memory(config, header, gpus, pooled_keys=True)
    with pytest.raises(MemoryShortage, match=r"CUDA\d has 0\.50 GiB free, but needs"):
        check_memory(config, header, [Gpu(f"CUDA{i}", GIB // 2) for i in range(6)], pooled_keys=True)


@pytest.mark.parametrize("plugins", [PluginsConfig(none=True), PluginsConfig(enable=("qsa",), only=True)])
def test_a_context_too_big_is_refused_before_anything_is_loaded(
    plugins: PluginsConfig, micro_model: Path, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not library.patched:
        pytest.skip("the unpatched build has no native QSA")

    def unexpected(*_: Any) -> None:
        raise AssertionError("the model is being loaded")

    monkeypatch.setattr("llamamg.loading.load_model", unexpected)
    monkeypatch.setattr(memory, "main_memory", lambda: (GIB, 2 * GIB))
    context = ContextConfig(n_ctx=2**22, n_parallel=2)
    config = replace(Config(ModelConfig(micro_model, devices=()), context), plugins=plugins)
    try:
        with pytest.raises(MemoryShortage, match=r"a context of 4194304 tokens needs \d+\.\d\d GiB of main memory"):
            load(config, PluginSet.discover(plugins))
    finally:
        library.mg.set_switch("qsa", 0)
