"""prefill-gate where prompts have a context of their own, in the engine with the stand-in model."""

from __future__ import annotations

from typing import Any

import pytest

from llamamg.plugins.testing import config, unconfigured
from llamamg.plugins.testing import plugin as made_plugin
from llamamg.request import Failed, Finished
from llamamg.testing import ask, fake_engine, run
from llamamg_plugins.prefill_gate import PrefillGate


def engine_with(*classes: type[Any], options: dict[str, str] | None = None, **sizes: int) -> Any:
    flights = made_plugin("flights", {"batches_in_flight": lambda self: 9})
    of_gate = {"prefill-gate": options or {}} if PrefillGate in classes else {}
    names = tuple(cls.declaration.name for cls in (*classes, flights))
    plugins = unconfigured(*classes, flights, enable=names, options=of_gate)
    plugins.configure(config(n_ubatch=16))
    return fake_engine(4, plugins=plugins, n_batch=64, n_prefill_slots=2, **sizes)


def texts(events: list[Any]) -> dict[int, str]:
    return {id_: event.text for id_, event in events if isinstance(event, Finished)}


def answers(engine: Any, runner: Any, events: list[Any]) -> tuple[list[str], list[Any]]:
    """Two decoders, then two prompts beside them; the four texts and the batches."""
    requests = [
        ask("a", n_predict=400),  # longer than the prompts take, however slow the machine makes their chunks
        ask("k", n_predict=400),
        ask("b" * 150, n_predict=5),
        ask("c" * 90, n_predict=5),
    ]
    for request in requests[:2]:
        engine.submit(request)
    for _ in range(6):
        engine.step()
    for request in requests[2:]:
        engine.submit(request)
    run(engine)
    by_id = texts(events)
    return [by_id[request.id] for request in requests], runner.batches


@pytest.mark.parametrize("pick", [0, -1])
def test_answers_are_those_without_it_and_batches_are_smaller(pick: int) -> None:
    plain, gated = engine_with(), engine_with(PrefillGate)
    for _, runner, _ in (plain, gated):
        runner.pick = lambda n: pick % n
    text_off, batches_off = answers(*plain)
    text_on, batches_on = answers(*gated)
    assert text_off == text_on

    def largest(batches: list[Any]) -> int:
        return max(n for batch in batches for seq_id, _, n, _ in batch if seq_id >= 4)

    assert largest(batches_off) == 64
    assert largest(batches_on) <= 16  # the ubatch
    assert next(view.effect for view in gated[0].plugins.views() if view.name == "prefill-gate") > 0


def test_a_prompt_pauses_and_goes_on() -> None:
    """Between two batches of a prompt each group had a step: the prompt never has the device twice in a row."""
    engine, runner, events = engine_with(PrefillGate)
    runner.pick = lambda n: -1  # what was submitted last, the prompt's batch, ends first
    answers(engine, runner, events)
    kinds = ["prompt" if batch[0][0] >= 4 else "decode" for batch in runner.batches]
    first, last = kinds.index("prompt"), len(kinds) - 1 - kinds[::-1].index("prompt")
    beside = kinds[first + 1 : last]
    assert "prompt" in beside
    # Decoders had ended before the last prompts at the earliest when no decode batch is left.
    until = len(kinds) - 1 - kinds[::-1].index("decode")
    pairs = list(zip(kinds[first:until], kinds[first + 1 : until], strict=False))
    assert ("prompt", "prompt") not in pairs


def test_budget_zero_for_ever_holds_a_prompt_only_while_others_decode() -> None:
    def never(self: Any, state: Any) -> int | None:
        return None if state.decoding or not state.n_decoding else 0

    engine, runner, events = engine_with(made_plugin("never", {"prefill_budget": never}))
    text, batches = answers(engine, runner, events)
    assert len(text) == 4
    assert not any(isinstance(event, Failed) for _, event in events)
    first = min(i for i, batch in enumerate(batches) if batch[0][0] >= 4 and batch[0][2] > 1)
    assert first > 390, "the prompts did not wait for the decoders' 400 tokens"
    assert [view.quarantined for view in engine.plugins.views() if view.name == "never"] == [None]


def test_cancelled_in_the_middle_of_a_prompt_leaves_its_part_cached() -> None:
    engine, _, events = engine_with(PrefillGate)
    decoder = ask("a", n_predict=200)
    engine.submit(decoder)
    for _ in range(4):
        engine.step()
    gone = ask("b" * 150, n_predict=5, id_slot=1)
    engine.submit(gone)
    while len(engine.slots[1].tokens) < 30:
        engine.step()
    engine.cancel(gone.id)
    for _ in range(4):
        engine.step()
    n_kept = len(engine.slots[1].tokens)
    assert 30 <= n_kept < 150
    again = ask("b" * 150, n_predict=5, id_slot=1)
    engine.submit(again)
    run(engine)
    finished = next(event for id_, event in events if id_ == again.id and isinstance(event, Finished))
    assert finished.timings.cache_n == n_kept
