"""Graphs of small ubatches beside a context's own: the same bits, more graphs reused, and what makes them invalid."""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from qsa_context import Context, Model
from small_graphs_program import SWITCH, Program, counted, run

from llamamg.library import Library

N_SEQ = 4


@pytest.fixture(scope="module")
def micro(library: Library, synth_model: Callable[..., Path]) -> Iterator[Model]:
    if not library.patched:
        pytest.skip("the unpatched build keeps one graph")
    model = Model(library, synth_model())
    yield model
    model.close()


@pytest.fixture(scope="module")
def smol(library: Library, smol_model: Path) -> Iterator[Model]:
    if not library.patched:
        pytest.skip("the unpatched build keeps one graph")
    model = Model(library, smol_model)
    yield model
    model.close()


def same(model: Model, seed: int, n_run: int, **context: Any) -> None:
    """One random program with one graph, with more, and with a number that changes between steps."""
    program = Program(model, seed, N_SEQ, n_run)
    results, spared = [], []
    for values in ([0], [1], [3], [1, 0, 3]):
        with counted(model.library) as counts, Context(model, n_seq=N_SEQ, **context) as one:
            results.append(run(program, one, values))
        spared.append(counts["spared"])
    assert spared[0] == 0
    assert min(spared[1:3]) >= 4, "the program does not test what it should"
    for values, got in zip(("1", "3", "changing"), results[1:], strict=True):
        assert len(got) == len(results[0])
        for i, (a, b) in enumerate(zip(results[0], got, strict=True)):
            assert (a == b).all(), f"small-graphs {values}: the logits of operation {i} differ"


@pytest.mark.parametrize("native", [0, 1])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_hybrid_computes_the_same_bits(library: Library, micro: Model, seed: int, native: int) -> None:
    with library.mg.held({"qsa": native}):
        same(micro, seed, 16, n_ctx=512, n_ubatch=64)


def test_a_hybrid_that_can_go_back_computes_the_same_bits(library: Library, micro: Model) -> None:
    with library.mg.held({"qsa": 1}):
        same(micro, 4, 12, n_ctx=512, n_ubatch=32, n_rollback=4)


@pytest.mark.parametrize(("seed", "unified"), [(1, False), (3, True)])
def test_a_plain_model_computes_the_same_bits(smol: Model, seed: int, unified: bool) -> None:
    same(smol, seed, 5, n_ctx=2048 if unified else 512, n_ubatch=32, unified=unified)


def mixed(context: Context, chunk: int, n_step: int) -> dict[str, int]:
    """What was counted in steps of one decoding row and a chunk of a prompt that is not its neighbour."""
    context.feed([7] * 8, seq=0)
    for step in range(2):  # where a sequence begins, and the first graph of each shape
        context.decode([(2, step * chunk + j, 9) for j in range(chunk)] + [(0, 8 + step, 5)])
    with counted(context.model.library) as counts:
        for step in range(2, 2 + n_step):
            context.decode([(2, step * chunk + j, 9) for j in range(chunk)] + [(0, 8 + step, 5)])
    return dict(counts)


@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_in_mixed_steps_both_graphs_stay(library: Library, micro: Model, chunk: int) -> None:
    got = {}
    for value in (0, 1):
        with library.mg.held({SWITCH: value, "qsa": 1}), Context(micro, n_seq=3, n_ctx=2048) as context:
            got[value] = mixed(context, chunk, 10)
    assert got[0] == {"ubatch": 20, "reused": 0, "spared": 0, "built": 20}
    assert got[1]["ubatch"] == 20
    assert got[1]["reused"] == 20
    assert got[1]["spared"] >= 10  # where the chunk fills two ubatches it also follows itself
    assert got[1]["built"] == 0


def test_in_mixed_steps_of_a_plain_model_only_a_wider_mask_builds_anew(library: Library, smol: Model) -> None:
    with library.mg.held({SWITCH: 1}), Context(smol, n_seq=3, n_ctx=1024) as context:
        got = mixed(context, 32, 10)
    assert got["ubatch"] == 20
    assert got["built"] == 1  # 12 x 32 tokens pass 256 cells once
    assert got["reused"] == 19


def test_as_many_shapes_stay_as_graphs_are_kept(library: Library, micro: Model) -> None:
    """Three shapes of rows that are not neighbours take turns: two graphs lose to three shapes, three hold them."""
    got = {}
    for value in (1, 2):
        with library.mg.held({SWITCH: value, "qsa": 1}), Context(micro, n_seq=5) as context:
            for seq in (0, 2, 4):
                context.feed([7, 8], seq=seq)
            for step in range(8):
                if step == 2:
                    before = library.mg.trace_count("built")
                context.decode([(seq, 2 + step, 5) for seq in (0, 2, 4)], 3)
            got[value] = library.mg.trace_count("built") - before
    assert got == {1: 18, 2: 0}


