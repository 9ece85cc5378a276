"""The plugin spec in an engine without a model: the text never changes, and drafts are made where they pay and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from spec_serving import PHRASE, Serving, counting, plain, repeating

from llamamg import Unavailable
from llamamg.config import Config, ModelConfig, PluginsConfig
from llamamg.library import Library
from llamamg.plugins import PluginError, PluginSet
from llamamg.testing import EOS, ask
from llamamg_plugins.spec import Spec


@pytest.fixture(autouse=True)
def _loaded(library: Library) -> None:
    """The index is native."""


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


def test_fewer_accepted_than_asked_for_ends_it() -> None:
    served = Serving(2, min_accept=8)
    served.finish(*[ask("go", n_predict=200, id_slot=i) for i in range(2)])
    enough = served.plugin.effect  # 31 accepted, and 16 are asked for
    served = Serving(2, min_accept=8, draft_n_max=15)
    served.finish(*[ask("go", n_predict=200, id_slot=i) for i in range(2)])
    assert served.plugin.report["no_draft"]["too few accepted"] > 0
    assert served.plugin.effect < enough / 4


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
