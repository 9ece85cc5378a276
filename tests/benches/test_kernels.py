"""`bench kernels` checks results in float64, notices a wrong kernel, and says in a sentence what a device lacks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benches import kernels, kernels_device, kernels_ggml, kernels_qsa, kernels_sampling, program
from benches.errors import BenchError
from benches.kernels_case import Case, Check
from llamamg.library import Library


@pytest.fixture(autouse=True)
def small(library: Library, micro_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vocabulary of a small model, and small copies."""
    monkeypatch.setenv("LLAMAMG_KERNELS_MODEL", str(micro_model))
    monkeypatch.setattr(kernels_device, "COPY_BYTES", 1 << 20)


def run(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    code = program.run_module(kernels, arguments, "llamamg bench kernels")
    out = capsys.readouterr()
    return code, out.out, out.err


def test_the_command(tmp_path: Path, capsys: Any) -> None:
    code, out, err = run(capsys, "--times", "2", "--kernel", "argmax,logprobs", "--results", str(tmp_path))
    assert code == 0, err
    (file,) = tmp_path.glob("*/*/result.json")
    result = json.loads(file.read_text())
    assert [row["kernel"] for row in result["rows"]] == ["argmax", "argmax", "logprobs"]
    assert all(row["ok"] for row in result["rows"])
    assert result["rows"][0]["upstream_ok"]
    assert len(result["rows"][0]["times_s"]) == len(result["rows"][0]["upstream_times_s"]) == 2
    assert result["rows"][2]["upstream_times_s"] is None
    assert 0 <= result["rows"][2]["error"] < 1e-5
    assert out == kernels.table(result) + "\n"


class Given:
    """A kernel that gives what a test chose."""

    def __init__(self, value: Any) -> None:
        self.value, self.n_runs, self.closed = value, 0, False

    def run(self) -> Any:
        self.n_runs += 1
        return self.value

    def close(self) -> None:
        self.closed = True


def case(value: Any, **fields: Any) -> tuple[Case, Given]:
    given = Given(value)

    def check(got: Any) -> Check:
        error = float(np.abs(got - 1.0).max())
        return Check(error < 1e-6, error, "largest error")

    return Case("one", "1", 1 << 20, 1, lambda: given, check, **fields), given


def test_a_wrong_kernel_fails_the_command(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right, _ = case(np.ones(3))
    wrong, given = case(np.array([1.0, 1.001, 1.0]))
    monkeypatch.setattr(kernels, "registry", lambda device: [right, wrong])
    code, out, _ = run(capsys, "--times", "1", "--results", str(tmp_path))
    assert code == 1
    assert [line.split()[2] for line in out.splitlines()[3:5]] == ["yes", "NO"]
    assert given.closed


def test_a_wrong_stock_is_said_and_fails_nothing(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, stock = case(np.array([1.0, 1.25]))
    one, _ = case(np.ones(2), upstream=lambda: stock)
    monkeypatch.setattr(kernels, "registry", lambda device: [one])
    code, out, _ = run(capsys, "--times", "1", "--results", str(tmp_path))
    assert code == 0
    assert "one, 1: stock is not right: largest error: 0.25" in out.splitlines()


def test_figures_follow_from_times(monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = case(np.ones(1), launches_per_run=4)
    monkeypatch.setattr(kernels_device.Device, "seconds", lambda self, function, n: [0.4] * n)
    monkeypatch.setattr(kernels_device.Device, "copy_s", lambda self, n_bytes, n_launches: 0.05)
    row = kernels.row_of(one, kernels_device.cpu(), 3)
    assert row["times_s"] == [0.1, 0.1, 0.1]
    assert row["bytes_per_s"] == pytest.approx((1 << 20) / 0.1)
    assert (row["floor_s"], row["share_of_floor"]) == (0.05, pytest.approx(0.5))


def test_a_case_that_this_build_lacks_is_said(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking, given = case(np.ones(1), unavailable="run `llamamg build`")
    monkeypatch.setattr(kernels, "registry", lambda device: [lacking])
    code, out, _ = run(capsys, "--times", "1", "--results", str(tmp_path))
    assert (code, given.n_runs) == (0, 0)
    assert "not run" in out
    assert "one: run `llamamg build`" in out


def test_logprobs_are_checked_against_float64() -> None:
    logits = np.array([*np.linspace(0, 5, 30)], np.float32)
    x = logits.astype(np.float64)
    exact = x - np.log(np.exp(x).sum())
    best = np.argsort(-x)[:10]
    assert kernels_sampling.check_logprobs(logits, np.array([best, exact[best]])).ok
    assert not kernels_sampling.check_logprobs(logits, np.array([best, exact[best] + 1e-4])).ok
    assert not kernels_sampling.check_logprobs(logits, np.array([best[::-1], exact[best]])).ok


def fake_cupy(version: int = 12090, n_devices: int = 1) -> Any:
    class CUDARuntimeError(Exception):
        pass

    def count() -> int:
        if n_devices < 0:
            raise CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
        return n_devices

    runtime = SimpleNamespace(
        runtimeGetVersion=lambda: version, getDeviceCount=count, CUDARuntimeError=CUDARuntimeError,
        getDeviceProperties=lambda i: {"name": b"A GPU"},
    )  # fmt: skip
    return SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))


CUDA12: dict[str, Any] = {"cuda": True, "compilers": {"nvcc": "12.9"}}


@pytest.mark.parametrize(
    ("build", "cupy", "sentence"),
    [
        ({"cuda": False}, fake_cupy(), "this native build has no CUDA"),
        ({"cuda": True, "compilers": {}}, fake_cupy(), "does not say for which CUDA"),
        (CUDA12, None, r"cupy is not installed: pip install 'llamamg\[cuda12\]'"),
        (CUDA12, fake_cupy(13000), "cupy is made for CUDA 13 and the native build for CUDA 12"),
        (CUDA12, fake_cupy(n_devices=-1), "no GPU can be used .*no CUDA-capable device"),
        (CUDA12, fake_cupy(n_devices=0), "there is no GPU: use --device cpu"),
    ],
)
def test_what_a_gpu_needs(monkeypatch: pytest.MonkeyPatch, build: dict[str, Any], cupy: Any, sentence: str) -> None:
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(BenchError, match=sentence):
        kernels_device.cuda(build)


def test_a_gpu_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy())
    device = kernels_device.cuda(CUDA12)
    assert (device.kind, device.name, device.backend) == ("cuda", "A GPU", "CUDA0")
    assert kernels_sampling.cases(device) == []  # they run on the CPU


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--kernel", "argmix"), "there is no kernel 'argmix' here; did you mean argmax?"),
        (("--kernel", "zzz"), "there is no kernel 'zzz' here; there are argmax, logprobs, qsa-pool"),
        (("--threads", "0"), "--threads must be at least 1"),
        (("--times", "0"), "--times must be at least 1"),
        (("--device", "cuda"), "this native build has no CUDA: run `llamamg build --cuda`, or use --device cpu"),
    ],
)
def test_bad_input(tmp_path: Path, capsys: Any, arguments: tuple[str, ...], sentence: str) -> None:
    code, _, err = run(capsys, *arguments, "--results", str(tmp_path))
    assert (code, sentence in err) == (1, True), err
    assert not list(tmp_path.iterdir())


