"""Headers of GGUF files: whole, cut off at many places, damaged, split."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from llamamg.modelfile import TYPES, ModelFileError, open_model


def write(path: Path, names: list[str], split: tuple[int, int, int] | None = None) -> Path:
    """A small GGUF file; `split` is (part, parts, tensors of all parts)."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(2000)])
    writer.add_array("tokenizer.ggml.scores", [0.5] * 2000)
    if split is not None:
        for key, value in zip(
            (gguf.Keys.Split.LLM_KV_SPLIT_NO, gguf.Keys.Split.LLM_KV_SPLIT_COUNT), split, strict=False
        ):
            writer.add_uint16(key, value)
        writer.add_int32(gguf.Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT, split[2])
    for index, name in enumerate(names):
        writer.add_tensor(name, np.full((4, 32 * (index + 1)), index, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model.gguf", ["token_embd.weight", "blk.0.attn_k.weight"])


def test_header(model: Path) -> None:
    header = open_model(model)
    assert header.architecture == "llama"
    assert header.get("block_count") == 2
    assert "tokenizer.ggml.tokens" not in header.metadata  # long arrays are skipped
    assert [(t.name, t.shape, t.type, t.n_bytes) for t in header.tensors] == [
        ("token_embd.weight", (32, 4), "f32", 512),
        ("blk.0.attn_k.weight", (64, 4), "f32", 1024),
    ]
    assert header.n_bytes == 1536


def test_agrees_with_the_gguf_package(micro_model: Path) -> None:
    reader = gguf.GGUFReader(micro_model)
    theirs = {t.name: (tuple(int(n) for n in t.shape), int(t.n_bytes)) for t in reader.tensors}
    assert {t.name: (t.shape, t.n_bytes) for t in open_model(micro_model).tensors} == theirs


def test_sizes_of_types_agree_with_the_gguf_package() -> None:
    known = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    both = sorted(
        (known.keys() & TYPES.keys()) - {int(gguf.GGMLQuantizationType.Q8_1)}
    )  # its size changed, no file has it
    assert len(both) > 30
    assert [(kind, TYPES[kind][1:]) for kind in both] == [(kind, known[kind]) for kind in both]


@pytest.mark.parametrize("part", [4, 7, 12, 23, 60, 0.2, 0.5, 0.9, 0.97, -1025, -1024, -1])
def test_truncated(model: Path, part: float) -> None:
    content = model.read_bytes()
    n_kept = int(len(content) * part) if isinstance(part, float) else part % len(content)
    model.write_bytes(content[:n_kept])
    with pytest.raises(ModelFileError, match="is truncated.*download or copy it again") as error:
        open_model(model)
    assert str(model) in str(error.value)


def test_every_cut_is_noticed(tmp_path: Path) -> None:
    content = write(tmp_path / "tiny.gguf", ["a.weight"]).read_bytes()
    cut = tmp_path / "cut.gguf"
    for n_kept in range(0, len(content), 997):
        cut.write_bytes(content[:n_kept])
        with pytest.raises(ModelFileError):
            open_model(cut)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not a GGUF file"),
        (b"PK\x03\x04" + bytes(100), "is not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "of GGUF version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "is damaged"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), "is truncated"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77), "unknown type 77"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1), "array of arrays"),
        (b"GGUF" + struct.pack("<IQQQ17sII", 3, 0, 1, 17, b"general.alignment", 4, 0), "general.alignment is 0"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 32, 4, 0) + bytes(64), "does not know"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 31, 8, 0) + bytes(64), "has 31 values"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", 9), "9 dimensions"),
    ],
)
def test_not_a_model(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError) as error:
        open_model(path)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="there is no model at"):
        open_model(tmp_path / "none.gguf")
    with pytest.raises(ModelFileError, match="is a folder"):
        open_model(tmp_path)


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    names = [["a.weight", "b.weight"], ["c.weight"], ["d.weight"]]
    return [write(tmp_path / f"m-{i + 1:05d}-of-00003.gguf", own, (i, 3, 4)) for i, own in enumerate(names)]


def test_split(parts: list[Path]) -> None:
    header = open_model(parts[0])
    assert header.paths == tuple(parts)
    assert [t.name for t in header.tensors] == ["a.weight", "b.weight", "c.weight", "d.weight"]


def test_split_with_missing_part(parts: list[Path]) -> None:
    parts[1].unlink()
    with pytest.raises(ModelFileError, match=r"needs m-00002-of-00003\.gguf beside it"):
        open_model(parts[0])


def test_split_with_truncated_part(parts: list[Path]) -> None:
    parts[2].write_bytes(parts[2].read_bytes()[:-1])
    with pytest.raises(ModelFileError, match="00003-of-00003.gguf is truncated"):
        open_model(parts[0])


def test_split_from_another_model(parts: list[Path]) -> None:
    write(parts[1], ["c.weight", "x.weight"], (1, 3, 4))
    with pytest.raises(ModelFileError, match="hold 5 tensors instead of 4"):
        open_model(parts[0])


def test_split_is_started_from_its_first_part(parts: list[Path]) -> None:
    with pytest.raises(ModelFileError, match="is not the first part"):
        open_model(parts[1])
    renamed = parts[0].rename(parts[0].with_name("renamed.gguf"))
    with pytest.raises(ModelFileError, match="rename it back"):
        open_model(renamed)
