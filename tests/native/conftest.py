"""A decoded batch of the demo model, and small patch queues."""

from __future__ import annotations

import ctypes
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamamg import demo, paths
from llamamg.abi import ffi
from llamamg.library import Library

# The modules beside the tests are imported by name.
sys.path.insert(0, str(Path(__file__).parent))

from qsa_context import Model

TEXT = b"The quick brown fox jumps over the lazy dog, and then"


@pytest.fixture(scope="module")
def smol(library: Library, smol_model: Path) -> Iterator[Model]:
    """A plain transformer."""
    model = Model(library, smol_model)
    yield model
    model.close()


@pytest.fixture(scope="module")
def micro(library: Library, synth_model: Callable[..., Path]) -> Iterator[Model]:
    """The synthetic hybrid, its weights exact."""
    model = Model(library, synth_model(weights="f32"))
    yield model
    model.close()


@dataclass
class Rows:
    """A context whose last batch asked for logits in every row but the first."""

    library: Library
    ctx: int
    vocab: Any
    n_vocab: int
    n_rows: int

    @property
    def mg(self) -> Any:
        return self.library.mg.lib

    @property
    def handle(self) -> Any:
        return ffi.cast("void *", self.ctx)

    def logits(self, idx: int) -> np.ndarray:
        """Writable view of one row."""
        pointer = self.library.llama.llama_get_logits_ith(self.ctx, idx)
        return np.ctypeslib.as_array(pointer, shape=(self.n_vocab,))

    def chain(self, *samplers: Any) -> Any:
        llama = self.library.llama
        chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        for sampler in samplers:
            llama.llama_sampler_chain_add(chain, sampler)
        return chain

    def grammar(self, text: bytes) -> Any:
        return self.library.llama.llama_sampler_init_grammar(self.vocab, text, b"root")

    @staticmethod
    def pointer(sampler: Any) -> Any:
        """A sampler as cffi wants it; None is NULL."""
        return ffi.cast("void *", 0 if sampler is None else ctypes.cast(sampler, ctypes.c_void_p).value or 0)

    def pointers(self, samplers: list[Any] | None) -> Any:
        return ffi.NULL if samplers is None else ffi.new("void *[]", [self.pointer(s) for s in samplers])

    def sample(self, idx: list[int], chains: list[Any] | None = None, grammars: list[Any] | None = None) -> Any:
        """(failed rows, tokens) of mg_sample_rows."""
        out = ffi.new("int32_t[]", len(idx))
        n_failed = self.mg.mg_sample_rows(
            self.handle, len(idx), self.pointers(chains), self.pointers(grammars), ffi.new("int32_t[]", idx), out
        )
        return n_failed, list(out)


@pytest.fixture(scope="session")
def decoded(library: Library) -> Iterator[Rows]:
    llama = library.llama
    params = llama.llama_model_default_params()
    model = llama.llama_model_load_from_file(str(demo.demo_model()).encode(), params)
    vocab = llama.llama_model_get_vocab(model)
    cparams = llama.llama_context_default_params()
    cparams.n_ctx, cparams.n_batch, cparams.n_threads, cparams.n_threads_batch = 256, 64, 1, 1
    ctx = llama.llama_init_from_model(model, cparams)
    tokens = (llama.llama_token * 64)()
    n = llama.llama_tokenize(vocab, TEXT, len(TEXT), tokens, 64, True, True)
    batch = llama.llama_batch_init(64, 0, 1)
    batch.n_tokens = n
    for i in range(n):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = tokens[i], i, 1, i > 0
        batch.seq_id[i][0] = 0
    assert llama.llama_decode(ctx, batch) == 0
    yield Rows(library, ctx, vocab, llama.llama_vocab_n_tokens(vocab), n)
    llama.llama_batch_free(batch)
    llama.llama_free(ctx)
    llama.llama_model_free(model)


@pytest.fixture
def rows(decoded: Rows) -> Iterator[Rows]:
    """The decoded batch; a test may overwrite logits, they are restored."""
    saved = [decoded.logits(i).copy() for i in range(1, decoded.n_rows)]
    yield decoded
    for i, row in enumerate(saved, 1):
        decoded.logits(i)[:] = row


HEADER = """\
Description: change {file}
Origin: llamamg
Forwarded: no
Dies-when: never
Switch: {switch}
Guard: exact
Bench: none

"""


@pytest.fixture
def queue(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Write a pristine tree of two files and a series of two patches; returns (tree, patches)."""

    def write(**changes: str) -> tuple[Path, Path]:
        tree, patches = tmp_path / "tree", tmp_path / "patches"
        (tree / "src").mkdir(parents=True)
        (tree / ".llamamg-sdist").write_text("pin")
        (tree / "src" / "a.c").write_text("one\ntwo\nthree\nfour\n")
        (tree / "src" / "b.c").write_text("alpha\nbeta\ngamma\n")
        (patches / "x").mkdir(parents=True)
        first = "--- a/src/a.c\n+++ b/src/a.c\n@@ -2,2 +2,3 @@\n two\n+two and a half\n three\n"
        second = "--- a/src/b.c\n+++ b/src/b.c\n@@ -1,3 +1,3 @@\n alpha\n-beta\n+BETA\n gamma\n"
        files = {
            "series": "# comment\nx/0001-first.patch\n\nx/0002-second.patch\n",
            "x/0001-first.patch": HEADER.format(file="a", switch="none") + first,
            "x/0002-second.patch": HEADER.format(file="b", switch="be-loud") + second,
            "switches.def": 'MG_SWITCH(BE_LOUD, "be-loud", 0, "say it loud")\n',
            **changes,
        }
        for name, text in files.items():
            (patches / name).write_text(text)
        return tree, patches

    return write


@contextmanager
def stock_server() -> Iterator[str]:
    """The address of a stock server for one device of this machine."""
    program = paths.home() / "upstream" / "build" / "bin" / "ggml-rpc-server"
    if not program.is_file():
        pytest.skip("no stock ggml-rpc-server was built (`llamamg build --upstream --server`)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([program, "-H", "127.0.0.1", "-p", str(port), "-t", "1"], stdout=subprocess.DEVNULL)
    try:
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def rpc_server() -> Iterator[str]:
    """One device behind a stock server."""
    with stock_server() as address:
        yield address


@pytest.fixture
def rpc_servers() -> Iterator[str]:
    """Two of them; addresses with a comma."""
    with stock_server() as first, stock_server() as second:
        yield f"{first},{second}"
