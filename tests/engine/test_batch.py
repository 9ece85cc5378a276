"""Rows, batches and plans: nothing may get lost when they are cut or rearranged."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from llamamg.batch import Batch, Plan, PlanError, Row


def row(n: int, pos0: int = 0, n_logits: int = 0, sequence: Any = None) -> Row:
    return Row(sequence or SimpleNamespace(), list(range(pos0, pos0 + n)), pos0, n_logits)


def test_sizes_and_whether_anything_is_sampled() -> None:
    assert Batch([row(3), row(4, n_logits=1)]).n_tokens == 7
    assert Batch([row(3), row(4, n_logits=1)]).has_logits
    assert not Batch([row(3)]).has_logits


@pytest.mark.parametrize("seed", range(100))
def test_halves_hold_every_token_once_in_order_with_its_logits(seed: int) -> None:
    rng = random.Random(seed)
    rows = []
    for _ in range(rng.randrange(1, 6)):
        n = rng.randrange(1, 9)
        rows.append(row(n, rng.randrange(50), rng.choice((0, 1, n))))
    batch = Batch(list(rows), group=3, switches={"x": 1})
    if batch.n_tokens < 2:
        return
    head, tail = batch.halves()
    for original in rows:
        parts = [part for half in (head, tail) for part in half.rows if part.sequence is original.sequence]
        assert [token for part in parts for token in part.tokens] == list(original.tokens)
        assert sum(part.n_logits for part in parts) == original.n_logits
        assert parts[-1].n_logits == original.n_logits  # outputs of a row stay together: a draft is verified in one go
        assert [part.pos0 for part in parts] == [part.tokens[0] for part in parts]
    assert (head.group, tail.group, head.switches) == (3, 3, {"x": 1})
    assert head.n_tokens + tail.n_tokens == batch.n_tokens


def test_a_long_row_is_cut_in_the_middle() -> None:
    head, tail = Batch([row(9, n_logits=1)]).halves()
    assert (head.n_tokens, tail.n_tokens) == (4, 5)
    assert (head.rows[0].n_logits, tail.rows[0].n_logits) == (0, 1)


def test_a_draft_is_never_cut() -> None:
    head, tail = Batch([row(4, n_logits=4)]).halves()
    assert (len(head.rows), len(tail.rows)) == (0, 1)


def plan_of(*sizes: int) -> tuple[Plan, list[Row]]:
    rows = [row(n) for n in sizes]
    return Plan([Batch(list(rows))]).seal(), rows


def test_split_move_and_reorder_pass_the_check() -> None:
    plan, (a, b, c) = plan_of(1, 2, 3)
    first, second = plan.split(plan.batches[0], [[a], [], [b, c]])
    assert [batch.rows for batch in plan.batches] == [[a], [b, c]]
    plan.reorder(second, key=lambda r: -len(r))
    assert second.rows == [c, b]
    plan.check(5)
    plan.move(a, second)
    assert plan.batches == [second]
    assert second.rows == [c, b, a]
    plan.check(6)
    assert first.rows == []


def test_split_keeps_group_and_copies_switches() -> None:
    plan, (a, b) = plan_of(1, 1)
    plan.batches[0].switches["x"] = 1
    one, two = plan.split(plan.batches[0], [[a], [b]])
    one.switches["x"] = 2
    assert two.switches == {"x": 1}


@pytest.mark.parametrize(
    "how", ["lost", "twice", "added", "replaced", "fewer tokens", "other tokens", "position", "outputs", "too large"]
)
def test_check_refuses(how: str) -> None:
    plan, (a, b) = plan_of(1, 2)
    batch = plan.batches[0]
    n_batch = 8
    match how:
        case "lost":
            batch.rows.remove(a)
        case "twice":
            plan.batches.append(Batch([a]))
        case "added":
            batch.rows.append(row(1))
        case "replaced":
            batch.rows[0] = row(1)
        case "fewer tokens":
            b.tokens = [1]
        case "other tokens":
            b.tokens = [7, 7]
        case "position":
            b.pos0 += 1
        case "outputs":
            b.n_logits = 2
        case "too large":
            n_batch = 2
    with pytest.raises(PlanError):
        plan.check(n_batch)
