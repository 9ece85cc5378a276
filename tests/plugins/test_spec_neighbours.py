"""What the drafts of one sequence may cost others: neighbours, sequences of other contexts, prompts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from spec_serving import PHRASE, Serving, counting, repeating

from llamamg import Batch, Row, StepState
from llamamg.library import Library
from llamamg.request import Finished
from llamamg.testing import ask, run
from llamamg_plugins.spec import Spec
from llamamg_plugins.spec_cost import Account, StepTimes


@pytest.fixture(autouse=True)
def _loaded(library: Library) -> None:
    """The index is native."""


def test_no_more_users_than_allowed() -> None:
    served = Serving(3, max_users=2)
    served.finish(*[ask("go", n_predict=100, id_slot=i) for i in range(3)])
    assert served.widest == 0
    assert served.plugin.report["no_draft"]["too many users"] > 0
    served.finish(*[ask("go", n_predict=100, id_slot=i) for i in range(2)])
    assert served.widest > 0


def test_neighbours_who_do_not_draft_lose_no_more_than_the_limit() -> None:
    """Two repeat, two do not; a step with drafts takes 60 % longer."""

    def model(sequence: Any, so_far: list[int]) -> int:
        return (repeating if sequence.slot.id < 2 else counting)(sequence, so_far)

    slow = {4: 0.01} | dict.fromkeys(range(5, 129), 0.016)
    served = Serving(4, model=model, slow=slow, max_loss=3)
    requests = [ask("go", n_predict=3000 if i < 2 else 600, id_slot=i) for i in range(4)]
    for request in requests:
        served.engine.submit(request)
    while not any(isinstance(event, Finished) and id_ == requests[2].id for id_, event in served.events):
        served.engine.step()
    steps = [sum(n for *_, n in batch) for batch in served.runner.batches[4:]]
    plain_s = 0.01 * len(steps)
    assert sum(slow.get(n, 0.01) for n in steps) < 1.03 * plain_s
    assert served.plugin.effect > 0


def test_sequences_of_two_contexts_are_asked_for_apart() -> None:
    """While one context computes drafts, the next step of another one is planned."""
    served = Serving(2, always="on")
    for i in range(2):
        served.engine.submit(ask(PHRASE.decode() * 3, n_predict=200, id_slot=i))
    for _ in range(3):
        served.engine.step()
    plugin, state = served.plugin, served.engine.scheduler.state
    first, second = state.decoding
    plugin.spec_limit(StepState(64, 16, slots=state.slots, decoding=[first]))
    drafted = plugin.draft(first, 31)
    plugin.spec_limit(StepState(64, 16, slots=state.slots, decoding=[second]))
    assert drafted
    rate = plugin._account(first).rate(12)
    before = rate.right
    plugin.draft_verified(first, len(drafted), len(drafted))
    assert rate.right > before


def test_each_context_has_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step of one context takes from its look-ups to its end, whatever began in another one meanwhile."""
    served = Serving(2)
    for i in range(2):
        served.engine.submit(ask("go", n_predict=50, id_slot=i))
    for _ in range(3):
        served.engine.step()
    plugin, state = served.plugin, served.engine.scheduler.state
    first, second = state.decoding
    second.slot.context = 1
    plugin.books.times = StepTimes()
    now = 10.0
    for module in ("spec", "spec_books"):
        monkeypatch.setattr(f"llamamg_plugins.{module}.time", SimpleNamespace(perf_counter=lambda: now))
    for sequence, began in ((first, 10.0), (second, 13.0)):
        now = began
        plugin.spec_limit(StepState(64, 16, slots=state.slots, decoding=[sequence]))
    taken = []
    for sequence, ended in ((first, 14.0), (second, 15.0)):
        now = ended
        plugin.batch_done(Batch([Row(sequence, [1], 9, 1)], sequence.slot.context), 0.5)
        taken.append(plugin.books.times.table()["1"]["0"])
    assert taken == [4000.0, 2000.0]  # of the first two of a size the shorter one is kept


def test_a_slot_that_is_being_filled_is_no_user() -> None:
    served = Serving(2, max_users=1)
    served.engine.slots[1].restoring = True
    served.finish(ask("go", n_predict=200, id_slot=0))
    assert served.widest > 0
    assert "spec" in served.engine.plugins.enabled()


