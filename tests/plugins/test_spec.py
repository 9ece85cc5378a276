"""The plugin spec in an engine without a model: the text never changes, and drafts are made where they pay and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llamamg import Batch, DraftIndex, Row, StepState, Unavailable
from llamamg.config import Config, ContextConfig, ModelConfig, PluginsConfig
from llamamg.library import Library
from llamamg.plugins import PluginError, PluginSet
from llamamg.request import Finished
from llamamg.testing import EOS, ask, fake_engine, run
from llamamg_plugins.spec import Spec
from llamamg_plugins.spec_cost import Account, StepTimes

PHRASE = b"the quick brown fox jumps over the lazy dog; "


@pytest.fixture(autouse=True)
def _loaded(library: Library) -> None:
    """The index is native."""


def repeating(sequence: Any, so_far: list[int]) -> int:
    """A model that writes a phrase again and again, from wherever the prompt left off."""
    return PHRASE[(len(so_far) - sequence.n_prompt) % len(PHRASE)]


def counting(sequence: Any, so_far: list[int]) -> int:
    """A model that never says the same twice in a row of 12."""
    n = len(so_far)
    return 33 + (n * n * 7 + n // 5) % 90


class Serving:
    """An engine with the plugin on; `finish` answers requests sent together."""

    def __init__(
        self,
        n_slots: int = 1,
        *,
        model: Any = repeating,
        slow: dict[int, float] | None = None,
        by_token: Callable[[int], float] | None = None,
        n_batch: int = 512,
        **options: Any,
    ) -> None:
        given = {"type": "ngram-map-k4v"} | {key.replace("_", "-"): str(value) for key, value in options.items()}
        plugins_config = PluginsConfig(enable=("spec",), only=True, options={"spec": given})
        plugins = PluginSet.discover(plugins_config)
        config = Config(ModelConfig(Path("fake.gguf")), ContextConfig(n_parallel=n_slots), plugins=plugins_config)
        config = plugins.configure(config, [])
        self.engine, self.runner, self.events = fake_engine(
            n_slots, plugins=plugins, config=config, next_token=model, n_ctx_slot=2048, n_batch=n_batch
        )
        self.taken_s: list[float] = []  # by each step, where `by_token` says so
        self.plugin: Spec = plugins._members["spec"].instance
        if slow is not None or by_token is not None:
            collect = self.runner.collect

            def slowly() -> Any:
                done = collect()
                if done is not None and by_token is not None:
                    done.elapsed_s = by_token(done.batch.n_tokens)
                    self.taken_s.append(done.elapsed_s)
                elif done is not None and slow is not None:
                    done.elapsed_s = slow.get(sum(row.n_logits for row in done.batch.rows), max(slow.values()))
                return done

            self.engine.runner = _Runner(self.runner, slowly)  # type: ignore[assignment]

    def finish(self, *requests: Any) -> list[Finished]:
        for request in requests:
            self.engine.submit(request)
        run(self.engine)
        ends = {id_: event for id_, event in self.events if isinstance(event, Finished)}
        return [ends[request.id] for request in requests]

    @property
    def widest(self) -> int:
        """Drafted tokens of the widest row."""
        return max(n_logits - 1 for batch in self.runner.batches for *_, n_logits in batch if n_logits)


class _Runner:
    def __init__(self, runner: Any, collect: Callable[[], Any]) -> None:
        self._runner, self.collect = runner, collect

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def plain(request: Any, model: Any) -> Finished:
    engine, _, events = fake_engine(1, next_token=model, n_ctx_slot=2048, n_batch=512)
    engine.submit(replace(request, id=10**9))
    run(engine)
    return next(event for _, event in events if isinstance(event, Finished))


@pytest.mark.parametrize("model", [repeating, counting])
@pytest.mark.parametrize(
    "kind", ["ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "suffix", "suffix,ngram-simple"]
)
def test_off_equals_on(kind: str, model: Any) -> None:
    served = Serving(model=model, type=kind, always="on")
    request = ask(PHRASE.decode() * 2, n_predict=300, return_tokens=True)
    (end,) = served.finish(request)
    expected = plain(request, model)
    assert (end.tokens, end.text, end.reason) == (expected.tokens, expected.text, expected.reason)
    held = served.engine.slots[0].tokens.view().tolist()
    assert held == served.runner.kv.held[0][: len(held)]
    if model is repeating:
        assert served.plugin.effect > 200
        assert len(served.runner.batches) < 60


def test_it_needs_a_kind_and_says_so() -> None:
    with pytest.raises(Unavailable, match="add --spec-type with one of ngram-simple, ngram-map-k"):
        Spec().configure(Config(ModelConfig(Path("x"))), [])
    plugins = PluginSet.discover(PluginsConfig())
    plugins.configure(Config(ModelConfig(Path("x"))), [])
    assert "spec" not in plugins.enabled()
    assert "--spec-type" in str(next(view.reason for view in plugins.views() if view.name == "spec"))


def test_an_unknown_kind_stops_the_start() -> None:
    with pytest.raises(PluginError, match="no kind 'draft-mtp'; use one of ngram-simple"):
        Serving(type="draft-mtp")


def test_it_needs_a_build_that_has_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamamg_plugins.spec.has_lookup", lambda: False)
    with pytest.raises(PluginError, match="run `llamamg build`"):
        Serving()


@pytest.mark.parametrize(("asked", "width"), [(31, 31), (20, 15), (48, 31), (100, 31), (1, 1)])
def test_the_context_has_room_for_the_width(asked: int, width: int) -> None:
    plugin = Spec(type="ngram-map-k4v", draft_n_max=asked)
    assert plugin.configure(Config(ModelConfig(Path("x"))), []).context.n_draft_max == width


def test_rows_have_a_few_fixed_lengths() -> None:
    served = Serving()
    served.finish(ask("go", n_predict=400))
    served.finish(ask("and on until the context is full"))
    lengths = {n_tokens for batch in served.runner.batches for _, _, n_tokens, n_logits in batch if n_logits}
    assert lengths <= {1, 2, 4, 8, 16, 32, len("go"), len("and on until the context is full")}
    assert 32 in lengths


@pytest.mark.parametrize("always", ["on", "off"])
def test_no_draft_is_shorter_than_asked_for(always: str) -> None:
    served = Serving(draft_n_min=5, always=always)
    served.finish(ask("go", n_predict=400))
    assert served.plugin.effect > 0
    assert min(int(width) for width in served.plugin.report["drafts_by_width"]) >= 7


def test_nothing_is_drafted_from_a_text_that_does_not_repeat_itself() -> None:
    served = Serving(model=counting)
    served.finish(ask("go", n_predict=200))
    assert served.widest == 0
    assert served.plugin.report["no_draft"] == {"nothing found": 199}


def test_steps_that_take_as_long_as_their_tokens_are_left_alone() -> None:
    """Each row costs more than a whole step: after a try of some widths nothing is verified."""
    served = Serving(slow={n: 0.01 * n**1.1 for n in range(1, 33)})
    served.finish(ask("go", n_predict=600))
    spent = sum(0.01 * sum(n for *_, n in batch) ** 1.1 for batch in served.runner.batches[1:])
    assert spent < 0.01 * 600 * 1.02 + 0.05
    assert served.plugin.report["no_draft"]["would not pay"] > 200


def test_wrong_drafts_cost_little_and_then_wait() -> None:
    """The text looks as if it repeated itself and never does: what is lost stays below the limit and one draft."""

    def teasing(sequence: Any, so_far: list[int]) -> int:
        n = len(so_far) - sequence.n_prompt
        return PHRASE[n % 13] if n % 13 < 12 else 33 + (n // 13) % 90

    slow = {n: 0.01 * (1 + 0.3 * (n - 1)) for n in range(1, 33)}
    served = Serving(model=teasing, slow=slow)
    served.finish(ask("go", n_predict=1300))
    n_steps = sum(1 for batch in served.runner.batches[1:])
    spent = sum(slow[sum(n for *_, n in batch)] for batch in served.runner.batches[1:])
    assert spent < 0.01 * 1300 * 1.02 + slow[32]
    assert n_steps > 1000


def test_no_more_users_than_allowed() -> None:
    served = Serving(3, max_users=2)
    served.finish(*[ask("go", n_predict=100, id_slot=i) for i in range(3)])
    assert served.widest == 0
    assert served.plugin.report["no_draft"]["too many users"] > 0
    served.finish(*[ask("go", n_predict=100, id_slot=i) for i in range(2)])
    assert served.widest > 0


def test_fewer_accepted_than_asked_for_ends_it() -> None:
    served = Serving(2, min_accept=8)
    served.finish(*[ask("go", n_predict=200, id_slot=i) for i in range(2)])
    enough = served.plugin.effect  # 31 accepted, and 16 are asked for
    served = Serving(2, min_accept=8, draft_n_max=15)
    served.finish(*[ask("go", n_predict=200, id_slot=i) for i in range(2)])
    assert served.plugin.report["no_draft"]["too few accepted"] > 0
    assert served.plugin.effect < enough / 4


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


def test_nothing_is_drafted_behind_an_end_of_text() -> None:
    def model(sequence: Any, so_far: list[int]) -> int:
        n = len(so_far) - sequence.n_prompt
        return PHRASE[n] if n < 20 else EOS

    served = Serving(model=model, always="on")
    prompt = [*PHRASE[:20], EOS, *PHRASE[:9]]
    (end,) = served.finish(ask(prompt, n_predict=50, return_tokens=True))
    assert end.tokens == (*PHRASE[:20], EOS)
    assert served.widest > 0
    assert EOS not in served.runner.kv.rows[0][len(prompt) :]  # neither computed


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


def request_of(served: Serving) -> Any:
    """The sequence that runs."""
    return served.engine.scheduler.running[0]


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


def test_probabilities_after_sampling_come_without_drafts() -> None:
    """The engine takes no draft then, so nobody else may be told that it brings something."""
    served = Serving(always="on")
    served.finish(ask(PHRASE.decode() * 2, n_predict=20, n_probs=2, post_sampling_probs=True))
    assert served.plugin.report["no_draft"] == {"probabilities after sampling": 19}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"draft_n_max": 0}, "--spec-draft-n-max is 0"),
        ({"type": "ngram-mod", "ngram_mod_n_max": 0}, "the largest draft of --spec-type ngram-mod is 0"),
        ({"draft_n_min": 40}, "--spec-draft-n-min 40 is more than the longest draft, 31"),
        ({"type": "ngram-mod", "ngram_mod_n_min": 65}, "--spec-ngram-mod-n-min is more than"),
    ],
)
def test_what_would_draft_nothing_is_said(options: dict[str, Any], words: str) -> None:
    with pytest.raises(Unavailable, match=words):
        Spec(**{"type": "suffix", **options}).configure(Config(ModelConfig(Path("x"))), [])


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


def test_the_report_agrees_with_the_engine() -> None:
    served = Serving()
    (end,) = served.finish(ask("go", n_predict=300))
    report, stats = served.plugin.report, served.engine.stats
    assert report["drafts"] == stats.n_drafts > 0
    assert report["drafted"] == stats.n_draft == end.timings.draft_n
    assert report["accepted"] == stats.n_draft_accepted == end.timings.draft_n_accepted == served.plugin.effect
    assert report["accepted_per_position"] == stats.accepted_per_pos
    assert report["index_tokens"] > 0
    view = next(view for view in served.engine.plugins.views() if view.name == "spec")
    assert view.json()["report"] == report


def test_toggled_off_nothing_is_drafted() -> None:
    served = Serving()
    served.engine.plugins.toggle("spec", False)
    served.finish(ask("go", n_predict=200))
    assert served.widest == 0
    served.engine.plugins.toggle("spec", True)
    served.finish(ask("go", n_predict=200))
    assert served.widest > 0


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
