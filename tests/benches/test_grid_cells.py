"""Which cells a grid has, in which order, and which of them a limited time leaves out."""

from __future__ import annotations

import pytest
from llamamg_benches import grid_cells
from llamamg_benches.errors import BenchError
from llamamg_benches.grid_cells import Budget, Cell, cells, parse_depths

from .grid_doubles import Clock


def test_depths_are_tokens_in_order_without_doubles() -> None:
    assert parse_depths("50k,5k,1500, 5000") == [1500, 5000, 50_000]


@pytest.mark.parametrize("text", ["", "5x", "0", "-5", "1", "5k,"])
def test_a_list_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(BenchError, match="--depths"):
        parse_depths(text)


def test_every_cell_comes_once_and_before_its_repeat() -> None:
    order = cells([1, 5], [5000, 50_000, 250_000], 2)
    assert len(order) == len(set(order)) == 12
    assert order[0] == Cell(1, 5000)
    assert order[-1] == Cell(5, 250_000, 1)
    for cell in order:
        if cell.repeat:
            assert order.index(Cell(cell.n_sessions, cell.depth)) < order.index(cell)
    # Short cells are repeated before the deep ones begin, or a limited time would give single measurements only.
    assert order.index(Cell(1, 5000, 1)) < order.index(Cell(1, 250_000))
    assert order.index(Cell(5, 5000, 1)) < order.index(Cell(5, 50_000))


def test_copied_cells_follow_what_they_are_copies_of() -> None:
    order = cells([1, 5], [5000, 50_000, 150_000], 1, copy_from=50_000)
    assert [(c.n_sessions, c.depth, c.is_copied) for c in order] == [
        (1, 5000, False), (5, 5000, False), (1, 50_000, False), (5, 50_000, True), (1, 150_000, False), (5, 150_000, True),
    ]  # fmt: skip
    budget = Budget(None, Clock())
    budget.took(order[4], 100)
    assert budget.estimate_s(order[5]) < 50


def test_a_cell_that_would_not_fit_is_left_out_and_a_cheaper_one_is_not() -> None:
    clock = Clock()
    budget = Budget(10, clock)
    assert budget.refuses(Cell(5, 250_000)) is None  # nothing is known yet
    clock.now = 60
    budget.took(Cell(1, 50_000), 60)
    assert "540 s were left" in str(budget.refuses(Cell(5, 250_000)))
    assert budget.refuses(Cell(1, 150_000)) is None
    assert budget.refuses(Cell(1, 5000)) is None
    clock.now = 601
    assert budget.refuses(Cell(1, 5000)) == "the time was up"


def test_a_repeat_is_expected_to_take_what_the_cell_took() -> None:
    budget = Budget(None, Clock())
    budget.took(Cell(1, 5000), 10)
    budget.took(Cell(1, 50_000), 50)
    assert budget.estimate_s(Cell(1, 5000, 1)) == pytest.approx(10 * grid_cells.MARGIN)
