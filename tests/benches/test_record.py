"""Results are whole or not there; the machine record says what it must."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benches import record
from benches.record import ResultFolder, ResultsError


def test_results_appear_only_when_the_bench_ended(tmp_path: Path) -> None:
    with ResultFolder("rate", tmp_path, "box") as folder:
        folder.write("rate.json", {"x": 1.5})
        assert not list(tmp_path.glob("box/*rate"))
    assert json.loads((folder.final / "rate.json").read_text()) == {"x": 1.5}
    assert folder.final.parent == tmp_path / "box"
    assert folder.final.name.endswith("-rate")
    assert [p.name for p in (tmp_path / "box").iterdir()] == [folder.final.name]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupted_bench_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def bench() -> None:
        with ResultFolder("rate", tmp_path, "box") as folder:
            folder.write("rate.json", [])
            raise error

    with pytest.raises(error):
        bench()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "box" / "earlier").mkdir(parents=True)
    with pytest.raises(error):
        bench()
    assert [path.name for path in (tmp_path / "box").iterdir()] == ["earlier"]


def test_a_value_that_is_no_json_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"), ResultFolder("rate", tmp_path, "box") as folder:
        folder.write("rate.json", float("nan"))
    assert list(tmp_path.iterdir()) == []


def test_earlier_results_of_the_day_are_kept(tmp_path: Path) -> None:
    finals = []
    for n in range(3):
        with ResultFolder("rate", tmp_path, "box") as folder:
            folder.write("n.json", n)
        finals.append(folder.final)
    assert [json.loads((final / "n.json").read_text()) for final in finals] == [0, 1, 2]
    assert finals[1].name == finals[0].name + "-2"


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "box").write_text("a file")
    with pytest.raises(ResultsError, match="--results"), ResultFolder("rate", tmp_path, "box"):
        raise AssertionError("not reached")


def test_the_record_has_what_a_reader_needs(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"abc")
    facts = record.everything(model=record.model(model), flags=record.without_paths(["-m", str(model), "-t", "1"]))
    assert facts["machine"]["n_cpus"] >= 1
    assert facts["machine"]["memory_gib"] > 0
    assert facts["machine"]["cpu"]
    assert set(facts["software"]) == {"commit", "dirty", "python", "packages", "environment"}
    assert facts["model"]["sha256"] == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert facts["flags"] == ["-m", "m.gguf", "-t", "1"]
    assert str(tmp_path) not in json.dumps({**facts, "software": {}})


def test_machines_with_and_without_a_gpu_have_different_names() -> None:
    plain = {"cpu": "AMD EPYC", "n_cpus_usable": 2, "gpus": []}
    assert record.machine_name(plain) == "amd-epyc-2c"
    assert record.machine_name({**plain, "gpus": [{"name": "NVIDIA H200"}]}) == "1xnvidia-h200"
