"""Drafts on a real hybrid: the state goes back by the context's own states or by a snapshot, across blocks of sparse attention.

The drafts are the model's own answer with wrong tokens at chosen places, so every kind of rejection happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamamg import Batch, Row, hookimpl
from llamamg.config import ContextConfig
from llamamg.errors import BatchError, LoadError
from llamamg.guard import Guard
from llamamg.layout import layout_of, n_ubatch
from llamamg.library import Library
from llamamg.plugins import plugin
from llamamg.replay import record, replay
from llamamg.request import Failed, Finished
from llamamg.testing import ask
from llamamg_plugins.qsa import Qsa

from .compacting import AlwaysCompact

EPSILON = 0.5  # nats; docs/guards.md
N_PROBS = 4  # a token that is not among so many is no tie
N_PREDICT = 48
WIDE = 12


@plugin(name="oracle", summary="", helps="", hurts="", guard=Guard.same_tokens())
class Oracle:
    """Knows the answer; each token whose place in it, divided by `every`, leaves `rest` is told wrong."""

    answer: tuple[int, ...] = ()
    every, rest, width = 1000, 0, 3
    verified: list[tuple[int, int]] = []  # noqa: RUF012 - emptied by each test
    on_draft: Callable[[Any], None] = staticmethod(lambda sequence: None)

    @hookimpl
    def draft(self, sequence: Any, limit: int) -> list[int]:
        at, cls = sequence.n_decoded, type(self)
        cls.on_draft(sequence)
        tokens = list(cls.answer[at : at + min(limit, cls.width)])
        return [t + 1 if (at + i) % cls.every == cls.rest else t for i, t in enumerate(tokens)]

    @hookimpl
    def draft_verified(self, sequence: Any, proposed: int, accepted: int) -> None:
        type(self).verified.append((proposed, accepted))


@pytest.fixture(autouse=True)
def _silent(library: Library) -> Iterator[None]:
    Oracle.answer, Oracle.verified, Oracle.on_draft = (), [], staticmethod(lambda sequence: None)
    yield
    if library.patched:
        library.mg.set_switch("qsa", 0)


def prompt_of(n: int, seed: int = 3) -> list[int]:
    return np.random.default_rng(seed).integers(1000, 5000, n).tolist()


def plain(engine: Any, n_prompt: int, n_predict: int = N_PREDICT) -> Finished:
    Oracle.answer = ()
    request = ask(
        prompt_of(n_prompt), temperature=0.0, ignore_eos=True, n_predict=n_predict, n_probs=N_PROBS, return_tokens=True,
        cache_prompt=False,
    )  # fmt: skip
    (end,) = engine.ask(request)
    assert isinstance(end, Finished), end
    return end


def drafted(engine: Any, expected: Finished, n_prompt: int, *, width: int, every: int, rest: int = 0) -> Finished:
    Oracle.answer, Oracle.width, Oracle.every, Oracle.rest, Oracle.verified = expected.tokens, width, every, rest, []
    request = ask(
        prompt_of(n_prompt), temperature=0.0, ignore_eos=True, n_predict=len(expected.tokens), return_tokens=True,
        cache_prompt=False,
    )  # fmt: skip
    (end,) = engine.ask(request)
    assert isinstance(end, Finished), end
    Oracle.answer = ()
    return end


def tie(off: Finished, on: Finished) -> int | None:
    """None when equal; the token where they part if the one that came is nearly as likely in the one-row run; else it fails."""
    at = next((i for i, (x, y) in enumerate(zip(off.tokens, on.tokens, strict=True)) if x != y), None)
    if at is None:
        return None
    behind = off.probs[at].prob - dict(off.probs[at].top)[on.tokens[at]]
    print(f"parted at token {at}, the one that came is {behind:.3f} nats behind")
    assert behind < EPSILON
    return at


@pytest.mark.parametrize("native", [False, True], ids=["upstream's graph", "native QSA"])
@pytest.mark.parametrize("n_rs_seq", [0, 3, 7])
def test_every_rejection_leaves_the_right_state(
    live: Callable[..., Any], library: Library, micro_model: Path, native: bool, n_rs_seq: int
) -> None:
    if native and not library.patched:
        pytest.skip("the unpatched build has no native QSA")
    plugins = (Oracle, Qsa) if native else (Oracle,)
    engine = live(micro_model, plugins=plugins, n_ctx=512, n_draft_max=WIDE, n_rs_seq=n_rs_seq)
    ties: set[tuple[int, int]] = set()
    kinds: set[str] = set()
    for n_prompt in (61, 64):  # the first drafted token begins, or does not begin, a block of four
        off = plain(engine, n_prompt)
        for width, every, rest in ((3, 1000, 999), (3, 4, 1), (7, 5, 0), (WIDE, 9, 2), (WIDE, 1, 0)):
            on = drafted(engine, off, n_prompt, width=width, every=every, rest=rest)
            if (at := tie(off, on)) is not None:
                ties.add((n_prompt, at))
            for proposed, accepted in Oracle.verified:
                kinds.add(
                    "all" if accepted == proposed else "direct" if proposed - accepted <= n_rs_seq else "snapshot"
                )
    print(f"ties (prompt, token): {ties}")
    assert len(ties) <= 1
    assert kinds == ({"all", "snapshot"} if n_rs_seq == 0 else {"all", "direct", "snapshot"})
    if native:
        assert next(view.effect for view in engine.engine.plugins.views() if view.name == "qsa") > 0


@pytest.mark.parametrize("n_rs_seq", [0, 4])
def test_the_same_batches_again_give_the_same_bits(live: Callable[..., Any], micro_model: Path, n_rs_seq: int) -> None:
    """Snapshots, their return and rows that compute again are in the recording too."""
    engine = live(micro_model, start=False, plugins=(Oracle,), n_ctx=512, n_draft_max=WIDE, n_rs_seq=n_rs_seq)
    recording = record(engine.engine)
    engine.engine.start()
    off = plain(engine, 30)
    drafted(engine, off, 30, width=WIDE, every=6)
    assert any(accepted < proposed for proposed, accepted in Oracle.verified)
    n_outputs, n_same, differences = replay(recording, None)
    assert (n_same, differences) == (n_outputs, [])


def test_two_sequences_of_which_one_drafts(live: Callable[..., Any], micro_model: Path) -> None:
    engine = live(
        micro_model, plugins=(Oracle,), n_ctx=1024, n_parallel=2, kv_unified=False, n_draft_max=WIDE, n_rs_seq=3
    )
    off = plain(engine, 40)
    Oracle.answer, Oracle.width, Oracle.every, Oracle.rest = off.tokens, WIDE, 7, 3
    fields: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "return_tokens": True, "cache_prompt": False}
    both = [ask(prompt_of(40), n_predict=N_PREDICT, id_slot=i, **fields) for i in range(2)]
    for end in engine.ask(*both):
        tie(off, end)


@pytest.mark.parametrize("n_rs_seq", [0, 7])
def test_a_cancel_while_a_draft_is_verified(live: Callable[..., Any], micro_model: Path, n_rs_seq: int) -> None:
    engine = live(micro_model, plugins=(Oracle,), n_ctx=512, n_draft_max=WIDE, n_rs_seq=n_rs_seq)
    off = plain(engine, 50)
    request = ask(prompt_of(50), temperature=0.0, ignore_eos=True, n_predict=N_PREDICT, cache_prompt=False)

    def cancel(sequence: Any) -> None:
        if sequence.n_decoded > 10 and sequence.request.id == request.id:
            engine.engine.cancel(request.id)  # arrives while this row is computed

    Oracle.on_draft = staticmethod(cancel)
    Oracle.answer, Oracle.width, Oracle.every, Oracle.rest = off.tokens, WIDE, 5, 2
    engine.engine.submit(request)
    engine.wait(lambda: bool(engine.of(request)))
    while engine.engine.call(lambda e: bool(e.scheduler.running)).result(60):
        pass
    assert not any(isinstance(event, Finished) for event in engine.of(request))
    tie(off, drafted(engine, off, 50, width=7, every=5))


@pytest.mark.parametrize("n_rs_seq", [0, 3, 7])
def test_a_verify_that_fails_half_way_is_taken_back(live: Callable[..., Any], micro_model: Path, n_rs_seq: int) -> None:
    """Part of the drafted tokens is in the memory when the library reports an error."""
    engine = live(micro_model, start=False, plugins=(Oracle,), n_ctx=512, n_draft_max=WIDE, n_rs_seq=n_rs_seq)
    runner = engine.engine.runner
    submit, failed = runner.submit, []

    def failing(batch: Any) -> None:
        (row,) = batch.rows
        if row.n_logits <= 1 or row.n_logits < len(row) or len(failed) == 3:
            submit(batch)
            return
        n = (4, 7, 12)[len(failed)]  # what goes back by itself, just so, or only by a snapshot
        failed.append(n)
        submit(Batch([Row(row.sequence, row.tokens[:n], row.pos0, 1)]))
        runner._llama.llama_synchronize(runner.context)
        runner._in_flight.pop()
        raise BatchError(-3, "a compute error")

    engine.engine.start()
    off = plain(engine, 50)
    runner.submit = failing
    tie(off, drafted(engine, off, 50, width=WIDE, every=9))
    assert failed == [4, 7, 12]
    assert engine.engine.stats.n_kv_retries == 3


@pytest.mark.parametrize("n_rs_seq", [0, 7])
def test_an_abort_while_a_draft_is_verified(
    live: Callable[..., Any], library: Library, micro_model: Path, n_rs_seq: int
) -> None:
    """The request ends with an error, and the next one in its slot is right."""
    engine = live(micro_model, plugins=(Oracle,), n_ctx=512, n_draft_max=WIDE, n_rs_seq=n_rs_seq)
    off = plain(engine, 50)
    request = ask(prompt_of(50), temperature=0.0, ignore_eos=True, n_predict=N_PREDICT, cache_prompt=False)
    runner = engine.engine.runner
    submit = runner.submit

    def aborting(batch: Any) -> None:
        if batch.rows[0].n_logits > 4:
            runner.abort()
        submit(batch)

    runner.submit = aborting
    Oracle.answer, Oracle.width, Oracle.every, Oracle.rest = off.tokens, WIDE, 5, 2
    (end,) = engine.ask(request)
    library.mg.lib.mg_abort_set(0)
    runner.submit = submit
    assert isinstance(end, Failed)
    assert end.message == "the computation was aborted"
    tie(off, drafted(engine, off, 50, width=WIDE, every=5))


def test_a_ubatch_too_small_for_the_states_is_refused(live: Callable[..., Any], micro_model: Path) -> None:
    with pytest.raises(LoadError, match="use -b and -ub 9 or more"):
        live(micro_model, n_ctx=512, n_rs_seq=7, n_ubatch=8)
    live(micro_model, n_ctx=512, n_rs_seq=7, n_ubatch=9)


def test_the_contexts_of_groups_have_room_for_the_states() -> None:
    config = ContextConfig(n_parallel=2, n_groups=2, n_prefill_slots=1, n_ubatch_decode=1, n_draft_max=7, n_rs_seq=7)
    layout = layout_of(config)
    assert [n_ubatch(config, layout, i) for i in range(3)] == [9, 9, 512]


def test_a_sequence_that_has_to_go_back_is_moved_only_afterwards(live: Callable[..., Any], micro_model: Path) -> None:
    """The second of three ends between rejections of the others: seq-compact moves the third into its place."""
    options = {"n_ctx": 3 * 512, "n_parallel": 3, "kv_unified": False, "n_draft_max": WIDE, "n_rs_seq": 7}
    engine = live(micro_model, plugins=(Oracle, AlwaysCompact), **options)
    off = plain(engine, 40)
    Oracle.answer, Oracle.width, Oracle.every, Oracle.rest = off.tokens, 5, 2, 1
    fields: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "return_tokens": True, "cache_prompt": False}
    requests = [ask(prompt_of(40), n_predict=n, id_slot=i, **fields) for i, n in enumerate((N_PREDICT, 9, N_PREDICT))]
    ends = engine.ask(*requests)
    assert engine.engine.stats.n_moves > 0
    assert all(accepted < proposed for proposed, accepted in Oracle.verified[2:-4])
    for i in (0, 2):
        tie(off, ends[i])
