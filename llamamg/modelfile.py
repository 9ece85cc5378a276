"""The header of a GGUF file, split files included: metadata, tensors, whether the file is whole. No weights are read."""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from llamamg.errors import LoadError

# ggml type -> (name, values per block, bytes per block)
TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("f32", 1, 4),
    1: ("f16", 1, 2),
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34),
    9: ("q8_1", 32, 36),
    10: ("q2_K", 256, 84),
    11: ("q3_K", 256, 110),
    12: ("q4_K", 256, 144),
    13: ("q5_K", 256, 176),
    14: ("q6_K", 256, 210),
    15: ("q8_K", 256, 292),
    16: ("iq2_xxs", 256, 66),
    17: ("iq2_xs", 256, 74),
    18: ("iq3_xxs", 256, 98),
    19: ("iq1_s", 256, 50),
    20: ("iq4_nl", 32, 18),
    21: ("iq3_s", 256, 110),
    22: ("iq2_s", 256, 82),
    23: ("iq4_xs", 256, 136),
    24: ("i8", 1, 1),
    25: ("i16", 1, 2),
    26: ("i32", 1, 4),
    27: ("i64", 1, 8),
    28: ("f64", 1, 8),
    29: ("iq1_m", 256, 56),
    30: ("bf16", 1, 2),
    34: ("tq1_0", 256, 54),
    35: ("tq2_0", 256, 66),
    39: ("mxfp4", 32, 17),
    40: ("nvfp4", 64, 36),
    41: ("q1_0", 128, 18),
    42: ("q2_0", 64, 18),
}
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ARRAY_KEPT = 1024  # longer arrays (vocabularies) are skipped: only per-layer ones matter here
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


class ModelFileError(LoadError):
    """The model file is missing, not GGUF, of an unknown version, or cut off. The text is one sentence."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the header."""

    name: str
    shape: tuple[int, ...]
    type: str
    n_bytes: int


