"""Stream a synthetic model to disk: never more than one chunk of weights in memory."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from tqdm import tqdm

from llamamg.synth.encoding import ENCODINGS, Bytes, draw_decay, draw_f32, generator
from llamamg.synth.metadata import ARCHITECTURE, write_metadata
from llamamg.synth.preset import SynthError, choose_preset
from llamamg.synth.tensors import Kind, Tensor, model_tensors
from llamamg.synth.vocabulary import (
    Vocabulary,
    find_vocabulary,
    padded,
    read_vocabulary,
    with_chat_tokens,
)

CHUNK_BYTES: Final = 16 << 20
MAX_SEED: Final = 2**63 - 1

# the encodings of the published model's quantisation; whatever is not listed is F32
WEIGHTS: Final[dict[str, dict[Kind, Type]]] = {
    "default": {
        Kind.MATRIX: Type.Q8_0,
        Kind.EXPERT_IN: Type.Q4_K,
        Kind.EXPERT_OUT: Type.Q5_0,
        Kind.TABLE: Type.IQ4_NL,
    },
    "q8_0": dict.fromkeys((Kind.MATRIX, Kind.EXPERT_IN, Kind.EXPERT_OUT, Kind.TABLE), Type.Q8_0),
    "f32": {},
}


def write_model(
    path: Path | str,
    preset: str = "micro",
    experts: int | None = None,
    seed: int = 1,
    weights: str = "default",
    vocab: Path | str | None = None,
    ctx: int | None = None,
    progress: bool = False,
    *,
    vocab_dir: Path | None = None,
    dense: bool = False,
    n_processes: int = 1,
) -> Path:
    """Write a random-weight `qwen4exp` GGUF and return its path; an existing file is replaced.

    The same arguments give the same bytes. `ctx` is the trained context in tokens. `dense` leaves out the keys that
    switch sparse attention on, with the same weights. `n_processes` write at the same time.
    Raises `SynthError` with a sentence that says what to change.
    """
    shape = choose_preset(preset, experts, ctx)
    if weights not in WEIGHTS:
        raise SynthError(f"there is no weight type {weights!r}: choose one of {', '.join(WEIGHTS)}")
    if n_processes < 1:
        raise SynthError(f"--jobs {n_processes} is out of range: give at least 1")
    if not 0 <= seed <= MAX_SEED:
        raise SynthError(f"--seed {seed} is out of range: give 0 to {MAX_SEED}")
    target = check_target(Path(path))
    source = Path(vocab) if vocab is not None else find_vocabulary(shape.vocab_file, vocab_dir)
    vocabulary = padded(with_chat_tokens(read_vocabulary(source)), shape.n_vocab_min)
    tensors = list(model_tensors(shape, len(vocabulary.tokens)))
    types = {tensor.name: WEIGHTS[weights].get(tensor.kind, Type.F32) for tensor in tensors}
    check_space(target, sum(stored_bytes(tensor, types[tensor.name]) for tensor in tensors))

    with partial_file(target) as partial:
        writer = GGUFWriter(partial, ARCHITECTURE)
        write_metadata(writer, shape, vocabulary, f"llamamg synth {preset}, seed {seed}", dense)
        for tensor in tensors:
            declare(writer, tensor, types[tensor.name])
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            write_tensors(writer, tensors, types, vocabulary, seed, progress, n_processes)
        finally:
            writer.close()
    return target


def stored_bytes(tensor: Tensor, kind: Type) -> int:
    return tensor.n_values * 4 if kind is Type.F32 else ENCODINGS[kind].n_bytes(tensor.n_values)


def declare(writer: GGUFWriter, tensor: Tensor, kind: Type) -> None:
    writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), stored_bytes(tensor, kind), raw_dtype=kind)


def write_tensors(
    writer: GGUFWriter,
    tensors: list[Tensor],
    types: dict[str, Type],
    vocabulary: Vocabulary,
    seed: int,
    progress: bool,
    n_processes: int = 1,
) -> None:
    """All weights behind the header that was written; several processes write into their parts of the file."""
    assert writer.fout is not None
    file = writer.fout[0]
    writer.write_padding(file, file.tell())
    file.flush()
    path, offset, jobs = Path(file.name), file.tell(), []
    for tensor in tensors:
        silent = vocabulary.silent() if tensor.skips_silent else None
        jobs.append((path, offset, tensor, types[tensor.name], silent, seed))
        offset += writer.ggml_pad(stored_bytes(tensor, types[tensor.name]), writer.data_alignment)
    with tqdm(total=offset - jobs[0][1], unit="B", unit_scale=True, disable=not progress) as bar:
        if n_processes == 1:
            for job in jobs:
                bar.set_description(job[2].name, refresh=False)
                write_tensor(*job, bar.update)
        else:
            jobs.sort(key=lambda job: stored_bytes(job[2], job[3]), reverse=True)  # no large one begins last
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(n_processes, context, initializer=_leave_ctrl_c) as pool:
                try:
                    for done in as_completed([pool.submit(write_tensor, *job) for job in jobs]):
                        bar.update(done.result())
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
    file.truncate(offset)  # the last tensor's padding


def write_tensor(
    path: Path,
    offset: int,
    tensor: Tensor,
    kind: Type,
    silent: np.ndarray[Any, np.dtype[np.bool_]] | None,
    seed: int,
    told: Callable[[int], object] = lambda n_bytes: None,
) -> int:
    """One tensor at its place in the file; bytes written."""
    with path.open("r+b") as file:
        file.seek(offset)
        for chunk in tensor_chunks(tensor, kind, silent, seed):
            write_chunk(file, chunk)
            told(chunk.nbytes)
    return stored_bytes(tensor, kind)


def _leave_ctrl_c() -> None:
    """In a writing process: the one that started it hears Ctrl-C and ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def write_chunk(file: IO[bytes], chunk: Bytes) -> None:
    file.write(chunk.data)