def test_decoding_alone_needs_no_second_graph(library: Library, micro: Model) -> None:
    got = {}
    for value in (0, 1):
        with library.mg.held({SWITCH: value, "qsa": 1}), Context(micro) as context:
            context.feed([7] * 40)
            with counted(library) as counts:
                context.feed([5] * 10, start=40, chunk=1)
            got[value] = counts["built"]
    assert got[1] <= got[0] == 1


def test_two_contexts_in_two_threads(library: Library, micro: Model) -> None:
    programs = [Program(micro, seed, N_SEQ, 8) for seed in (7, 8)]
    with library.mg.held({"qsa": 1}):
        alone = []
        for program in programs:
            with Context(micro, n_seq=N_SEQ) as context:
                alone.append(run(program, context, [0]))
        with (
            library.mg.held({SWITCH: 2}),
            Context(micro, n_seq=N_SEQ) as first,
            Context(micro, n_seq=N_SEQ) as second,
        ):
            got: list[Any] = [None, None]

            def work(i: int, context: Context) -> None:
                got[i] = run(programs[i], context, None)

            threads = [threading.Thread(target=work, args=pair) for pair in enumerate((first, second))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    for a, b in zip(alone, got, strict=True):
        assert all((x == y).all() for x, y in zip(a, b, strict=True))


def test_no_graph_of_a_warm_up_stays(library: Library, micro: Model) -> None:
    """A warm-up computes all experts with the same shapes."""
    llama = library.llama
    rows = []
    for warm in (False, True):
        with library.mg.held({SWITCH: 1}), Context(micro) as context:
            if warm:
                llama.llama_set_warmup(context.pointer, True)
                loud = context.feed([7, 8])
                context.clear()
                llama.llama_set_warmup(context.pointer, False)
            rows.append(context.feed([7, 8]))
    assert (rows[0] == rows[1]).all()
    assert (rows[0] != loud).any()


def test_an_aborted_ubatch_leaves_the_graphs_usable(library: Library, micro: Model) -> None:
    """The prompt's first ubatch of a batch is stopped; then both kinds go on."""
    llama, rows = library.llama, []
    stop = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(lambda _: True)
    none = ctypes.cast(None, type(stop))
    for value in (0, 1):
        with library.mg.held({SWITCH: value, "qsa": 1}), Context(micro, n_seq=3) as context:
            mixed(context, 5, 3)
            batch = llama.llama_batch_init(5, 0, 1)
            batch.n_tokens = 5
            for j in range(5):
                batch.token[j], batch.pos[j], batch.n_seq_id[j], batch.logits[j] = 9, 25 + j, 1, j == 4
                batch.seq_id[j][0] = 2
            llama.llama_set_abort_callback(context.pointer, stop, None)
            assert llama.llama_decode(context.pointer, batch) == 2
            llama.llama_set_abort_callback(context.pointer, none, None)
            llama.llama_batch_free(batch)
            assert context.remove(2, 0)
            rows.append(
                np.concatenate([context.decode([(2, 0, 9), (2, 1, 9), (0, 13, 5)]), context.feed([5], start=14)])
            )
    assert (rows[0] == rows[1]).all()


def test_the_log_tells_the_memory(library: Library, micro: Model, tmp_path: Path) -> None:
    log = tmp_path / "log"
    library.mg.set_log("info", log)
    try:
        with library.mg.held({SWITCH: 2}), Context(micro, n_seq=3) as context:
            context.feed([7, 8])
            for value in (0, 1):
                library.mg.set_switch(SWITCH, value)
                context.feed([9], start=2 + value)
    finally:
        library.mg.set_log("warn")
    text = log.read_text()
    found = re.findall(r"compute buffer size = +([\d.]+) MiB more for (\d) graphs? of up to 64 tokens", text)
    own = re.search(r"compute buffer size = +([\d.]+) MiB\n", text)
    assert [int(n) for _, n in found] == [2, 1]
    assert own
    two, one = (float(size) for size, _ in found)
    assert 0 < one < float(own[1])
    assert two == pytest.approx(2 * one, abs=0.02)


def test_over_two_devices_with_a_pipeline(library: Library, micro_model: Path, two_rpc_devices: str) -> None:
    """Devices that compute while the host goes on: inputs are not overwritten while they are read."""
    if not library.patched:
        pytest.skip("the unpatched build keeps one graph")
    script = Path(__file__).with_name("small_graphs_program.py")
    command = [sys.executable, str(script), str(micro_model), two_rpc_devices]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["pipeline"]
    assert result["n_result"] > 20
    assert result["n_different"] == 0
    assert result["spared"].pop("[0]") == 0
    assert min(result["spared"].values()) > 3
