"""Models and the native library that tests of several parts share."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llamamg import library as native_library
from llamamg import paths, synth
from llamamg.vocab import Vocabulary

STALE_AFTER_S = 24 * 3600


def pytest_configure(config: pytest.Config) -> None:
    """A job in the background has Ctrl-C ignored, and hands that down to every program a test starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def library() -> native_library.Library:
    """The native build under test; a process can hold one."""
    return native_library.load()


@pytest.fixture
def default_switches(library: native_library.Library) -> Iterator[None]:
    """Native switches at their defaults, whatever an engine before this test left on."""
    with library.mg.held({switch.name: switch.default for switch in library.mg.switches()}):
        yield


@pytest.fixture(scope="session")
def synth_cache() -> Path:
    """Folder of synthetic models, one per state of the code that writes them."""
    sources = sorted(Path(synth.__file__).parent.glob("*.py"))
    state = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    root = paths.home() / "test-models"
    folder = root / state
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    for other in root.iterdir():
        if time.time() - other.stat().st_mtime > STALE_AFTER_S:
            shutil.rmtree(other, ignore_errors=True)
    return folder


@pytest.fixture(scope="session")
def synth_model(synth_cache: Path) -> Callable[..., Path]:
    """`synth_model(seed=2, weights="f32")`: a synthetic model with these `write_model` options, written once."""

    def model(**options: Any) -> Path:
        name = "-".join(f"{key}={options[key]}" for key in sorted(options)) or "micro"
        path = synth_cache / f"{name}.gguf"
        return path if path.is_file() else synth.write_model(path, **options)

    return model


@pytest.fixture(scope="session")
def micro_model(synth_model: Callable[..., Path]) -> Path:
    """Random `qwen4exp` model with sparse attention, ChatML template and the GPT-2 vocabulary; 34 MB."""
    return synth_model()


@pytest.fixture(scope="session")
def smol_model() -> Path:
    """The real demo model, downloaded on first use."""
    from llamamg import demo

    return demo.demo_model()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="session")
def two_rpc_devices() -> Iterator[str]:
    """Endpoints of two rpc-servers on this machine, with a thread each. A process that uses them keeps them as devices."""
    program = paths.build("upstream") / "bin" / "ggml-rpc-server"
    if not program.is_file():
        pytest.fail("no ggml-rpc-server: run `llamamg build --upstream --server`")
    with contextlib.ExitStack() as stack:
        holders = [stack.enter_context(socket.socket()) for _ in range(2)]
        for holder in holders:
            holder.bind(("127.0.0.1", 0))
        ports = [int(holder.getsockname()[1]) for holder in holders]
    words = [str(program), "-H", "127.0.0.1", "-t", "1", "-p"]
    servers = [subprocess.Popen([*words, str(port)], stdout=subprocess.DEVNULL) for port in ports]
    try:
        for _ in range(300):
            if all(_answers(port) for port in ports):
                break
            assert all(server.poll() is None for server in servers), "an rpc-server ended at once"
            time.sleep(0.1)
        yield ",".join(f"127.0.0.1:{port}" for port in ports)
    finally:
        for server in servers:
            server.kill()
            server.wait()


@pytest.fixture(scope="session")
def grammar_allows(library: native_library.Library, micro_model: Path) -> Iterator[Callable[[str, str], bool]]:
    """Whether a text may be a whole answer under a grammar, as llama.cpp reads it."""
    llama, vocab = library.llama, Vocabulary.open(micro_model)

    def passes(grammar: Any, token: int) -> bool:
        one = (llama.llama_token_data * 1)(llama.llama_token_data(id=token, logit=0.0, p=0.0))
        array = llama.llama_token_data_array(data=one, size=1, selected=-1, sorted=False)
        llama.llama_sampler_apply(grammar, ctypes.byref(array))
        return bool(one[0].logit > float("-inf"))

    def allowed(text: str, answer: str) -> bool:
        grammar = llama.llama_sampler_init_grammar(vocab.handle, text.encode(), b"root")
        assert grammar, f"llama.cpp cannot read {text}"
        try:
            for token in vocab.tokenize(answer, False, False):
                if not passes(grammar, int(token)):
                    return False
                llama.llama_sampler_accept(grammar, int(token))
            return passes(grammar, vocab.eos)
        finally:
            llama.llama_sampler_free(grammar)

    yield allowed
    vocab.close()
