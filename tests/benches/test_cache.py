"""`llamamg bench cache` on a stand-in model and on the micro hybrid: what is saved, restored, timed and printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benches import cache, program
from benches.cache_stage import CacheStage
from benches.errors import BenchError
from llamamg.library import Library
from llamamg.plugins.testing import on
from llamamg.testing import FakeCells, fake_engine
from llamamg_plugins.async_cache import AsyncCache


@pytest.fixture
def stage() -> Any:
    engine, _, _ = fake_engine(3, n_ctx_slot=1 << 16, plugins=on(AsyncCache), n_batch=512)
    engine.vocab.n_vocab = 120  # printable tokens
    yield CacheStage(engine, n_decoders=2, depth=20, n_tokens=2000)
    engine.plugins.stop()


def test_a_session_is_saved_and_restored_round_after_round(stage: CacheStage) -> None:
    assert stage.first_token(stage.session())["n_cached"] == 0
    assert stage.n_session_bytes() == 4 * 2000
    n_saved = stage.cache._saver.n_saved
    assert stage.save_alone() > 0
    assert stage.restore_alone() > 0
    assert stage.first_token(stage.session())["n_cached"] == 1999
    stage.begin_decoding()
    assert len(stage.steps(10)) == 10
    for _ in range(3):
        gaps, took = stage.save_beside()
        assert gaps
        assert took > 0
        assert stage.cache._saver.n_saved > n_saved, "nothing was saved again"
        n_saved = stage.cache._saver.n_saved
        _, took = stage.restore_beside()
        assert took > 0
    assert stage.own_save()
    assert stage.own_restore()


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
    with pytest.raises(BenchError, match="nobody has written how"):
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