def tensor_chunks(
    tensor: Tensor, kind: Type, silent: np.ndarray[Any, np.dtype[np.bool_]] | None, seed: int
) -> Iterator[Bytes]:
    """The stored bytes of one tensor, a number of whole rows at a time: uint8[n_rows, row_bytes]. Rows of `silent` are zero."""
    bits = generator(seed, tensor.name)
    n_columns = tensor.shape[-1]
    row_bytes = stored_bytes(tensor, kind) // tensor.n_rows
    n_step = max(1, CHUNK_BYTES // row_bytes)
    for first in range(0, tensor.n_rows, n_step):
        n_rows = min(n_step, tensor.n_rows - first)
        n_values = n_rows * n_columns
        if tensor.kind is Kind.DECAY:
            flat = draw_decay(bits, n_values)
        elif kind is Type.F32:
            flat = draw_f32(bits, n_values, tensor.mean, tensor.std)
        else:
            flat = ENCODINGS[kind].draw(bits, n_values, tensor.std)
        chunk = flat.reshape(n_rows, row_bytes)
        if silent is not None:
            chunk[silent[first : first + n_rows]] = 0
        yield chunk


def check_target(path: Path) -> Path:
    """`path`, made absolute, when a file can be written there."""
    folder = path.absolute().parent
    if path.is_dir():
        raise SynthError(f"{path} is a folder: give the name of a file to write, such as {path / 'micro.gguf'}")
    if not folder.is_dir():
        raise SynthError(f"the folder {folder} does not exist: make it first, or choose another place")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SynthError(f"the folder {folder} is not writable: choose another place")
    return path.absolute()


def check_space(target: Path, n_bytes: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if n_bytes > free:
        raise SynthError(
            f"the model needs {n_bytes / 1e9:.1f} GB and {target.parent} has {free / 1e9:.1f} GB free: "
            "free some space, choose another place, or give fewer --experts"
        )


@contextmanager
def partial_file(target: Path) -> Iterator[Path]:
    """A temporary name beside `target`: renamed on success, removed on any error and on Ctrl-C."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        yield partial
        os.replace(partial, target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SynthError(f"the disk of {target.parent} is full: free some space or give fewer --experts") from error
        raise SynthError(f"{target} could not be written ({error.strerror or error}): choose another place") from error
    finally:
        partial.unlink(missing_ok=True)
