"""What `llamamg synth` writes and refuses, without libllama."""

from __future__ import annotations

import argparse
import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

from llamamg import synth
from llamamg.synth import SynthError, write_model, writer
from llamamg.synth.encoding import ENCODINGS, generator
from llamamg.synth.preset import FULL, MICRO
from llamamg.synth.tensors import model_tensors
from llamamg.synth.vocabulary import find_vocabulary

Write = Callable[..., Path]


@pytest.fixture(scope="module")
def reader(micro_model: Path) -> GGUFReader:
    return GGUFReader(micro_model)


def field(reader: GGUFReader, name: str) -> Any:
    return reader.fields[name].contents()


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def command_line(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    synth.add_arguments(parser)
    return parser.parse_args(arguments)


def test_micro_is_small(micro_model: Path) -> None:
    assert micro_model.stat().st_size < 40_000_000


def test_sparse_selection_is_configured(reader: GGUFReader) -> None:
    ratios = field(reader, "qwen4exp.attention.compress_ratios")
    interval = field(reader, "qwen4exp.full_attention_interval")
    assert len(ratios) == field(reader, "qwen4exp.block_count")
    assert [ratio > 0 for ratio in ratios] == [(layer + 1) % interval == 0 for layer in range(len(ratios))]
    assert sum(ratio > 0 for ratio in ratios) >= 2
    assert field(reader, "qwen4exp.attention.indexer.top_k") * 100 < field(reader, "qwen4exp.context_length")


def test_tensor_shapes_follow_the_keys(reader: GGUFReader) -> None:
    shapes = {tensor.name: tuple(int(n) for n in tensor.shape) for tensor in reader.tensors}
    n_embd = field(reader, "qwen4exp.embedding_length")
    n_vocab = len(field(reader, "tokenizer.ggml.tokens"))
    n_expert = field(reader, "qwen4exp.expert_count")
    n_ff = field(reader, "qwen4exp.expert_feed_forward_length")
    head_dim = field(reader, "qwen4exp.attention.key_length")
    n_head = field(reader, "qwen4exp.attention.head_count")
    index_dim = field(reader, "qwen4exp.attention.indexer.key_length")
    assert shapes["token_embd.weight"] == shapes["output.weight"] == (n_embd, n_vocab)
    assert shapes["blk.1.attn_q.weight"] == (n_embd, 2 * n_head * head_dim)
    assert shapes["blk.1.indexer.k_proj.weight"] == (n_embd, index_dim)
    assert shapes["blk.0.ffn_down_exps.weight"] == (n_ff, n_embd, n_expert)
    assert "blk.0.attn_q.weight" not in shapes
    assert "blk.1.ssm_a" not in shapes
    rows = field(reader, "qwen4exp.ple.head_offsets")[-1] + field(reader, "qwen4exp.ple.head_vocab_sizes")[-1]
    assert shapes["per_layer_token_embd.weight"][1] >= rows


def test_hash_heads_fill_the_layer_width() -> None:
    for preset in (MICRO, FULL):
        assert preset.n_hash_head * preset.ngram_dim == preset.n_embd
        assert 2 * sum(preset.rope_sections) == preset.n_rot


def test_full_has_the_published_width_and_size() -> None:
    tensors = list(model_tensors(FULL, FULL.n_vocab_min))
    types = writer.WEIGHTS["default"]
    size = sum(writer.stored_bytes(t, types.get(t.kind, GGMLQuantizationType.F32)) for t in tensors)
    assert 14.0e9 < size < 15.0e9
    assert len({t.name for t in tensors}) == len(tensors)
    assert find_vocabulary(FULL.vocab_file).is_file()


def test_chat_markers_and_template(reader: GGUFReader) -> None:
    tokens = field(reader, "tokenizer.ggml.tokens")
    types = field(reader, "tokenizer.ggml.token_type")
    assert len(tokens) % 64 == 0
    assert len(set(tokens)) == len(tokens)
    for marker in ("<|im_start|>", "<|im_end|>"):
        assert types[tokens.index(marker)] == 3
        assert marker in field(reader, "tokenizer.chat_template")
    assert field(reader, "tokenizer.ggml.eot_token_id") == tokens.index("<|im_end|>")


def test_control_and_unused_tokens_have_zero_output_rows(reader: GGUFReader) -> None:
    output = next(tensor for tensor in reader.tensors if tensor.name == "output.weight")
    rows = dequantize(output.data, output.tensor_type)
    is_silent = np.isin(field(reader, "tokenizer.ggml.token_type"), (1, 6), invert=True)
    assert is_silent.any()
    assert (np.abs(rows).max(axis=1) == 0).tolist() == is_silent.tolist()


@pytest.mark.parametrize("kind", ENCODINGS, ids=lambda kind: kind.name)
def test_blocks_decode_to_the_asked_spread(kind: GGMLQuantizationType) -> None:
    values = dequantize(ENCODINGS[kind].draw(generator(7, "x"), 1 << 18, 0.25), kind)
    assert values.size == 1 << 18
    assert np.std(values) == pytest.approx(0.25, rel=0.02)
    assert abs(np.mean(values)) < 0.025


def test_same_seed_same_bytes(micro_model: Path, synth_model: Write) -> None:
    again = write_model(micro_model.with_name("again.gguf"), seed=1)
    try:
        assert digest(again) == digest(micro_model)
    finally:
        again.unlink()
    other = {tensor.name: tensor for tensor in GGUFReader(synth_model(seed=2)).tensors}
    for tensor in GGUFReader(micro_model).tensors:
        assert not np.array_equal(tensor.data, other[tensor.name].data), tensor.name


def test_chunk_size_keeps_the_rows(monkeypatch: pytest.MonkeyPatch, micro_model: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(writer, "CHUNK_BYTES", 1 << 20)
    assert digest(write_model(tmp_path / "small_chunks.gguf")) == digest(micro_model)


def test_f32_holds_nothing_but_f32(synth_model: Write) -> None:
    types = {tensor.tensor_type for tensor in GGUFReader(synth_model(weights="f32")).tensors}
    assert types == {GGMLQuantizationType.F32}


def test_q8_0_holds_no_other_quantisation(synth_model: Write) -> None:
    types = {tensor.tensor_type for tensor in GGUFReader(synth_model(weights="q8_0")).tensors}
    assert types == {GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0}


def test_dense_differs_only_in_the_ratios(micro_model: Path, synth_model: Write) -> None:
    sparse, dense = GGUFReader(micro_model), GGUFReader(synth_model(dense=True))
    assert set(sparse.fields) - set(dense.fields) == {"qwen4exp.attention.compress_ratios"}
    for left, right in zip(sparse.tensors, dense.tensors, strict=True):
        assert np.array_equal(left.data, right.data), left.name


def test_experts_and_context_are_written(tmp_path: Path) -> None:
    reader = GGUFReader(write_model(tmp_path / "m.gguf", experts=3, ctx=4096))
    assert field(reader, "qwen4exp.expert_count") == 3
    assert field(reader, "qwen4exp.context_length") == 4096
    assert next(t for t in reader.tensors if t.name == "blk.0.ffn_up_exps.weight").shape[-1] == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"experts": 1}, "too few"),
        ({"experts": -4}, "too few"),
        ({"experts": 100_000}, "too many"),
        ({"ctx": 0}, "out of range"),
        ({"seed": -1}, "out of range"),
        ({"weights": "q3"}, "choose one of"),
        ({"preset": "huge"}, "choose one of"),
        ({"vocab": "missing.gguf"}, "--vocab"),
    ],
)
def test_absurd_values_are_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(SynthError, match=words):
        write_model(tmp_path / "m.gguf", **options)
    assert list(tmp_path.iterdir()) == []


