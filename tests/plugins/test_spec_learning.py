"""What spec learns of a text and forgets again: whose it is, and when it looks."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from spec_serving import PHRASE, Serving, plain, repeating, request_of

from llamamg import DraftIndex
from llamamg.library import Library
from llamamg.testing import ask, run


@pytest.fixture(autouse=True)
def _loaded(library: Library) -> None:
    """The index is native."""


def test_a_slots_index_follows_its_requests() -> None:
    served = Serving(always="on")
    served.finish(ask("first " * 10, n_predict=50))
    served.finish(ask("first " * 10 + "and more", n_predict=50))
    served.finish(ask("something else", n_predict=50))
    reader = served.plugin._readers[0]
    assert len(reader.indexes[0]) == len(served.engine.slots[0].tokens) or len(reader.indexes[0]) < 70
    n = len(reader.indexes[0])
    text = served.engine.slots[0].tokens.view()[:n]
    assert reader.indexes[0].follow(text, whole=True) == 0


def test_other_slots_are_read_only_when_asked_to() -> None:
    for shared in ("off", "on"):
        served = Serving(2, shared=shared, always="on")
        served.finish(ask(PHRASE.decode(), n_predict=60, id_slot=0))
        before = served.plugin.effect
        served.finish(ask("xyz", n_predict=40, id_slot=1))
        assert (served.plugin.effect > before) == (shared == "on")


def test_a_guess_is_not_compared_with_tokens_that_were_not_shown() -> None:
    served = Serving(slow={n: 0.01 * n**1.1 for n in range(1, 33)}, max_loss=0)
    request = ask("go", n_predict=400)
    served.engine.submit(request)
    plugin = served.plugin
    while request.id not in plugin._guesses:
        served.engine.step()
    served.engine.plugins.toggle("spec", False)
    for _ in range(3):
        served.engine.step()
    served.engine.plugins.toggle("spec", True)
    before, rates = plugin._guesses[request.id], deepcopy(plugin._account(request_of(served)).rates)
    served.engine.step()
    assert plugin._guesses[request.id] is not before
    assert plugin._account(request_of(served)).rates == rates


def test_what_ended_while_it_was_off_is_forgotten() -> None:
    served = Serving()
    for _ in range(5):
        request = ask("go", n_predict=100)
        served.engine.submit(request)
        while request.id not in served.plugin.books.accounts:
            served.engine.step()
        served.engine.plugins.toggle("spec", False)
        run(served.engine)
        served.engine.plugins.toggle("spec", True)
    assert len(served.plugin.books.accounts) == 1
    served.finish(ask("go", n_predict=20))
    assert served.plugin.books.accounts == {}


def test_a_long_text_is_read_over_some_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a prompt comes out of a cache: nobody waits for the index."""
    monkeypatch.setattr("llamamg_plugins.spec.READ_MAX", 64)
    served = Serving(always="on")
    (end,) = served.finish(ask(PHRASE.decode() * 10, n_predict=200, return_tokens=True))  # one batch of 450 tokens
    assert served.plugin.report["no_draft"]["still reading"] == 6
    assert served.plugin.effect > 100
    assert end.tokens == plain(ask(PHRASE.decode() * 10, n_predict=200, return_tokens=True), repeating).tokens


def test_finished_requests_are_forgotten() -> None:
    served = Serving(2)
    served.finish(*[ask("go", n_predict=100, id_slot=i) for i in range(2)])
    assert (served.plugin.books.accounts, served.plugin._guesses, served.plugin._found) == ({}, {}, {})


def test_a_request_that_continues_a_text_drafts_sooner() -> None:
    """Its first drafts were verified only after some guesses; the next request knows."""

    def plain_steps(served: Serving, prompt: Any) -> int:
        before = len(served.runner.batches)
        served.finish(ask(prompt, n_predict=100))
        return sum(batch[0][2] == 1 for batch in served.runner.batches[before:])

    slow = {n: 0.01 * (1 + 0.7 * (n - 1)) for n in range(1, 33)}
    served = Serving(slow=slow)
    text = PHRASE * 3
    first = plain_steps(served, [*text])
    assert plain_steps(served, [*text, *PHRASE]) < first


@pytest.mark.parametrize(
    ("follows", "inherits"),
    [("the same", True), ("the same, and what was answered", True), ("the same beginning", False)],
)
def test_only_what_continues_a_text_inherits_what_was_learned_of_it(follows: str, inherits: bool) -> None:
    """Conversations that share a long beginning are not the same text."""
    served = Serving(always="on")
    shared, question = [*PHRASE * 4], [*b"first question?"]
    (end,) = served.finish(ask([*shared, *question], n_predict=60, return_tokens=True))
    before = served.plugin._readers[0].account
    assert before is not None
    before.n_refused = 7  # nothing else would set it here
    more = {"the same": [], "the same, and what was answered": [*end.tokens, *b"go on"]}
    prompt = [*shared, *question, *more[follows]] if follows in more else [*shared, *b"another question?"]
    served.engine.submit(ask(prompt, n_predict=60))
    served.engine.step()
    assert (served.plugin._account(request_of(served)).n_refused == 7) == inherits


def test_nothing_is_looked_up_while_nothing_may_be_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only when what is compared with the text has come to its end there is a look-up for more."""
    served = Serving(slow={n: 0.01 * (1 + 0.1 * (n - 1)) for n in range(1, 33)})
    served.engine.submit(ask("go", n_predict=1000))
    for _ in range(70):
        served.engine.step()
    account = served.plugin._account(request_of(served))
    lookups = []

    def draft(*arguments: Any) -> Any:
        lookups.append(arguments)
        return looked_up(*arguments)

    looked_up = DraftIndex.draft
    monkeypatch.setattr(DraftIndex, "draft", draft)
    account.to_prove, before = 62, served.plugin.totals.n_draft
    for _ in range(62):  # the first one finds what the others are compared with
        served.engine.step()
    assert (account.to_prove, served.plugin.totals.n_draft) == (1, before)
    assert len(lookups) <= 3
    assert served.plugin.report["no_draft"]["refused before"] >= 60
    for _ in range(3):
        served.engine.step()
    assert served.plugin.totals.n_draft > before
