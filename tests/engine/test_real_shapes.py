"""With all plugins off the batches are llama-server's: both libraries print every batch they get, and the prints are compared.

Compared are only runs in which no clock decides: requests one after the other, or several that arrive as one message
(llama-server takes the prompts of one /completion into its queue together). The sampled token is forced by a bias, so
that it does not depend on how either build rounds. Where a prompt arrives beside a stream, the step it arrives in is
a matter of time: there only the rows of each sequence are compared.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamamg import library as native_library
from llamamg import paths
from llamamg.request import Delta, Request, SamplingParams

from .compacting import AlwaysCompact

FORCED = 100
N_PREDICT = 5
START = re.compile(r"init: input batch info:")
END = re.compile(r"seq +=\s+\[")
TOKEN = re.compile(
    r"id = +(-?\d+) \(.*?\), pos = +(\d+), n_seq_id = +1, seq_id = \[(\.*)\d\.*\], output = (\d)", re.DOTALL
)

Token = tuple[int, int, int, int]  # id, position, sequence, output
RNG = np.random.default_rng(2)
TEXT = RNG.integers(200, 9000, 2000).tolist()


def batches(log: str) -> list[list[Token]]:
    """Every batch that a libllama log with LLAMA_BATCH_DEBUG shows."""
    found = []
    for part in START.split(log)[1:]:
        batch = END.split(part, maxsplit=1)[0]
        tokens = [(int(t), int(p), len(dots), int(out)) for t, p, dots, out in TOKEN.findall(batch)]
        said = re.search(r"n_tokens += (\d+)", batch)
        assert said is not None
        assert int(said[1]) == len(tokens)
        found.append(tokens)
    return found


@pytest.fixture
def server_program() -> Path:
    """llama-server of the unpatched tree; $LLAMA_SERVER names another one."""
    program = Path(os.environ.get("LLAMA_SERVER") or paths.build("upstream") / "bin" / "llama-server")
    if not program.is_file():
        pytest.skip("llama-server is not built: run `llamamg build --upstream --server`, or set LLAMA_SERVER")
    return program


@contextmanager
def llama_server(program: Path, log: Path, options: list[str]) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = ["--host", "127.0.0.1", "--port", str(port), "-t", "1", "--no-warmup", "--cache-ram", "0", "-lv", "5"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LLAMA_ARG_")} | {"LLAMA_BATCH_DEBUG": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen([program, *options, *common], stdout=out, stderr=out, env=environment)
    try:
        base = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 60
        while True:
            assert process.poll() is None, log.read_text(errors="replace")[-2000:]
            try:
                with urllib.request.urlopen(base + "/health", timeout=5):
                    break
            except OSError:
                assert time.monotonic() < deadline, "llama-server did not start in a minute"
                time.sleep(0.05)
        yield base
    finally:
        process.terminate()
        process.wait(20)


def batches_of_llama_server(
    program: Path, tmp_path: Path, options: list[str], groups: list[list[list[int]]]
) -> list[list[Token]]:
    log = tmp_path / "llama-server.log"
    with llama_server(program, log, options) as base:
        for prompts in groups:
            body = {"prompt": prompts if len(prompts) > 1 else prompts[0], "n_predict": N_PREDICT}
            body |= {"temperature": 0, "logit_bias": [[FORCED, 1e6]], "cache_prompt": True}
            request = urllib.request.Request(base + "/completion", json.dumps(body).encode())
            with urllib.request.urlopen(request, timeout=120) as response:
                response.read()
    text = log.read_text(encoding="utf-8", errors="replace")
    return batches(text[text.index("listening on http") :])


def our_batches(
    live: Callable[..., Any],
    library: native_library.Library,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
    groups: list[list[list[int]]],
    **options: Any,
) -> list[list[Token]]:
    monkeypatch.setenv("LLAMA_BATCH_DEBUG", "1")  # read when the context is made
    log = tmp_path / "ours.log"
    engine = live(model, kv_unified=False, **options)
    library.mg.set_log("debug", log)
    try:
        for prompts in groups:
            sampling = SamplingParams(temperature=0.0, logit_bias=((FORCED, 1e6),))
            requests = [Request(np.array(prompt, np.int32), sampling, n_predict=N_PREDICT) for prompt in prompts]
            # In one message, as llama-server's queue gets them.
            engine.engine.call(lambda e, mine=requests: [e.submit(request) for request in mine]).result(60)
            for request in requests:
                engine.last(request)
    finally:
        library.mg.set_log("warn")
    return batches(log.read_text(encoding="utf-8", errors="replace"))


@pytest.fixture
def compare(
    live: Callable[..., Any],
    library: native_library.Library,
    server_program: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., list[list[Token]]]:
    """`compare(model, groups, n_parallel=…, n_ctx=…, n_batch=…, n_ubatch=…)`: run both; the batches, which are the same."""

    def run(model: Path, groups: list[list[list[int]]], **o: int) -> list[list[Token]]:
        flags = {"-np": o["n_parallel"], "-c": o["n_ctx"], "-b": o["n_batch"], "-ub": o["n_ubatch"]}
        options = ["-m", str(model), "--no-kv-unified", *[str(item) for pair in flags.items() for item in pair]]
        theirs = batches_of_llama_server(server_program, tmp_path, options, groups)
        ours = our_batches(live, library, tmp_path, monkeypatch, model, groups, **o)
        assert [len(batch) for batch in ours] == [len(batch) for batch in theirs]
        assert ours == theirs
        assert sum(token[3] for batch in ours for token in batch) == N_PREDICT * sum(map(len, groups))
        return ours

    return run


def rows(found: list[list[Token]], sequence: int) -> list[tuple[int, int, int]]:
    """(tokens, first position, outputs) of what each batch holds of a sequence."""
    mine = [[token for token in batch if token[2] == sequence] for batch in found]
    return [(len(part), part[0][1], sum(token[3] for token in part)) for part in mine if part]


def beside(found: list[list[Token]], sequence: int) -> list[list[int]]:
    """The sequences, in order, of the batches that hold prompt tokens of `sequence`."""
    with_prompt = [batch for batch in found if sum(token[2] == sequence for token in batch) > 1]
    return [list(dict.fromkeys(token[2] for token in batch)) for batch in with_prompt]


@pytest.mark.parametrize("which", ["plain", "hybrid"])
def test_a_prompt_that_arrives_beside_a_stream(
    live: Callable[..., Any],
    library: native_library.Library,
    server_program: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    which: str,
) -> None:
    model = request.getfixturevalue("smol_model" if which == "plain" else "micro_model")
    stream, prompt = TEXT[:20], TEXT[300:450]
    fixed: dict[str, Any] = {"temperature": 0, "logit_bias": [[FORCED, 1e6]]}
    log = tmp_path / "llama-server.log"
    flags = ["-np", "2", "-c", "4096", "-b", "64", "-ub", "16", "--no-kv-unified", "-m", str(model)]
    with llama_server(server_program, log, flags) as base:

        def post(**body: Any) -> Any:
            data = json.dumps(body | fixed).encode()
            return urllib.request.urlopen(urllib.request.Request(base + "/completion", data), timeout=120)

        with post(prompt=stream, n_predict=1500, stream=True) as streaming:
            streaming.readline()
            with post(prompt=prompt, n_predict=N_PREDICT) as answer:
                answer.read()
    text = log.read_text(encoding="utf-8", errors="replace")
    theirs = batches(text[text.index("listening on http") :])

    monkeypatch.setenv("LLAMA_BATCH_DEBUG", "1")
    ours_log = tmp_path / "ours.log"
    engine = live(model, kv_unified=False, n_parallel=2, n_ctx=4096, n_batch=64, n_ubatch=16)
    library.mg.set_log("debug", ours_log)
    try:
        sampling = SamplingParams(temperature=0.0, logit_bias=((FORCED, 1e6),))
        first = Request(np.array(stream, np.int32), sampling, n_predict=1500, stream=True)
        second = Request(np.array(prompt, np.int32), sampling, n_predict=N_PREDICT)
        engine.engine.submit(first)
        engine.wait(lambda: any(isinstance(event, Delta) for event in engine.of(first)))
        engine.ask(second)
        engine.engine.cancel(first.id)
        engine.engine.call(lambda e: None).result(60)
    finally:
        library.mg.set_log("warn")
    ours = batches(ours_log.read_text(encoding="utf-8", errors="replace"))
    assert rows(ours, 0) == rows(theirs, 0)
    assert beside(ours, 0) == beside(theirs, 0)
    assert set(map(tuple, beside(ours, 0))) == {(1, 0)}  # the stream's row comes first in every one of them
    assert rows(ours, 1)[:3] == rows(theirs, 1)[:3]


def test_a_prompt_longer_than_the_batch(compare: Callable[..., Any], smol_model: Path) -> None:
    shapes = compare(smol_model, [[TEXT[:150]]], n_parallel=1, n_ctx=512, n_batch=64, n_ubatch=32)
    assert [len(batch) for batch in shapes] == [64, 64, 22, 1, 1, 1, 1]


def test_four_prompts_at_once_decode_rows_first(compare: Callable[..., Any], smol_model: Path) -> None:
    prompts = [TEXT[:120], TEXT[200:290], TEXT[300:340], TEXT[400:410]]
    shapes = compare(smol_model, [prompts], n_parallel=4, n_ctx=4 * 256, n_batch=64, n_ubatch=32)
    # The last prompt is in the first slot and short: it decodes while the others' prompts fill what it leaves.
    assert next(token[2] for token in shapes[1]) == 0
    assert len(shapes[1]) == 64
    assert shapes[1][0][3] == 1


def test_hybrid_prompts_near_the_breaks(compare: Callable[..., Any], micro_model: Path) -> None:
    lengths = [1, 3, 4, 5, 8, 63, 64, 67, 68, 69, 72, 255, 256, 259, 260, 261, 319, 320, 323, 324, 325, 500, 700]
    # Each begins with a token of its own, so that nothing is reused.
    groups = [[[300 + i, *TEXT[: n - 1]]] for i, n in enumerate(lengths)]
    shapes = compare(micro_model, groups, n_parallel=1, n_ctx=1024, n_batch=256, n_ubatch=64)
    assert [len(batch) for batch in shapes if batch[0][0] == 300 + len(lengths) - 2] == [256]
    starts = [i for i, batch in enumerate(shapes) if batch[0][:2] == (300 + len(lengths) - 1, 0)]
    assert [len(batch) for batch in shapes[starts[0] :]] == [256, 256, 120, 64, 4, 1, 1, 1, 1]


def test_hybrid_reuse_from_checkpoints(compare: Callable[..., Any], micro_model: Path) -> None:
    base = TEXT[:300]
    said = [FORCED] * N_PREDICT
    groups = [
        [base],
        [base],  # the same again
        [base + said + TEXT[500:540]],  # the same chat with one more message
        [base[:298] + TEXT[600:660]],  # differs in its last tokens
        [base[:100] + TEXT[700:900]],  # differs early: from the beginning
        [base[:100]],  # only a beginning of it
        [TEXT[1000:1010]],  # something else, short
    ]
    shapes = compare(micro_model, groups, n_parallel=1, n_ctx=1024, n_batch=256, n_ubatch=64)
    firsts = [batch[0][1] for batch in shapes if batch[0][0] != FORCED or len(batch) > 1]
    assert 296 in firsts  # something was reused


def test_hybrid_prompts_at_once(compare: Callable[..., Any], micro_model: Path) -> None:
    groups = [
        [TEXT[:400], TEXT[500:530], TEXT[600:900], TEXT[1000:1070]],
        [[*TEXT[:400], 7], [*TEXT[500:530], 8], [*TEXT[600:900], 9], [*TEXT[1000:1070], 10]],
        [TEXT[1200:1500], TEXT[:200]],
    ]
    compare(micro_model, groups, n_parallel=4, n_ctx=4 * 1024, n_batch=256, n_ubatch=64)


@pytest.mark.parametrize("compacted", [False, True])
def test_seq_compact_keeps_a_step_in_one_ubatch(
    live: Callable[..., Any],
    library: native_library.Library,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    smol_model: Path,
    compacted: bool,
) -> None:
    monkeypatch.setenv("LLAMA_BATCH_DEBUG", "1")
    log = tmp_path / "ours.log"
    engine = live(smol_model, n_parallel=5, n_ctx=5 * 256, plugins=(AlwaysCompact,) if compacted else ())
    library.mg.set_log("debug", log)
    try:
        sampling = SamplingParams(temperature=0.0, logit_bias=((FORCED, 1e6),))
        requests = [
            Request(np.array(TEXT[9 * i : 9 * i + 8], np.int32), sampling, n_predict=3 if i in (1, 3) else 8, id_slot=i)
            for i in range(5)
        ]
        engine.engine.call(lambda e: [e.submit(request) for request in requests]).result(60)
        for request in requests:
            engine.last(request)
    finally:
        library.mg.set_log("warn")
    parts = START.split(log.read_text(encoding="utf-8", errors="replace"))[1:]
    n_ubatches = {len(TOKEN.findall(END.split(part)[0])): part.count("added ubatch to split") for part in parts}
    assert n_ubatches[5] == 1
    assert n_ubatches[3] == (1 if compacted else 3)