def test_slow_steps_behind_a_draft_are_booked_to_it() -> None:
    """What a draft leaves behind, such as graphs to be made anew, is a part of what it costs."""

    def step(spec: Spec, n_draft: int, elapsed_s: float, is_prompt: bool = False) -> None:
        spec.batch_done(Batch([Row(sequence, [1], 0, 1 + n_draft, is_prompt)], 0), elapsed_s)

    sequence = SimpleNamespace(request=SimpleNamespace(id=1))
    spec = Spec()
    account = spec.books.accounts[1] = Account()
    for _ in range(5):
        step(spec, 0, 0.01)
    account.credit = 0.0
    step(spec, 0, 0.02)
    assert account.credit > 0, "no draft, nobody's fault"
    account.credit = 0.0
    step(spec, 3, 0.01)
    for _ in range(5):
        step(spec, 0, 0.02)
    assert account.credit < -0.5
    before = account.credit
    step(spec, 0, 0.02)
    assert account.credit > before, "long after it"
    for _ in range(10):
        step(spec, 3, 0.01)
        for _ in range(3):
            step(spec, 0, 0.01)
    account.credit = 0.0
    step(spec, 3, 0.01)
    step(spec, 0, 0.5)
    assert account.credit > -0.6, "what is slow once is not the draft's: the machine was busy"
    account.credit = 0.0
    step(spec, 3, 0.01)
    step(spec, 0, 0.5, is_prompt=True)
    before = account.credit
    step(spec, 0, 0.02)
    assert account.credit > before, "behind a prompt it is the prompt's graphs that were replaced"


def step_s(n_tokens: int) -> float:
    """A step's time where each row more takes a twentieth of the first one's."""
    return 0.01 * (1 + 0.05 * (n_tokens - 1))


def beside_a_prompt(n_batch: int, **options: Any) -> tuple[float, int]:
    """Seconds until the first token of a prompt that arrives beside two that repeat themselves; tokens drafted meanwhile."""
    served = Serving(3, by_token=step_s, n_batch=n_batch, **options)
    for i in range(2):
        served.engine.submit(ask("go", n_predict=1900, id_slot=i))
    for _ in range(60):
        served.engine.step()
    began, before = len(served.taken_s), served.plugin.totals.n_draft
    prompt = ask([33 + (n * n * 7 + n // 5) % 90 for n in range(1500)], n_predict=1, id_slot=2)
    served.engine.submit(prompt)
    while not any(isinstance(event, Finished) and id_ == prompt.id for id_, event in served.events):
        served.engine.step()
    return sum(served.taken_s[began:]), served.plugin.totals.n_draft - before


@pytest.mark.parametrize("n_batch", [16, 64, 256])
def test_a_prompt_beside_them_loses_no_more_than_the_limit(n_batch: int) -> None:
    """Rows of drafts take its room in the batch, so it needs more steps, and each of them takes as long."""
    without, none = beside_a_prompt(n_batch, max_users=1)
    careful, few = beside_a_prompt(n_batch, max_loss=2)
    careless, many = beside_a_prompt(n_batch, max_loss=100)
    assert none == 0
    assert careful < 1.03 * without + step_s(n_batch)
    assert careless > 1.1 * without, "otherwise this says nothing"
    assert few < many


def test_drafts_go_on_behind_the_prompt() -> None:
    served = Serving(2, by_token=step_s, n_batch=64)
    served.engine.submit(ask("go", n_predict=1500, id_slot=0))
    for _ in range(62):
        served.engine.step()
    prompt = ask([33 + (n * n * 7 + n // 5) % 90 for n in range(500)], n_predict=1, id_slot=1)
    served.engine.submit(prompt)
    while not any(id_ == prompt.id and isinstance(event, Finished) for id_, event in served.events):
        served.engine.step()
    before, why_not = served.plugin.effect, served.plugin.report["no_draft"]
    assert why_not["beside a prompt"] == 1, "how long such a step takes is known after the first"
    run(served.engine)
    assert served.plugin.effect > before + 500
