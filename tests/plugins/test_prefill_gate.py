"""prefill-gate: which prompts go, how much of them, that nobody starves, and that answers stay the same."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from llamamg import Request, Sequence, Slot, StepState, hookimpl
from llamamg.config import PluginsConfig
from llamamg.plugins import PluginError, PluginSet, plugin_options
from llamamg.plugins.testing import config as full_config
from llamamg.plugins.testing import on, unconfigured
from llamamg.request import Failed, Finished
from llamamg.testing import ask, fake_engine, run
from llamamg_plugins.prefill_gate import PrefillGate


def prompt(n_left: int, arrival: float, *, slot: int = 0, priority: int = 0, n_done: int = 0) -> Sequence:
    request = Request(np.zeros(n_left + n_done, np.int32), None, arrival=arrival, priority=priority)  # type: ignore[arg-type]
    return Sequence(request, Slot(slot, slot), None, None, n_past=n_done)  # type: ignore[arg-type]


def state(decoding: int = 0, n_batch: int = 2048) -> StepState:
    return StepState(n_batch, 512, decoding=[prompt(0, 0.0) for _ in range(decoding)])


def test_one_prompt_alone_is_left_to_the_default() -> None:
    gate = PrefillGate()
    assert gate.order_prefills(state(), [prompt(5000, 1.0)]) is None
    assert gate.prefill_budget(state()) is None
    assert gate.effect == 0


def test_by_default_one_prompt_a_batch_the_one_that_came_first() -> None:
    late, early = prompt(100, 2.0, slot=0), prompt(100, 1.0, slot=1)
    assert PrefillGate().order_prefills(state(), [late, early]) == [early]


def test_max_partial_in_arrival_order() -> None:
    a, b, c = (prompt(100, arrival, slot=i) for i, arrival in enumerate((3.0, 1.0, 2.0)))
    assert PrefillGate(max_partial=2).order_prefills(state(), [a, b, c]) == [b, c]


def test_lower_priority_numbers_go_first() -> None:
    usual, urgent = prompt(100, 1.0), prompt(100, 2.0, priority=-1)
    assert PrefillGate().order_prefills(state(), [usual, urgent]) == [urgent]


def test_long_prompts_beyond_max_long_wait_and_a_later_short_one_takes_the_place() -> None:
    long_1, long_2, short = prompt(9000, 1.0), prompt(9000, 2.0), prompt(100, 3.0)
    waiting = [long_2, short, long_1]

    def chosen(**options: int) -> Any:
        gate = PrefillGate(max_partial=2, pass_threshold=0, pass_ratio=0, **options)
        return gate.order_prefills(state(), waiting)

    assert chosen() == [long_1, short]
    assert chosen(max_long=2) == [long_1, long_2]
    assert chosen(long_threshold=9000) == [long_1, long_2]


def test_what_counts_as_long_is_what_is_left() -> None:
    nearly_done, long_2 = prompt(100, 1.0, n_done=9000), prompt(9000, 2.0)
    assert PrefillGate(max_partial=2).order_prefills(state(), [nearly_done, long_2]) == [nearly_done, long_2]


def test_beside_decoders_the_smaller_limit_counts() -> None:
    prompts = [prompt(100, float(i)) for i in range(3)]
    gate = PrefillGate(max_partial=3, max_with_decode=2)
    assert gate.order_prefills(state(), prompts) == prompts
    assert gate.order_prefills(state(decoding=1), prompts) == prompts[:2]


def test_chunk_only_beside_decoders_and_zero_is_off() -> None:
    assert PrefillGate(chunk=256, itl_ratio=0).prefill_budget(state(decoding=1)) == 256
    assert PrefillGate(chunk=256, itl_ratio=0).prefill_budget(state()) is None
    assert PrefillGate(chunk=256, itl_target_ms=50).prefill_budget(state()) is None
    assert PrefillGate(chunk=0, itl_ratio=0).prefill_budget(state(decoding=1)) is None


@pytest.mark.parametrize(
    ("n_decoding", "lefts", "effect"),
    [
        (1, [256], 0),  # fits the chunk
        (1, [257], 1),  # cut by the chunk
        (0, [3000, 3000], 0),  # the first one fills the batch anyway
        (0, [2000, 3000], 1),  # the second one would have got 48 tokens
        (1, [100, 100], 1),  # two would have fitted
    ],
)
def test_effect_counts_only_steps_that_came_out_differently(n_decoding: int, lefts: list[int], effect: int) -> None:
    gate = PrefillGate(itl_ratio=0)
    gate.order_prefills(state(decoding=n_decoding), [prompt(n, float(i)) for i, n in enumerate(lefts)])
    assert gate.effect == effect


@pytest.mark.parametrize(("pass_threshold", "pass_ratio"), [(0, 0), (10, 0), (0, 4), (10, 2)])
def test_no_prompt_waits_longer_than_for_those_that_came_before_it(pass_threshold: int, pass_ratio: int) -> None:
    """Whatever arrives later: a prompt is done within the steps that it and all earlier ones need one after the other,
    and within twice as many where later short ones may pass it in every second step."""
    rng, passes = random.Random(7), bool(pass_threshold or pass_ratio)
    for _ in range(300):
        chunk, n_slots = rng.choice([1, 4, 16]), rng.randint(2, 6)
        gate = PrefillGate(
            rng.randint(1, 3), rng.choice([0, 20, 50]), rng.randint(1, 2), chunk, rng.randint(1, 3),
            itl_ratio=0, pass_threshold=pass_threshold, pass_ratio=pass_ratio,
        )  # fmt: skip
        slots: list[Sequence | None] = [None] * n_slots
        bound: dict[int, int] = {}
        arrival = 0.0
        for step in range(120):
            for i in range(n_slots):
                if slots[i] is None and rng.random() < 0.5:
                    arrival += 1.0
                    slots[i] = new = prompt(rng.choice([1, 5, 30, 60]), arrival, slot=i)
                    need = sum(-(-s.n_prompt_left // chunk) for s in slots if s is not None)
                    bound[new.request.id] = step + need * (2 if passes else 1) + passes
            waiting = [s for s in slots if s is not None]
            if not waiting:
                continue
            now = state(decoding=1)
            chosen, budget = gate.order_prefills(now, waiting), gate.prefill_budget(now)
            assert chosen
            assert budget == chunk
            for sequence in chosen:
                n = min(budget, sequence.n_prompt_left)
                sequence.n_past += n
                budget -= n
            for i, held in enumerate(slots):
                if held is not None and held.n_prompt_left == 0:
                    slots[i] = None
                elif held is not None:
                    assert step + 1 < bound[held.request.id], "a prompt starves"


def test_a_short_prompt_passes_a_long_one_in_every_second_step() -> None:
    gate = PrefillGate(itl_ratio=0, pass_threshold=200)
    long, short = prompt(60_000, 1.0), prompt(200, 2.0)
    assert firsts(gate, [long, short]) == [short, long] * 3


def firsts(gate: PrefillGate, waiting: list[Sequence]) -> list[Sequence]:
    """Which prompt is computed in each of six steps."""
    return [(gate.order_prefills(state(decoding=1), waiting) or [])[0] for _ in range(6)]


def test_a_prompt_passes_one_that_is_many_times_as_long() -> None:
    gate = PrefillGate(itl_ratio=0)
    book, file, longer = prompt(60_000, 1.0), prompt(15_000, 2.0), prompt(15_001, 2.0)
    assert firsts(gate, [book, file]) == [file, book] * 3
    assert firsts(gate, [book, longer]) == [book] * 6
    assert firsts(PrefillGate(itl_ratio=0, pass_ratio=1), [book, longer]) == [longer, book] * 3
    urgent = prompt(60_000, 3.0, priority=-1)
    assert firsts(gate, [urgent, file]) == [urgent] * 6, "less urgent"
    assert firsts(gate, [urgent, prompt(15_000, 4.0, priority=-1)]).count(urgent) == 3
    assert firsts(PrefillGate(itl_ratio=0, pass_ratio=0), [book, file]) == [book] * 6
    assert firsts(PrefillGate(itl_ratio=0, pass_ratio=3), [book, longer]) == [longer, book] * 3
    assert firsts(gate, [book, prompt(15_000, 0.5)])[0].n_prompt == 15_000, "it came first"
    assert firsts(gate, [prompt(60_000, 1.0), prompt(60_000, 2.0), file]).count(file) == 3


def test_short_prompts_keep_their_own_order_and_do_not_pass_each_other() -> None:
    gate = PrefillGate(itl_ratio=0, pass_threshold=200, max_partial=3, max_with_decode=3)
    early, late, long = prompt(200, 1.0), prompt(10, 3.0), prompt(5000, 2.0)
    assert gate.order_prefills(state(decoding=1), [long, late, early]) == [early, late, long]
    assert gate.order_prefills(state(decoding=1), [late, early]) == [early, late]


def test_long_prompts_start_in_arrival_order() -> None:
    gate = PrefillGate(max_partial=3, long_threshold=10, max_long=1, chunk=0)
    waiting = [prompt(50, arrival, slot=i) for i, arrival in enumerate((4.0, 2.0, 3.0, 1.0))]
    begun: list[float] = []
    while waiting:
        (sequence,) = gate.order_prefills(state(), waiting) or waiting
        begun.append(sequence.request.arrival)
        sequence.n_past = sequence.n_prompt
        waiting.remove(sequence)
    assert begun == [1.0, 2.0, 3.0, 4.0]


def test_one_slot_has_nothing_to_gate() -> None:
    plugins = unconfigured(PrefillGate, enable=("prefill-gate",))
    with pytest.raises(PluginError, match="there is one slot"):
        plugins.configure(full_config(n_parallel=1))
    plugins = unconfigured(shipped=(PrefillGate,))
    plugins.configure(full_config(n_parallel=-1))
    assert plugins.enabled() == ["prefill-gate"]


def test_the_forks_flags_and_variables_are_declared() -> None:
    options = {option.name: option for option in plugin_options() if option.plugin == "prefill-gate"}
    declared = {name: (option.default, option.aliases, option.env) for name, option in options.items()}
    assert declared == {
        "max-partial": (1, ("--prefill-max-partial",), ("LLAMA_ARG_PREFILL_MAX_PARTIAL",)),
        "long-threshold": (8192, ("--prefill-long-threshold",), ("LLAMA_ARG_PREFILL_LONG_THRESHOLD",)),
        "max-long": (1, ("--prefill-max-long",), ("LLAMA_ARG_PREFILL_MAX_LONG",)),
        "chunk": (256, (), ("LLAMA_SERVER_PREFILL_CHUNK",)),
        "max-with-decode": (1, (), ("LLAMA_SERVER_PREFILL_MAX_WITH_DECODE",)),
        "itl-target-ms": (0.0, ("--itl-target-ms",), ()),
        "itl-ratio": (2.0, ("--itl-ratio",), ()),
        "min-share": (0.2, ("--prefill-min-share",), ()),
        "pass-threshold": (512, ("--prefill-pass-threshold",), ()),
        "pass-ratio": (4, ("--prefill-pass-ratio",), ()),
    }


@pytest.mark.parametrize(
    ("option", "value"), [("max-partial", "0"), ("max-long", "-1"), ("chunk", "-1"), ("chunk", "big")]
)
def test_wrong_values(option: str, value: str) -> None:
    with pytest.raises(PluginError, match=f"option {option} of plugin prefill-gate: '{value}' is not a whole number"):
        on(PrefillGate, options={"prefill-gate": {option: value}})


# ---- in the engine


def gated(**options: str) -> PluginSet:
    return on(PrefillGate, options={"prefill-gate": {"chunk": "8", "itl-ratio": "0", **options}})


def texts(events: list[Any]) -> dict[int, str]:
    return {id_: event.text for id_, event in events if isinstance(event, Finished)}


def shapes(plugins: PluginSet) -> tuple[list[list[tuple[int, int]]], dict[str, str]]:
    """Batches as (position, tokens) rows while one sequence decodes and a prompt of 100 arrives."""
    engine, runner, events = fake_engine(2, plugins=plugins, n_batch=32)
    decoder, late = ask("a", n_predict=40), ask("b" * 100, n_predict=3)
    engine.submit(decoder)
    for _ in range(3):
        engine.step()
    begin = len(runner.batches)
    engine.submit(late)
    run(engine)
    by_id = texts(events)
    rows = [[(pos0, n) for _, pos0, n, _ in batch] for batch in runner.batches[begin:]]
    return rows, {"decoder": by_id[decoder.id], "late": by_id[late.id]}


def off() -> PluginSet:
    plugins = PluginSet.discover(PluginsConfig(none=True))
    plugins.configure(full_config())
    return plugins


def test_chunks_beside_a_decoder_in_the_engine() -> None:
    plugins = gated()
    rows, _ = shapes(plugins)
    with_prompt = [batch for batch in rows if len(batch) == 2][:13]
    assert [batch[1] for batch in with_prompt] == [(8 * i, 8) for i in range(12)] + [(96, 4)]
    assert all(batch[0][1] == 1 for batch in with_prompt)  # the decoder got its token in each of these steps
    assert plugins.views()[0].effect == 12  # the last four tokens would have come out the same


def test_prefill_gate_off_equals_on() -> None:
    (rows_off, text_off), (rows_on, text_on) = shapes(off()), shapes(gated())
    assert rows_off != rows_on
    assert text_off == text_on


def test_toggled_while_a_prompt_is_computed() -> None:
    plugins = gated()
    engine, runner, _ = fake_engine(2, plugins=plugins, n_batch=32)
    engine.submit(ask("a", n_predict=60))
    engine.step()
    engine.submit(ask("b" * 200, n_predict=1))
    engine.step()
    engine.call(lambda _: plugins.toggle("prefill-gate", False))
    engine.step()
    engine.call(lambda _: plugins.toggle("prefill-gate", True))
    engine.step()
    assert [batch[-1][2] for batch in runner.batches[-3:]] == [8, 31, 8]


@pytest.mark.parametrize("hook", ["order_prefills", "prefill_budget"])
def test_prefill_gate_raising_costs_no_request(hook: str) -> None:
    def boom(self: Any, state: StepState) -> Any:
        raise RuntimeError("boom")

    broken = type("Broken", (PrefillGate,), {hook: hookimpl(boom)})
    plugins = on(broken)
    engine, _, events = fake_engine(2, plugins=plugins, n_batch=32)
    engine.submit(ask("a", n_predict=20))
    engine.step()
    engine.submit(ask("b" * 100, n_predict=3))
    run(engine)
    assert len(texts(events)) == 2
    assert not any(isinstance(event, Failed) for _, event in events)
    assert plugins.views()[0].quarantined == f"{hook}: RuntimeError: boom"


def test_turns_are_counted_in_steps_that_take_prompt_tokens() -> None:
    """With contexts of their own prompts wait in every second step: a short one must not always be first in those."""
    gate = PrefillGate(itl_ratio=0, pass_threshold=200)
    long, short = prompt(60_000, 1.0), prompt(200, 2.0)
    budgets = iter([5, 0] * 6)
    now = state()
    gate.prefill_budget = lambda state: next(budgets)  # type: ignore[method-assign]
    answers = [gate.order_prefills(now, [long, short]) for _ in range(12)]
    assert [answer[0] for answer in answers[::2] if answer] == [short, long] * 3
    assert answers[1::2] == [[long]] * 6
