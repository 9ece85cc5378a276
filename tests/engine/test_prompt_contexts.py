"""Which contexts are made to leave room on a device, and that a device without SMs computes as before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llamamg import contexts, native_count, set_switch
from llamamg.errors import LoadError
from llamamg.library import Library
from llamamg.testing import ask

SWITCHES = ("prefill-stream", "stream-priority", "one-copy")
LAYOUT: dict[str, Any] = {"n_ctx": 1024, "n_parallel": 2, "n_groups": 2, "n_prefill_slots": 1, "n_ubatch_decode": 8}


def values(library: Library) -> tuple[int, ...]:
    return tuple(library.mg.switch(name) for name in SWITCHES)


@pytest.mark.parametrize(
    ("options", "made_with"),
    [
        ({"n_parallel": 2}, [(0, 0, 0)]),
        ({"n_ctx": 1024, "n_parallel": 2, "n_groups": 2}, [(0, 0, 0)] * 2),
        (LAYOUT, [(0, 1, 1)] * 2 + [(1, 0, 0)]),
    ],
)
def test_only_the_context_for_prompts_is_made_with_the_switch(
    live: Callable[..., Any],
    library: Library,
    micro_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    made_with: list[tuple[int, ...]],
) -> None:
    if not library.patched:
        pytest.skip("the build under test is the unpatched one")
    seen, make = [], contexts.new_context

    def new_context(*args: Any) -> Any:
        seen.append(values(library))
        return make(*args)

    monkeypatch.setattr(contexts, "new_context", new_context)
    live(micro_model, **options)
    assert seen == made_with
    assert values(library) == (0, 0, 0)


def test_it_changes_nothing_on_a_cpu(live: Callable[..., Any], library: Library, smol_model: Path) -> None:
    if not library.patched:
        pytest.skip("the build under test is the unpatched one")
    made = live(smol_model, **LAYOUT)
    prompt = list(range(1000, 1100))
    n_before = native_count("limited")

    def answer() -> list[int]:
        request = ask(prompt, temperature=0.0, n_predict=8, return_tokens=True, cache_prompt=False, ignore_eos=True)
        return list(made.tokens(request)[0])

    whole = answer()
    try:
        assert set_switch("prefill-sms", 96)
        assert answer() == whole
    finally:
        set_switch("prefill-sms", 0)
    assert len(whole) == 8
    assert native_count("limited") == n_before
    assert not set_switch("no-such-switch", 1)


@pytest.mark.parametrize(("options", "n_made"), [({"n_parallel": 2}, 0), (LAYOUT, 2)])
def test_a_context_that_cannot_be_made_says_what_can_be_left_out(
    live: Callable[..., Any], micro_model: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], n_made: int
) -> None:
    """The last one of several: those before it are freed, and the sentence names the plugin that made them."""
    made: list[Any] = []
    real = contexts._one

    def one(*arguments: Any) -> Any:
        if len(made) == n_made:
            raise LoadError("no context could be made")
        made.append(real(*arguments))
        return made[-1]

    monkeypatch.setattr(contexts, "_one", one)
    with pytest.raises(LoadError, match="no context could be made") as raised:
        live(micro_model, **options)
    assert ("--disable decode-groups): it makes 3 contexts" in str(raised.value)) is (n_made > 0)
    assert all(runner.context is None for runner, _ in made)
