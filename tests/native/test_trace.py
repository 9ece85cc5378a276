"""Time stamps of the native library, and CUDA's launch queues. Devices with events: tests/benches/test_pipeline.py."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llamamg import demo, library
from llamamg.library import Library


@pytest.fixture(scope="module")
def context(library: Library) -> Iterator[Any]:
    if not library.patched:
        pytest.skip("the unpatched build keeps no stamps")
    llama = library.llama
    model = llama.llama_model_load_from_file(str(demo.demo_model()).encode(), llama.llama_model_default_params())
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_threads, params.n_threads_batch = 256, 64, 16, 1, 1
    context = llama.llama_init_from_model(model, params)
    yield context
    llama.llama_free(context)
    llama.llama_model_free(model)


def decode(library: Library, context: Any, n: int) -> None:
    llama = library.llama
    llama.llama_memory_clear(llama.llama_get_memory(context), True)
    tokens = (llama.llama_token * n)(*range(100, 100 + n))
    assert llama.llama_decode(context, llama.llama_batch_get_one(tokens, n)) == 0


def test_stamps_are_kept_in_order_while_the_switch_is_on_and_then_forgotten(
    library: Library, context: Any, tmp_path: Path
) -> None:
    mg, file = library.mg, tmp_path / "trace.json"
    library.mg.write_trace(file)
    n_before = mg.trace_count("ubatch")
    mg.set_switch("trace", 1)
    try:
        decode(library, context, 40)
    finally:
        mg.set_switch("trace", 0)
    decode(library, context, 40)
    assert mg.trace_count("ubatch") == n_before + 6  # counted in any case: 16 + 16 + 8, twice
    n = mg.write_trace(file)
    stamps = json.loads(file.read_text())
    assert len(stamps) == n
    assert [number for _, what, number, _ in stamps if what == "ubatch"] == [16, 16, 8]
    times = [us for us, *_ in stamps]
    assert times == sorted(times)
    assert times[0] == 0
    after_first = [what for _, what, _, _ in stamps[: stamps.index(next(s for s in stamps[1:] if s[1] == "ubatch"))]]
    assert after_first[-4:] == ["inputs", "split", "copied", "submitted"]
    assert mg.write_trace(file) == 0
    assert json.loads(file.read_text()) == []


def test_a_place_that_cannot_be_written(library: Library, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="choose another place"):
        library.mg.write_trace(tmp_path / "none" / "trace.json")


@pytest.mark.parametrize(("given", "expected"), [(None, "4x"), ("2x", "2x"), ("", None)])
def test_launch_queues_are_long_unless_the_user_chose(
    given: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(library.LAUNCH_QUEUES, raising=False)
    if given is not None:
        monkeypatch.setenv(library.LAUNCH_QUEUES, given)
    library._lengthen_launch_queues()
    assert os.environ.get(library.LAUNCH_QUEUES) == expected
    monkeypatch.delenv(library.LAUNCH_QUEUES, raising=False)