def test_unusable_places_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SynthError, match="is a folder"):
        write_model(tmp_path)
    with pytest.raises(SynthError, match="does not exist"):
        write_model(tmp_path / "nowhere" / "m.gguf")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(SynthError, match="not writable"):
        write_model(tmp_path / "m.gguf")


def test_a_vocabulary_without_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but not really" * 10)
    with pytest.raises(SynthError, match="cannot be read as GGUF"):
        write_model(tmp_path / "m.gguf", vocab=tmp_path / "broken.gguf")


def test_missing_tree_says_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAMG_TREE", str(tmp_path))
    with pytest.raises(SynthError, match="llamamg build"):
        write_model(tmp_path / "m.gguf")


def test_too_little_space_is_seen_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, 10**6))
    with pytest.raises(SynthError, match="GB free"):
        write_model(tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "m.gguf").write_text("the old model")
    monkeypatch.setattr(writer, "write_chunk", fill)
    with pytest.raises(SynthError, match="full"):
        write_model(tmp_path / "m.gguf")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["the old model"]


def test_several_processes_write_the_same_bytes(tmp_path: Path) -> None:
    one, three = write_model(tmp_path / "1.gguf"), write_model(tmp_path / "3.gguf", n_processes=3)
    assert one.read_bytes() == three.read_bytes()
    with pytest.raises(SynthError, match="--jobs 0 is out of range"):
        write_model(tmp_path / "0.gguf", n_processes=0)


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_interrupt_removes_the_partial_file(tmp_path: Path, jobs: str) -> None:
    script = (
        "import argparse, sys; from llamamg import synth; parser = argparse.ArgumentParser(); "
        "synth.add_arguments(parser); sys.exit(synth.run(parser.parse_args()))"
    )
    out = tmp_path / "m.gguf"
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            script,
            str(out),
            "--preset",
            "full",
            "--jobs",
            jobs,
            "--vocab",
            str(find_vocabulary(MICRO.vocab_file)),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size > 20_000_000 for path in tmp_path.glob(".m.gguf.*.part")):
        assert process.poll() is None
        assert time.monotonic() < deadline, "the file never grew"
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "removed" in stderr
    assert "Traceback" not in stderr
    assert list(tmp_path.iterdir()) == []


def test_command_writes_once_unless_forced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "m.gguf"
    assert synth.run(command_line(str(out))) == 0
    assert "MB" in capsys.readouterr().out
    assert synth.run(command_line(str(out), "--seed", "2")) == 1
    assert "--force" in capsys.readouterr().err
    before = digest(out)
    assert synth.run(command_line(str(out), "--seed", "2", "--force")) == 0
    assert digest(out) != before


def test_every_option_has_help() -> None:
    parser = argparse.ArgumentParser()
    synth.add_arguments(parser)
    assert all(action.help for action in parser._actions)
