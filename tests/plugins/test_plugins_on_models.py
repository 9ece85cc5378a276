"""The shipped plugins on a real library and a model of the qwen4exp architecture: recurrent state and sparse attention."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamamg.config import Config, ContextConfig, ModelConfig, PluginsConfig
from llamamg.engine import Engine
from llamamg.library import Library
from llamamg.loading import load
from llamamg.plugins import PluginSet
from llamamg.request import Failed, Finished, Request, SamplingParams


def greedy(n_prompt: int, n_predict: int, *, seed: int, **fields: Any) -> Request:
    prompt = np.random.default_rng(seed).integers(1000, 5000, n_prompt, dtype=np.int32)
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    return Request(prompt, sampling, n_predict=n_predict, return_tokens=True, **fields)


Serve = Callable[..., tuple[dict[int, tuple[int, ...]], Engine, list[list[tuple[int, int]]]]]


@pytest.fixture
def serve(library: Library, micro_model: Path) -> Any:
    """Run requests in an engine stepped by the test: tokens by request, the engine, and rows (seq_id, tokens) by batch."""
    engines: list[Engine] = []

    def run(
        enable: tuple[str, ...],
        requests: list[Request],
        *,
        n_slots: int,
        after: Callable[[Engine, int], None] = lambda engine, step: None,
        options: dict[str, dict[str, str]] | None = None,
    ) -> Any:
        only = PluginsConfig(enable=enable, only=bool(enable), none=not enable, options=options or {})
        plugins = PluginSet.discover(only)
        context = ContextConfig(n_ctx=512 * n_slots, n_parallel=n_slots, n_threads=1, n_batch=256, warmup=False)
        engine = load(Config(ModelConfig(micro_model), context), plugins)
        engines.append(engine)
        events: list[Any] = []
        engine.deliver = events.extend
        batches: list[list[tuple[int, int]]] = []
        submit = engine.runner.submit

        def recording(batch: Any) -> None:
            batches.append([(row.sequence.slot.seq_id, len(row)) for row in batch.rows])
            submit(batch)

        engine.runner.submit = recording  # type: ignore[method-assign]
        for request in requests:
            engine.submit(request)
        step = 0
        while engine.step():
            step += 1
            after(engine, step)
        assert not [event for _, event in events if isinstance(event, Failed)]
        tokens = {id_: event.tokens for id_, event in events if isinstance(event, Finished)}
        return tokens, engine, batches

    yield run
    for engine in engines:
        engine.stop(0.0)


ALWAYS = {"seq-compact": {"always": "true"}}  # whatever is faster on this machine


def five(**fields: Any) -> list[Request]:
    return [greedy(20 + i, 4 if i in (1, 3) else 24, seed=i, id_slot=i, **fields) for i in range(5)]


def test_seq_compact_off_equals_on(serve: Serve) -> None:
    requests_off, requests_on = five(), five()
    tokens_off, _, batches_off = serve((), requests_off, n_slots=5)
    tokens_on, engine, batches_on = serve(("seq-compact",), requests_on, n_slots=5, options=ALWAYS)
    assert [tokens_on[r.id] for r in requests_on] == [tokens_off[r.id] for r in requests_off]
    assert [id_ for id_, _ in batches_off[-1]] == [0, 2, 4]
    assert [id_ for id_, _ in batches_on[-1]] == [0, 1, 2]
    assert next(view.effect for view in engine.plugins.views() if view.name == "seq-compact") == 1


@pytest.mark.parametrize(("enable", "n_passes"), [((), 3), (("seq-compact",), 1)])
def test_the_library_makes_one_pass_where_it_made_three(
    serve: Serve,
    library: Library,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    enable: tuple[str, ...],
    n_passes: int,
) -> None:
    """Counted by the library itself: with LLAMA_BATCH_DEBUG it logs every ubatch it makes of a batch."""
    monkeypatch.setenv("LLAMA_BATCH_DEBUG", "1")
    log = tmp_path / "log"
    ends: list[int] = []

    def after(engine: Engine, step: int) -> None:
        if step == 1:
            library.mg.set_log("debug", log)
        ends.append(log.stat().st_size)

    try:
        serve(enable, five(), n_slots=5, after=after, options=ALWAYS)
    finally:
        library.mg.set_log("warn")
    text = log.read_bytes()
    passes = [text[begin:end].count(b"added ubatch to split") for begin, end in itertools.pairwise(ends)]
    assert passes[-10:] == [n_passes] * 10


@pytest.mark.parametrize("chunk", [1, 7, 64, 256, 2048])
def test_prefill_gate_off_equals_on(serve: Serve, chunk: int) -> None:
    def late(into: list[Request]) -> Callable[[Engine, int], None]:
        def after(engine: Engine, step: int) -> None:
            if step == 3:
                into.append(greedy(300, 6, seed=9))
                engine.submit(into[-1])

        return after

    first_off, first_on = greedy(20, 20, seed=1), greedy(20, 20, seed=1)
    late_off: list[Request] = []
    late_on: list[Request] = []
    tokens_off, _, batches_off = serve((), [first_off], n_slots=2, after=late(late_off))
    options = {"prefill-gate": {"chunk": str(chunk), "itl-ratio": "0"}}
    tokens_on, engine, batches_on = serve(
        ("prefill-gate",), [first_on], n_slots=2, after=late(late_on), options=options
    )
    assert tokens_on[first_on.id] == tokens_off[first_off.id]
    assert tokens_on[late_on[0].id] == tokens_off[late_off[0].id]

    def largest(batches: list[list[tuple[int, int]]]) -> int:
        return max(n for batch in batches if len(batch) == 2 for _, n in batch)

    assert largest(batches_on) == min(chunk, largest(batches_off))
    effect = next(view.effect for view in engine.plugins.views() if view.name == "prefill-gate")
    assert effect >= 4 if chunk <= 64 else effect == 0


def test_a_prompt_aborted_at_any_chunk_leaves_its_slot_usable_and_its_part_cached(serve: Serve) -> None:
    """The same prompt again computes only what was not done, and its answer is that of the run nobody aborted."""
    options = {"prefill-gate": {"chunk": "64", "itl-ratio": "0"}}
    whole = greedy(300, 6, seed=9)
    expected, _, _ = serve(("prefill-gate",), [whole], n_slots=2, options=options)
    n_done = set()
    for abort_at in range(4, 9):
        gone, again = greedy(300, 6, seed=9, id_slot=0), greedy(300, 6, seed=9, id_slot=0)

        def after(
            engine: Engine, step: int, abort_at: int = abort_at, gone: Request = gone, again: Request = again
        ) -> None:
            if step == 3:
                engine.submit(gone)
            if step == abort_at:
                n_done.add(len(engine.slots[0].tokens))
                engine.cancel(gone.id)
                engine.submit(again)

        decoder = greedy(20, 24, seed=1, id_slot=1)
        tokens, engine, batches = serve(("prefill-gate",), [decoder], n_slots=2, after=after, options=options)
        assert tokens[again.id] == expected[whole.id]
        n_prompt_rows = sum(n for batch in batches for seq_id, n in batch if seq_id == 0) - (6 - 1)
        assert n_prompt_rows == 300, "a part of the prompt was computed twice, or not at all"
        assert engine.stats.n_prompt_cached in n_done
    assert len(n_done) >= 4


@pytest.mark.parametrize(("chunk", "n_prompt"), [(1, 120), (7, 320), (256, 2300), (2048, 4300)])
def test_chunks_change_no_token_when_their_shapes_are_replayed(
    library: Library, micro_model: Path, record_property: Callable[..., None], chunk: int, n_prompt: int
) -> None:
    """What was given is what the library prefers without the plugin, batch by batch, bit by bit; alone, ties are counted."""
    from benches import check
    from benches.check_trace import Sizes
    from llamamg.guard import Guard

    options = {"prefill-gate": {"chunk": str(chunk), "itl-ratio": "0"}}
    plugins = PluginSet.discover(PluginsConfig(enable=("prefill-gate",), only=True, options=options))
    context = ContextConfig(
        n_ctx=6 * (n_prompt + 256), n_parallel=6, kv_unified=False, n_threads=1, n_batch=3000, warmup=False
    )
    engine = load(Config(ModelConfig(micro_model), context), plugins)
    try:
        row = check.check_engine(engine, "prefill-gate", Guard.same_tokens(), Sizes(n_tokens=24, n_prompt=n_prompt))
    finally:
        engine.stop(0.0)
    same, alone = row["same_batches"], row["alone"]
    assert same["n_positions"] > 60
    assert same["n_same_bits"] == same["n_positions"]
    assert (same["n_ties"], same["n_violations"]) == (0, 0)
    assert row["status"] == check.HELD, row["reason"]
    record_property("ties", f"{alone['n_ties']} of {alone['n_positions']}")
    assert alone["n_ties"] <= max(4, 0.08 * alone["n_positions"])


def test_a_gated_context_of_prompts_changes_no_token_when_its_shapes_are_replayed(
    library: Library, micro_model: Path
) -> None:
    """Prompts in a context of their own, whose batches are chosen by what gaps are: the bits are those of the same batches."""
    from benches import check
    from benches.check_trace import Sizes
    from llamamg.guard import Guard

    options = {"decode-groups": {"groups": "1", "prefill-slots": "2"}, "prefill-gate": {"itl-ratio": "1.5"}}
    plugins = PluginSet.discover(
        PluginsConfig(enable=("prefill-gate", "decode-groups"), only=True, options=options),
    )
    context = ContextConfig(n_ctx=6 * 1024, n_parallel=6, kv_unified=False, n_threads=1, n_batch=512, warmup=False)
    engine = load(Config(ModelConfig(micro_model), context), plugins)
    assert engine.runner.n_contexts == 2
    try:
        row = check.check_engine(engine, "prefill-gate", Guard.same_tokens(), Sizes(n_tokens=32, n_prompt=500))
    finally:
        engine.stop(0.0)
    same = row["same_batches"]
    assert same["n_positions"] > 60
    assert (same["n_ties"], same["n_violations"]) == (0, 0)
    assert row["status"] == check.HELD, row["reason"]
    assert row["effect"] > 0
