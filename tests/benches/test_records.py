"""What a record must have before a number counts: machine with links, commit without git, models too large to hash; no paths."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from llamamg_benches import record


def test_paths_lose_their_folders_and_addresses_stay() -> None:
    said = {
        "log": ["load /home/me/models/a-b.gguf from '/opt/x/lib.so.0'"],
        "url": "http://host:80/v1/models",
        "part": "a/b 3/4",
        "n": 3,
    }
    assert record.scrubbed(said) == {
        "log": ["load a-b.gguf from 'lib.so.0'"],
        "url": "http://host:80/v1/models",
        "part": "a/b 3/4",
        "n": 3,
    }
    assert record.scrubbed("PYTHONPATH=/a/site:/b/c/repo") == "PYTHONPATH=site:repo"


def test_the_environment_and_the_command_are_recorded_without_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAMG_HOME", "/home/somebody/builds")
    monkeypatch.setattr(sys, "argv", ["/home/somebody/bench", "-m", "/home/somebody/m.gguf"])
    facts = record.everything()
    assert facts["software"]["environment"]["LLAMAMG_HOME"] == "builds"
    assert facts["command"] == ["bench", "-m", "m.gguf"]
    assert "somebody" not in json.dumps(facts)


@pytest.mark.parametrize("git", ["", "an older state"])
def test_a_copy_is_told_its_commit(monkeypatch: pytest.MonkeyPatch, git: str) -> None:
    monkeypatch.setattr(record, "_git", lambda *_: git)
    monkeypatch.setenv("LLAMAMG_COMMIT", "abc123")
    assert (record.software()["commit"], record.software()["dirty"]) == ("abc123", False)


def test_a_large_generated_model_is_known_by_its_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"abc")
    assert record.model(model, "synth --preset micro") == {**record.model(model), "synthetic": "synth --preset micro"}
    monkeypatch.setattr(record, "MAX_HASHED", 2)
    assert record.model(model, "synth") == {"file": "m.gguf", "bytes": 3, "synthetic": "synth"}
    assert "sha256" in record.model(model)  # a real one is hashed whatever it weighs


class FakeNvml(types.ModuleType):
    """Two GPUs behind one PCIe switch, with two active NVLinks between them."""

    class NVMLError(Exception):
        """As in the real one."""

    NVML_NVLINK_MAX_LINKS = 4

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.1"

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetTopologyCommonAncestor(self, a: int, b: int) -> int:
        return 10

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return types.SimpleNamespace(busId=f"bus{handle}")

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        return int(link < 2)

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:
        return types.SimpleNamespace(busId="bus1")

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return types.SimpleNamespace(total=24 << 30, used=1 << 30)

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"GPU X"

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return 4

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        return 16

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: int) -> int:
        return 1

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> int:
        raise self.NVMLError

    def nvmlDeviceGetPowerManagementLimit(self, handle: int) -> int:
        return 350_000


def test_gpus_driver_pcie_and_links_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml("pynvml"))
    facts = record.machine()
    assert facts["gpus"][0] == {
        "name": "GPU X", "driver": "580.1", "memory_gib": 24.0, "pcie_generation_max": 4, "pcie_width_max": 16,
        "pcie_generation": 1, "pcie_width": None, "power_limit_w": 350.0,
    }  # fmt: skip
    assert facts["gpu_links"] == [{"gpus": [0, 1], "path": "PCIe switch", "nvlinks": 2}]
    assert record.machine_name(facts) == "2xgpu-x"


def test_a_machine_without_the_package_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    facts = record.machine()
    assert facts["gpus"] == []
    assert facts["gpu_links"] == []
