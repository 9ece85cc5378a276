"""Switches, devices, log sink, loading; and that a patched library with its switches off equals the unpatched one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llamamg import demo, doctor, paths
from llamamg import library as native_library
from llamamg.abi import UnknownSwitch
from llamamg.errors import NativeError
from llamamg.library import Library, LibraryNotFound
from llamamg.native import check, info, series


@pytest.mark.usefixtures("default_switches")
def test_switches_are_those_of_the_definition_and_off(library: Library) -> None:
    switches = library.mg.switches()
    assert [s.name for s in switches] == check.declared_switches(paths.native() / "src" / "mg_switch.def")
    assert all(s.value == s.default == 0 and s.description for s in switches)
    assert {s.name: s.default for s in switches}["pipeline-parallel"] == 0


def test_a_switch_can_be_set_and_read(library: Library) -> None:
    library.mg.set_switch("pipeline-parallel", 1)
    try:
        assert library.mg.switch("pipeline-parallel") == 1
        assert [s.value for s in library.mg.switches() if s.name == "pipeline-parallel"] == [1]
    finally:
        library.mg.set_switch("pipeline-parallel", 0)
    assert library.mg.switch("pipeline-parallel") == 0


def test_an_unknown_switch_is_named_with_the_known_ones(library: Library) -> None:
    with pytest.raises(UnknownSwitch, match="no native switch 'warp-drive'.*pipeline-parallel"):
        library.mg.set_switch("warp-drive", 1)
    with pytest.raises(UnknownSwitch):
        library.mg.switch("")


def test_patched_code_reads_the_switch() -> None:
    """The hook is in the source, and libllama imports the reader from ggml-base."""
    source = (paths.source("patched") / "src" / "llama-context.cpp").read_text()
    assert source.count("mg_switch_value(MG_PIPELINE_PARALLEL)") == 1
    assert b"mg_switch_value" in (native_library.find() / "libllama.so").read_bytes()


def test_devices(library: Library) -> None:
    devices = library.mg.devices()
    cpu = [d for d in devices if d.type == "cpu"]
    assert len(cpu) == 1
    assert 0 < cpu[0].memory_free <= cpu[0].memory_total
    with pytest.raises(NativeError, match="no device 99"):
        library.mg._device(99)


def test_build_info_says_what_was_built(library: Library) -> None:
    built = library.mg.build_info()
    assert built == info.read(library.dir)
    assert [p["name"] for p in built["patches"]] == series.names()
    assert built["upstream"]["sha256"].startswith("832db069")
    assert "-DGGML_BACKEND_DL=ON" in built["flags"]
    assert built["compilers"]["CXX"]
    text = (library.dir / "BUILD_INFO.txt").read_text()
    assert built["llama.cpp"] in text
    assert built["commit"] in text


def test_the_log_goes_to_a_file_above_its_level(library: Library, tmp_path: Path) -> None:
    def fail_to_load() -> None:
        params = library.llama.llama_model_default_params()
        assert not library.llama.llama_model_load_from_file(b"/nonexistent.gguf", params)

    loud, silent = tmp_path / "loud.log", tmp_path / "silent.log"
    try:
        library.mg.set_log("error", loud)
        fail_to_load()
        library.mg.set_log("none", silent)
        fail_to_load()
    finally:
        library.mg.set_log("warn")
    assert "nonexistent" in loud.read_text()
    assert silent.read_text() == ""


def test_a_log_file_that_cannot_be_opened_is_an_error(library: Library, tmp_path: Path) -> None:
    with pytest.raises(NativeError, match="cannot open log file .*: No such file or directory"):
        library.mg.set_log("info", tmp_path / "no" / "folder.log")
    with pytest.raises(ValueError, match="use one of debug, info"):
        library.mg.set_log("chatty")


def test_loading_twice_gives_the_same_library_and_another_is_refused(library: Library, tmp_path: Path) -> None:
    assert native_library.load() is library
    (tmp_path / "libllamamg.so").write_bytes(b"")
    with pytest.raises(RuntimeError, match="one process can use one build"):
        native_library.load(tmp_path)


def test_no_build_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLAMAMG_BUILD", raising=False)
    monkeypatch.setenv("LLAMAMG_HOME", str(tmp_path))
    with pytest.raises(LibraryNotFound, match="run `llamamg build`"):
        native_library.find()
    monkeypatch.setenv("LLAMAMG_BUILD", str(tmp_path / "gone"))
    with pytest.raises(LibraryNotFound, match="holds no libllamamg"):
        native_library.find()


LOGITS = """
import hashlib, sys
from pathlib import Path
from llamamg import library
loaded = library.load(Path(sys.argv[1]))
llama = loaded.llama
model = llama.llama_model_load_from_file(sys.argv[2].encode(), llama.llama_model_default_params())
params = llama.llama_context_default_params()
params.n_ctx, params.n_batch, params.n_threads, params.n_threads_batch = 128, 64, 1, 1
ctx = llama.llama_init_from_model(model, params)
vocab = llama.llama_model_get_vocab(model)
n_vocab = llama.llama_vocab_n_tokens(vocab)
tokens = (llama.llama_token * 32)(*range(100, 132))
digest = hashlib.sha256()
for _ in range(4):
    assert llama.llama_decode(ctx, llama.llama_batch_get_one(tokens, len(tokens))) == 0
    row = llama.llama_get_logits_ith(ctx, -1)[:n_vocab]
    digest.update(repr(row).encode())
    tokens = (llama.llama_token * 1)(max(range(n_vocab), key=row.__getitem__))
print(loaded.patched, len(loaded.mg.switches()), digest.hexdigest())
"""


def run_logits(build: Path) -> list[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("LLAMA_CPP_LIB_PATH", "LLAMAMG_BUILD")}
    command = [sys.executable, "-c", LOGITS, str(build), str(demo.demo_model())]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split()


def test_all_switches_off_equals_upstream_bit_for_bit(library: Library) -> None:
    upstream = paths.build("upstream") / "bin"
    if not (upstream / "libllamamg.so").is_file():
        pytest.skip("the unpatched tree is not built: run `llamamg build --upstream`")
    patched = run_logits(library.dir)
    unpatched = run_logits(upstream)
    assert patched[0] == "True"
    assert unpatched[:2] == ["False", "0"]
    assert patched[2] == unpatched[2]


def test_doctor_reports_the_loaded_library(library: Library, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["library"]["dir"] == str(library.dir)
    assert [s["name"] for s in facts["library"]["switches"]] == [s.name for s in library.mg.switches()]
    assert doctor.main([]) == 0
    text = capsys.readouterr().out
    for wanted in ("pipeline-parallel = 0", library.build_info["llama.cpp"], "CPU", "cupy"):
        assert wanted in text


def test_doctor_without_a_library_says_what_to_do() -> None:
    facts: dict[str, Any] = {**doctor.examine(), "library": {"error": "no native library: run `llamamg build`"}}
    facts["packages"] = {"numpy": None}
    text = doctor.report(facts)
    assert "run `llamamg build`" in text
    assert "missing    numpy" in text


def test_switches_are_held_for_a_while(library: Library) -> None:
    mg = library.mg
    before = {switch.name: switch.value for switch in mg.switches()}
    with mg.held({**dict.fromkeys(before, 7), "of-another-build": 1}):
        assert {switch.value for switch in mg.switches()} <= {7}
    assert {switch.name: switch.value for switch in mg.switches()} == before
