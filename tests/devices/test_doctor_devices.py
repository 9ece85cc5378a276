"""`llamamg doctor --devices` on this machine, and over two rpc-servers of it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llamamg import doctor, paths
from llamamg.devices import report, survey
from llamamg.devices.ggml import DeviceError
from llamamg.errors import LoadError
from llamamg.library import Library

from .fakes import gpu

SERVER = paths.build("upstream") / "bin" / "ggml-rpc-server"


@pytest.fixture
def endpoints() -> Iterator[str]:
    """host:port of two rpc-servers with one thread each."""
    if not SERVER.is_file():
        pytest.skip("no ggml-rpc-server: llamamg build --upstream --server builds it")
    from benches.record import free_port

    ports = [free_port(), free_port()]
    running = [
        subprocess.Popen([SERVER, "-p", str(port), "-t", "1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for port in ports
    ]
    try:
        time.sleep(0.5)
        yield ",".join(f"127.0.0.1:{port}" for port in ports)
    finally:
        for process in running:
            process.terminate()
            process.wait()


def found(path: Path, home: Path, *flags: str) -> tuple[dict[str, Any], str]:
    """The survey of a process of its own (devices of other machines stay registered), and what people see of it."""
    argv = [sys.executable, "-m", "llamamg", "doctor", "--json", "--devices", "-m", str(path), "--", "-t", "1", *flags]
    env = {**__import__("os").environ, "LLAMAMG_BUILD": str(paths.build("patched")), "LLAMAMG_HOME": str(home)}
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)["survey"]
    return seen, "\n".join(report.lines(seen))


def test_one_processor_has_no_neighbours(micro_model: Path, tmp_path: Path, library: Library) -> None:
    seen, text = found(micro_model, tmp_path, "-c", "512", "-np", "1")
    gpus = [device for device in seen["devices"] if device["type"] == "gpu"]
    if gpus:
        pytest.skip("this machine has a GPU")
    (device,), (stage,) = seen["devices"], seen["stages"]
    assert min(device[key] for key in ("read_gb_s", "matrix_tflop_s", "op_us")) > 0
    assert seen["hops"] == []
    assert "no neighbour" in seen["hops_note"]
    assert seen["order"] is None
    assert (stage["n_layers"], stage["has_head"]) == (4, True)
    assert len(seen["layers"]["decode"]["layers_ms"]) == 4
    assert stage["decode_ms"] > 0
    assert "no neighbour" in text
    assert "4 layers and the head" in text


def test_two_rpc_servers_have_hops_stages_and_a_split(micro_model: Path, tmp_path: Path, endpoints: str) -> None:
    seen, text = found(micro_model, tmp_path, "-c", "512", "-np", "1", "--rpc", endpoints)
    names = [device["name"] for device in seen["devices"]]
    assert len(names) == 2
    assert {(hop["from"], hop["to"]) for hop in seen["hops"]} == {(names[0], names[1]), (names[1], names[0])}
    assert all(hop["latency_us"] > 0 and hop["gb_s"] > 0 for hop in seen["hops"])
    assert sum(stage["n_layers"] for stage in seen["stages"]) == 4
    assert [stage["has_head"] for stage in seen["stages"]] == [False, True]
    assert min(seen["layers"]["decode"]["layers_ms"]) > 0
    assert sum(int(part) for part in seen["split"]["tensor_split"].split(",")) == 5
    assert "measured" in seen["split"]["how"]
    assert sorted(seen["order"]["devices"]) == sorted(names)
    assert seen["order"]["how"].startswith("--device ")
    assert "--tensor-split auto" in text
    assert len(list((tmp_path / "devices").glob("*.json"))) == 1, "kept for --tensor-split auto"


def test_a_hop_that_fails_is_said_and_costs_the_order(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise DeviceError("a copy from CUDA0 to CUDA1 arrived changed")

    devices = [gpu(0), gpu(1)]
    monkeypatch.setattr(survey.hops, "measure", broken)
    found, note = survey._hops(library, devices, lambda _: None)
    assert found == []
    assert "arrived changed" in note
    assert survey._order(devices, {}, None, 1) is None


def test_how_an_order_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "GGML_CUDA_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    assert survey._how(["CUDA1", "CUDA0"]) == "--device CUDA1,CUDA0, or CUDA_VISIBLE_DEVICES=1,0"
    assert survey._how(["RPC0", "CUDA0"]) == "--device RPC0,CUDA0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert survey._how(["CUDA1", "CUDA0"]).endswith("CUDA_VISIBLE_DEVICES=7,4")
    monkeypatch.setenv("GGML_CUDA_DEVICES", "2")
    assert survey._how(["CUDA1", "CUDA0"]) == "--device CUDA1,CUDA0"


def test_devices_of_this_build_without_a_model(library: Library, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--devices"]) == 0
    text = capsys.readouterr().out
    assert "Hops" in text
    assert "GB/s" in text


def test_a_model_alone_is_refused(micro_model: Path) -> None:
    with pytest.raises(LoadError, match="--devices"):
        doctor.main(["-m", str(micro_model)])
    with pytest.raises(LoadError, match="give -m"):
        doctor.main(["--devices", "--", "-t", "1"])
