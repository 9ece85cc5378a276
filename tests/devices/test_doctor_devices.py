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
from llamamg.devices import report
from llamamg.errors import LoadError
from llamamg.library import Library

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
    survey: dict[str, Any] = json.loads(done.stdout)["survey"]
    return survey, "\n".join(report.lines(survey))


def test_one_processor_has_no_neighbours(micro_model: Path, tmp_path: Path, library: Library) -> None:
    survey, text = found(micro_model, tmp_path, "-c", "512", "-np", "1")
    gpus = [device for device in survey["devices"] if device["type"] == "gpu"]
    if gpus:
        pytest.skip("this machine has a GPU")
    (device,), (stage,) = survey["devices"], survey["stages"]
    assert min(device[key] for key in ("read_gb_s", "matrix_tflop_s", "op_us")) > 0
    assert survey["hops"] == []
    assert "no neighbour" in survey["hops_note"]
    assert survey["order"] is None
    assert (stage["n_layers"], stage["has_head"]) == (4, True)
    assert len(survey["layers"]["decode"]["layers_ms"]) == 4
    assert stage["decode_ms"] > 0
    assert "no neighbour" in text
    assert "4 layers and the head" in text


def test_two_rpc_servers_have_hops_stages_and_a_split(micro_model: Path, tmp_path: Path, endpoints: str) -> None:
    survey, text = found(micro_model, tmp_path, "-c", "512", "-np", "1", "--rpc", endpoints)
    names = [device["name"] for device in survey["devices"]]
    assert len(names) == 2
    assert {(hop["from"], hop["to"]) for hop in survey["hops"]} == {(names[0], names[1]), (names[1], names[0])}
    assert all(hop["latency_us"] > 0 and hop["gb_s"] > 0 for hop in survey["hops"])
    assert sum(stage["n_layers"] for stage in survey["stages"]) == 4
    assert [stage["has_head"] for stage in survey["stages"]] == [False, True]
    assert min(survey["layers"]["decode"]["layers_ms"]) > 0
    assert sum(int(part) for part in survey["split"]["tensor_split"].split(",")) == 5
    assert "measured" in survey["split"]["how"]
    assert sorted(survey["order"]["devices"]) == sorted(names)
    assert survey["order"]["how"].startswith("--device ")
    assert "--tensor-split auto" in text
    assert len(list((tmp_path / "devices").glob("*.json"))) == 1, "kept for --tensor-split auto"


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