@dataclass(frozen=True, slots=True)
class ModelHeader:
    """What the header of a model (all its parts) says. Arrays of more than 1024 items are left out of `metadata`."""

    paths: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: tuple[TensorInfo, ...]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    @property
    def n_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(tensor.n_bytes for tensor in self.tensors)

    def get(self, key: str, default: Any = None) -> Any:
        """Metadata of the architecture, e.g. `get("block_count")`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def open_model(path: Path) -> ModelHeader:
    """Read and check the header of a model, of all parts when it is split. Raises ModelFileError."""
    first = read_part(path)
    n_parts = int(first.metadata.get("split.count", 1) or 1)
    if n_parts <= 1:
        return first
    match = _SPLIT.search(path.name)
    if match is None:
        raise ModelFileError(
            f"{path} is one of {n_parts} parts, but its name does not end in -00001-of-{n_parts:05d}.gguf: "
            "rename it back"
        )
    if int(first.metadata.get("split.no", 0)) != 0 or int(match.group(1)) != 1:
        raise ModelFileError(
            f"{path} is not the first part of the model: pass the file that ends in -00001-of-{n_parts:05d}.gguf"
        )
    parts = [
        path.with_name(f"{path.name[: match.start()]}-{i:05d}-of-{n_parts:05d}.gguf") for i in range(1, n_parts + 1)
    ]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelFileError(
            f"{path} needs {', '.join(missing)} beside it: a split model is served from all its {n_parts} parts"
        )
    tensors = list(first.tensors)
    for part in parts[1:]:
        tensors += read_part(part).tensors
    expected = int(first.metadata.get("split.tensors.count", len(tensors)))
    if expected != len(tensors):
        raise ModelFileError(
            f"{path} and its parts hold {len(tensors)} tensors instead of {expected}: they are not parts of one model"
        )
    return ModelHeader(tuple(parts), first.metadata, tuple(tensors))


def read_part(path: Path) -> ModelHeader:
    """Read and check the header of one file. Raises ModelFileError."""
    if not path.exists():
        raise ModelFileError(f"there is no model at {path}: check the path given by --model")
    if path.is_dir():
        raise ModelFileError(f"{path} is a folder: pass the GGUF file in it")
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size < 4 or file.read(4) != b"GGUF":
                raise ModelFileError(f"{path} is not a GGUF file: convert the model, or download its GGUF version")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).header()
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from error


class _Reader:
    """Walks a header; every step checks that the bytes are there."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.size, self.pos = path, data, len(data), 4

    def header(self) -> ModelHeader:
        version = self._scalar("I")
        if version not in (2, 3):
            swapped = int.from_bytes(int(version).to_bytes(4, "little"), "big")
            what = "big-endian" if swapped in (2, 3) else f"of GGUF version {version}"
            raise ModelFileError(f"{self.path} is {what}, which cannot be read here: convert the model again")
        n_tensors, n_keys = self._scalar("Q"), self._scalar("Q")
        if n_tensors > self.size or n_keys > self.size:
            raise ModelFileError(f"{self.path} is damaged: its header counts {n_tensors} tensors and {n_keys} keys")
        metadata: dict[str, Any] = {}
        for _ in range(n_keys):
            key = self._string()
            value = self._value(self._scalar("I"))
            if value is not None:
                metadata[key] = value
        tensors, end = [], 0
        for _ in range(n_tensors):
            tensor, offset = self._tensor()
            tensors.append(tensor)
            end = max(end, offset + tensor.n_bytes)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise ModelFileError(f"{self.path} is damaged: its general.alignment is {alignment!r}")
        start = -(-self.pos // alignment) * alignment
        if tensors and start + end > self.size:
            raise ModelFileError(
                f"{self.path} is truncated: it has {self.size} bytes instead of at least {start + end}; "
                "download or copy it again"
            )
        return ModelHeader((self.path,), metadata, tuple(tensors))

    def _tensor(self) -> tuple[TensorInfo, int]:
        name = self._string()
        n_dims = self._scalar("I")
        if n_dims > 4:
            raise ModelFileError(f"{self.path} is damaged: tensor {name} has {n_dims} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(n_dims))
        kind, offset = self._scalar("I"), self._scalar("Q")
        if kind not in TYPES:
            raise ModelFileError(
                f"{self.path}: tensor {name} has type {kind}, which the pinned llama.cpp does not know"
            )
        type_name, per_block, block_bytes = TYPES[kind]
        n_values = prod(shape)
        if n_values % per_block:
            raise ModelFileError(f"{self.path} is damaged: tensor {name} of type {type_name} has {n_values} values")
        return TensorInfo(name, shape, type_name, n_values // per_block * block_bytes), offset

    def _take(self, n_bytes: int) -> int:
        """The position of the next n_bytes, which are then behind us."""
        start = self.pos
        if n_bytes > self.size - start:
            raise ModelFileError(
                f"{self.path} is truncated: its header does not end within its {self.size} bytes; "
                "download or copy it again"
            )
        self.pos = start + n_bytes
        return start

    def _scalar(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self.data, self._take(struct.calcsize("<" + code)))[0]

    def _string(self) -> str:
        n_bytes = self._scalar("Q")
        start = self._take(n_bytes)
        return self.data[start : start + n_bytes].decode("utf-8", errors="replace")

    def _value(self, kind: int) -> Any:
        """A value, or None for a long array, which is skipped."""
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ModelFileError(f"{self.path} is damaged: its header has a value of unknown type {kind}")
        item, n_items = self._scalar("I"), self._scalar("Q")
        if item == _ARRAY:
            raise ModelFileError(f"{self.path} is damaged: its header has an array of arrays")
        if item in _SCALARS and n_items > _ARRAY_KEPT:
            self._take(n_items * struct.calcsize("<" + _SCALARS[item]))
            return None
        if item == _STRING and n_items > _ARRAY_KEPT:
            self._skip_strings(n_items)
            return None
        return [self._value(item) for _ in range(n_items)]

    def _skip_strings(self, n_items: int) -> None:
        """Step over a vocabulary: 250 000 strings, so without a call for each."""
        unpack, data, pos, last = struct.Struct("<Q").unpack_from, self.data, self.pos, self.size - 8
        for _ in range(n_items):
            if pos > last:
                break
            pos += 8 + unpack(data, pos)[0]
        else:
            if pos <= self.size:
                self.pos = pos
                return
        self._take(self.size)  # raises: the strings do not end in the file
