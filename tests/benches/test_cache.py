"""`llamamg bench cache` on a stand-in model and on the micro hybrid: what is saved, restored, timed and printed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benches import cache, program
from benches.cache_stage import CacheStage
from benches.errors import BenchError
from llamamg.library import Library
from llamamg.plugins import PluginError
from llamamg.plugins.testing import on
from llamamg.testing import FakeCells, fake_engine
from llamamg.transfer import Workers
from llamamg_plugins.async_cache import AsyncCache


def stages(hybrid: bool) -> Iterator[CacheStage]:
    engine, _, _ = fake_engine(3, n_ctx_slot=1 << 16, plugins=on(AsyncCache), n_batch=512, hybrid=hybrid)
    engine.vocab.n_vocab = 120  # printable tokens
    yield CacheStage(engine, n_decoders=2, depth=20, n_tokens=2000)
    engine.plugins.stop()


@pytest.fixture
def stage() -> Any:
    yield from stages(hybrid=False)


@pytest.fixture
def hybrid() -> Any:
    yield from stages(hybrid=True)


def test_a_session_is_saved_and_restored_round_after_round(stage: CacheStage) -> None:
    assert stage.first_token(stage.session())["n_cached"] == 0
    assert stage.n_session_bytes() == 4 * 2000
    n_saved = stage.cache._parts.saver.n_saved
    assert stage.save_alone() > 0
    assert stage.restore_alone() > 0
    assert stage.first_token(stage.session())["n_cached"] == 1999
    stage.begin_decoding()
    assert len(stage.steps(10)) == 10
    for _ in range(3):
        gaps, took = stage.save_beside()
        assert gaps
        assert took > 0
        assert stage.cache._parts.saver.n_saved > n_saved, "nothing was saved again"
        n_saved = stage.cache._parts.saver.n_saved
        _, took = stage.restore_beside()
        assert took > 0
    assert stage.own_save()
    assert stage.own_restore()


def test_every_save_alone_copies_all_of_it(hybrid: CacheStage) -> None:
    """Its time would be that of a part, or of nothing, if it ended before the state was copied or found the session there."""
    cells, n_copies = hybrid.engine.cells, 0
    assert isinstance(cells, FakeCells)
    states = Workers(1)  # as on a GPU: states are copied from their devices by other threads than the rows
    hybrid.cache._parts.kept._workers, hybrid.cache._parts.kept.n_bytes_max = states, 1 << 20
    cells.limit_states(1 << 20, 0)
    hybrid.first_token(hybrid.session())

    def slow() -> None:
        nonlocal n_copies
        time.sleep(0.05 if threading.current_thread() in states._threads else 0.0)
        n_copies += 1

    cells.slow = slow
    for _ in range(3):
        before = n_copies
        hybrid.save_alone()
        assert n_copies - before >= 8
        before = n_copies
        time.sleep(0.1)
        assert n_copies == before
    states.stop()


def test_a_restore_is_over_before_the_first_batch(stage: CacheStage) -> None:
    """What its time is made of does not contain the computing of the tokens that are left."""
    stage.first_token(stage.session())
    stage.restore_alone()
    request = stage.session()
    stage.empty_slot()
    assert len(stage.slot.tokens) == 0
    found = stage.first_token(request)
    assert found["n_cached"] == 1999
    assert 0 < stage._waited(request) < found["ttft_s"]


def test_a_session_that_was_not_restored_is_an_error(stage: CacheStage) -> None:
    stage.first_token(stage.session())
    cells = stage.engine.cells
    assert isinstance(cells, FakeCells)

    def fail() -> None:
        raise OSError("no")

    stage.save_alone()
    cells.slow = fail
    with pytest.raises(BenchError, match="only 0 of 2000 tokens"):
        stage.restore_alone()


def test_where_nothing_can_be_copied() -> None:
    engine, _, _ = fake_engine(3, plugins=on(AsyncCache))
    assert engine.cells is not None
    engine.cells.reason = "nobody has written how"
    with pytest.raises(PluginError, match="nobody has written how"):  # which benchmarks print as a sentence
        CacheStage(engine, 2, 20, 100)


def test_the_command(library: Library, micro_model: Path, tmp_path: Path, capsys: Any) -> None:
    if not library.patched:
        pytest.skip("an unpatched build does not show its cells")
    arguments = ["-m", str(micro_model), "-t", "1", "--tokens", "700", "--rounds", "2", "--alone", "3", "--depth", "8",
                 "--results", str(tmp_path)]  # fmt: skip
    assert program.run_module(cache, arguments, "llamamg bench cache") == 0
    (file,) = tmp_path.glob("*/*/result.json")
    result = json.loads(file.read_text())
    assert result["cold"]["n_cached"] == 0
    assert result["warm"]["n_cached"] == result["restart"]["n_cached"] == 696  # the checkpoint near the prompt's end
    assert set(result["gaps_ms"]) == {"alone", "save", "restore", "libllama save", "libllama restore"}
    assert len(result["took_s"]["save"]) == len(result["took_s"]["restore"]) == 2
    assert capsys.readouterr().out == cache.table(result) + "\n"