def test_ctrl_c_keeps_nothing(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one, given = case(np.ones(1))

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(given, "run", interrupted)
    monkeypatch.setattr(kernels, "registry", lambda device: [one])
    code, out, err = run(capsys, "--results", str(tmp_path))
    assert (code, out, given.closed) == (130, "", True)
    assert "interrupted" in err
    assert not list(tmp_path.glob("*/*"))


def test_a_graph_computes_on_the_arrays_it_was_given(library: Library) -> None:
    base = kernels_ggml.bind(library.dir, {})
    random = np.random.default_rng(1)
    a, b = (random.standard_normal((n, 64)).astype(np.float32) for n in (3, 5))

    def build(base: Any, context: Any, *t: Any) -> Any:
        return base.ggml_mul_mat(context, *t)

    f32 = kernels_ggml.F32
    inputs = [(f32, (64, 3), a), (f32, (64, 5), b)]
    graph = kernels_ggml.Graph(kernels_device.cpu(), library.dir, base, inputs, build, (f32, (3, 5)), 2)
    got = graph.run().copy()
    graph.close()
    assert got == pytest.approx(b.astype(np.float64) @ a.astype(np.float64).T, rel=1e-4, abs=1e-4)


def test_a_backend_without_an_operation_is_told_apart(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    base = kernels_ggml.bind(library.dir, {})
    monkeypatch.setattr(base, "ggml_backend_supports_op", lambda backend, node: False)
    f32 = kernels_ggml.F32

    def lacking() -> Any:
        def build(base: Any, context: Any, *t: Any) -> Any:
            return base.ggml_mul_mat(context, *t)

        inputs = [(f32, (4, 3), None), (f32, (4, 5), None)]
        return kernels_ggml.Graph(kernels_device.cpu(), library.dir, base, inputs, build, (f32, (3, 5)))

    one, _ = case(np.ones(1), upstream=lacking)
    row = kernels.row_of(one, kernels_device.cpu(), 1)
    assert row["ok"]
    assert row["upstream_times_s"] is None
    assert "stock cannot be run: CPU, 1 thread has no MUL_MAT" in row["upstream_note"]
    row = kernels.row_of(Case("two", "1", 1, 1, lacking, one.check), kernels_device.cpu(), 1)
    assert (row["ok"], "has no MUL_MAT" in row["reason"]) == (None, True)


class FakeStream:
    """Records what is launched while it captures."""

    current: list[Any] | None = None

    def __init__(self, non_blocking: bool) -> None:
        assert non_blocking

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin_capture(self) -> None:
        FakeStream.current = []

    def end_capture(self) -> Any:
        calls, FakeStream.current = FakeStream.current or [], None
        return SimpleNamespace(launch=lambda stream: [call() for call in calls])


def test_copies_of_a_gpu_are_launched_as_the_kernels_are(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int]] = []

    def launch(name: str, source: Any, target: Any) -> None:
        if FakeStream.current is not None:
            FakeStream.current.append(lambda: launch(name, source, target))
            return
        target[...] = source
        made.append((name, source.nbytes))

    runtime = SimpleNamespace(deviceSynchronize=lambda: None)
    xp = SimpleNamespace(
        ones=np.ones, empty_like=np.empty_like, complex128=np.complex128,
        copyto=lambda target, source: launch("engine", source, target),
        ElementwiseKernel=lambda *words: lambda source, target: launch("kernel", source, target),
        cuda=SimpleNamespace(runtime=runtime, Stream=FakeStream),
    )  # fmt: skip
    device = kernels_device.Device("cuda", "A GPU", xp, "CUDA0")
    clock = iter(range(10_000))
    monkeypatch.setattr(kernels_device.time, "perf_counter", lambda: float(next(clock)))
    assert device.copy_s(1 << 20, n=3, n_launches=4) == pytest.approx(1 / 4)  # a second by that clock, four copies
    assert made.count(("engine", 1 << 19)) == made.count(("kernel", 1 << 19)) == 1 + 4 * (3 + kernels_device.N_WARM)


def test_a_build_without_a_function_is_told_apart(library: Library) -> None:
    assert kernels_ggml.bind(library.dir, {"ggml_nobody_wrote_this": (None, [])}) is None


def test_sparse_attention(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_qsa, "N_CELLS", {"cpu": (4096,)})
    device = kernels_device.cpu()
    cases = kernels_qsa.cases(device)
    assert [case.name for case in cases] == ["qsa-pool", *["qsa-select", "qsa-attn"] * 2]
    if kernels_ggml.bind(library.dir, kernels_qsa.FUNCTIONS) is None:
        assert {kernels.row_of(case, device, 1)["reason"] for case in cases} == {kernels_qsa.NONE}
        pytest.skip("this build has no QSA operations")
    for case in cases:
        row = kernels.row_of(case, device, 1)
        assert row["ok"], row
        assert row.get("upstream_ok", True), row
        prepared = case.prepare()
        got = prepared.run().copy()
        prepared.close()
        got.reshape(-1)[7] += 1  # another block, or another value
        assert not case.check(got).ok
