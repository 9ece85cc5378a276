"""Models that native QSA cannot compute, in whole or in part: upstream's path, or a sentence."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGUFReader
from qsa_context import Context, Counted, Model, qsa, tokens

from llamamg import synth
from llamamg.config import ModelConfig
from llamamg.errors import LoadError
from llamamg.library import Library
from llamamg.model import load_model
from llamamg.synth import preset


@pytest.fixture(autouse=True)
def patched(library: Library) -> None:
    if not library.patched:
        pytest.skip("the unpatched build has no native QSA")


@pytest.fixture
def counted(library: Library) -> Counted:
    return Counted(library)


def edited(source: Path, target: Path, key: str, value: int) -> Path:
    """A copy of a GGUF with every positive element of one integer field replaced."""
    shutil.copyfile(source, target)
    reader = GGUFReader(target, "r+")
    field = reader.get_field(f"qwen4exp.{key}")
    assert field is not None
    for part in field.data:
        if field.parts[part][0] > 0:
            field.parts[part][0] = value
    return target


def without(source: Path, target: Path, key: str) -> Path:
    """A copy of a GGUF in which one key has another name, of the same length."""
    data = source.read_bytes()
    name = f"qwen4exp.{key}".encode()
    head, tail = data[: 4 << 20], data[4 << 20 :]
    assert head.count(name) == 1
    target.write_bytes(head.replace(name, name[:-1] + b"_") + tail)
    return target


def computed_by_upstream(library: Library, path: Path, counted: Counted, n_fallback: int = 1) -> None:
    """With the switch on the model gives what it gives with the switch off, bit for bit."""
    model = Model(library, path)
    with qsa(library, 1), counted, Context(model) as context:
        got = context.feed(tokens(100))
    assert (counted.n_native, counted.n_fallback) == (0, n_fallback)
    with Context(model) as context:
        assert (context.feed(tokens(100)) == got).all()
    model.close()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.compress_ratios", 0),
        ("attention.compress_ratios", 3),
        ("attention.compress_ratios", 32),
        ("attention.indexer.top_k", 66),
        ("attention.indexer.top_k", 8192),
    ],
)
def test_odd_values_run_on_upstream(
    library: Library, synth_model: Callable[..., Path], tmp_path: Path, counted: Counted, key: str, value: int
) -> None:
    computed_by_upstream(library, edited(synth_model(), tmp_path / "odd.gguf", key, value), counted)


def test_a_file_without_ratios_is_dense_as_upstream_has_it(
    library: Library, synth_model: Callable[..., Path], tmp_path: Path, counted: Counted
) -> None:
    path = without(synth_model(), tmp_path / "dense.gguf", "attention.compress_ratios")
    computed_by_upstream(library, path, counted)


def test_index_keys_that_are_no_multiple_of_eight_run_on_upstream(
    library: Library, tmp_path: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(preset.PRESETS, "micro", replace(preset.MICRO, index_dim=68))
    path = synth.write_model(tmp_path / "d68.gguf", weights="f32")
    computed_by_upstream(library, path, counted)
    assert "head sizes" in library.mg.qsa_stats().reason


def refused(library: Library, path: Path) -> None:
    with qsa(library, 1), pytest.raises(LoadError, match=r"llama.cpp could not load .*: its last words are in the log"):
        load_model(library, ModelConfig(path, devices=()))


@pytest.mark.parametrize(("key", "value"), [("attention.indexer.top_k", 0), ("attention.indexer.key_length", 60)])
def test_values_that_make_no_sense_end_in_a_sentence(
    library: Library, synth_model: Callable[..., Path], tmp_path: Path, key: str, value: int
) -> None:
    refused(library, edited(synth_model(), tmp_path / "bad.gguf", key, value))


@pytest.mark.parametrize("key", ["indexer.top_k", "indexer.key_length", "indexer.head_count"])
def test_missing_keys_end_in_a_sentence(
    library: Library, synth_model: Callable[..., Path], tmp_path: Path, key: str
) -> None:
    refused(library, without(synth_model(), tmp_path / "bad.gguf", f"attention.{key}"))


# ---- layers on another machine ---------------------------------------------------------------------------------------

ON_RPC = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from llamamg import library
from llamamg.config import ModelConfig
from llamamg.model import load_model
from qsa_context import Context, Model, qsa, tokens
lib = library.load()
lib.mg.set_log("warn", Path(sys.argv[4]))
model = Model.__new__(Model)
model.library, model.llama = lib, lib.llama
model.pointer = load_model(lib, ModelConfig(Path(sys.argv[1]), rpc=(sys.argv[2],), n_gpu_layers="all"))
model.n_vocab = lib.llama.llama_vocab_n_tokens(lib.llama.llama_model_get_vocab(model.pointer))
rows = []
for value in (1, 0):
    with qsa(lib, value), Context(model) as context:
        rows.append(context.feed(tokens(100)))
stats = lib.mg.qsa_stats()
print(json.dumps([stats.n_native, stats.n_fallback, stats.reason, bool((rows[0] == rows[1]).all())]))
"""


def test_layers_on_a_stock_rpc_server_run_on_upstream(
    library: Library, synth_model: Callable[..., Path], rpc_server: str, tmp_path: Path
) -> None:
    here, log = Path(__file__).parent, tmp_path / "log"
    command = [sys.executable, "-c", ON_RPC, str(synth_model()), rpc_server, str(here), str(log)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    n_native, n_fallback, reason, same = json.loads(done.stdout.splitlines()[-1])
    assert (n_native, n_fallback, same) == (0, 1, True)
    assert "RPC server" in reason
    assert "keep such layers on devices of this machine" in log.read_text()
