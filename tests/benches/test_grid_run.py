"""A run of the grid whose servers are names: orders, limited times, failures, the best ubatch."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from llamamg_benches import grid_run, grid_sides, grid_table
from llamamg_benches.errors import BenchError
from llamamg_benches.grid_cells import Budget, Cell, cells
from llamamg_benches.grid_prompts import Prompts
from llamamg_benches.grid_watch import Nvml
from llamamg_benches.sides import SideError

from .grid_doubles import Bar, Clock, FakeServer


def test_different_models_are_said_of_sides_that_run_one_after_the_other() -> None:
    def side(name: str, n_params: int) -> Any:
        return types.SimpleNamespace(name=name, url=None, server=lambda *_: FakeServer(name, n_params=n_params))

    state = grid_run.Run(Path(), [], 8, 1, False, grid_sides.Checks(1, 100), Budget(None), Nvml(), Bar())
    with state.started([side("a", 5)], []), state.started([side("b", 5)], []):
        pass
    with pytest.raises(BenchError, match="different models"), state.started([side("c", 6)], []):
        pytest.fail("it would be measured")


def test_a_cell_that_fails_is_left_out_and_what_was_measured_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first failure of all ends the run: then the command line is wrong and not the cell."""

    def fail(*_: Any) -> dict[str, Any]:
        raise SideError("it broke off")

    side, server = grid_sides.parse(["x=http://127.0.0.1:1"], None)[0], FakeServer("x")
    state = grid_run.Run(Path(), [], 8, 1, False, grid_sides.Checks(1, 100), Budget(None), Nvml(), Bar())
    monkeypatch.setattr(grid_run, "measure", fail)
    with pytest.raises(SideError):
        state.measure(side, server, Prompts(1, 1000), Cell(1, 64), [], "same flags")
    monkeypatch.setattr(grid_run, "measure", lambda *_: {})
    state.measure(side, server, Prompts(1, 1000), Cell(1, 64), [], "same flags")
    monkeypatch.setattr(grid_run, "measure", fail)
    state.measure(side, server, Prompts(1, 1000), Cell(1, 128), [], "same flags")
    assert [row["depth"] for row in state.rows] == [64]
    assert state.left_out[0]["reason"] == "failed: it broke off"
    assert state.n_failed == 1


@dataclass
class Played:
    """A run whose servers are names and whose measurements take the time that they are told to."""

    state: grid_run.Run
    clock: Clock
    starts: list[tuple[str, int]]
    order: list[tuple[str, Cell]]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Played]:
    """`played(minutes)`: prefill takes 1 ms a token, twice that on side b; -ub 256 is best for a and 64 for b."""

    def make(minutes: float | None) -> Played:
        clock = Clock()
        checks = grid_sides.Checks(1, 100)
        state = grid_run.Run(Path(), ["-ub", "128"], 8, 1, False, checks, Budget(minutes, clock), Nvml(), Bar())
        run = Played(state, clock, [], [])

        @contextlib.contextmanager
        def started(sides: Any, flags: Any) -> Any:
            run.starts += [(side.name, grid_sides.ubatch_of(flags)) for side in sides]
            servers = [(side, FakeServer(side.name)) for side in sides]
            for _, server in servers:
                server.flags = flags  # type: ignore[attr-defined]
            yield servers

        def measure(server: Any, cell: Cell, *_: Any) -> dict[str, Any]:
            run.order.append((server.name, cell))
            clock.now += cell.n_sessions * cell.depth * (0.002 if server.name == "b" else 0.001)
            best = 64 if server.name == "b" else 256
            return {"prefill": {"tps": 1000.0 - abs(grid_sides.ubatch_of(server.flags) - best)}}

        monkeypatch.setattr(grid_run.Run, "started", lambda self, sides, flags: started(sides, flags))
        monkeypatch.setattr(grid_run, "measure", measure)
        monkeypatch.setattr(grid_run, "warm_up", lambda *_: None)
        monkeypatch.setattr(grid_run, "Budget", lambda minutes: Budget(minutes, clock))
        monkeypatch.setattr(grid_run.time, "monotonic", clock)
        return run

    return make


def two_sides() -> list[grid_sides.Side]:
    return [grid_sides.Side("a", "a"), grid_sides.Side("b", "b")]


def test_loaded_together_each_kind_of_cell_has_both_orders(played: Any) -> None:
    run = played(None)
    grid_run.together(run.state, two_sides(), cells([1], [1000, 3000], 2))
    firsts: dict[int, list[str]] = {}
    for (name, cell), (_, again) in zip(run.order[::2], run.order[1::2], strict=True):
        assert cell == again
        firsts.setdefault(cell.depth, []).append(name)
    assert {depth: sorted(names) for depth, names in firsts.items()} == {1000: ["a", "b"], 3000: ["a", "b"]}
    assert run.starts == [("a", 128), ("b", 128)]


def test_one_at_a_time_the_order_of_the_sides_turns(played: Any) -> None:
    run = played(None)
    grid_run.one_by_one(run.state, two_sides(), cells([1], [1000], 2), None, 2)
    assert [name for name, _ in run.starts] == ["a", "b", "b", "a"]
    assert run.state.left_out == []


def test_a_limited_time_is_kept_and_what_was_left_out_is_said(played: Any) -> None:
    every = cells([1], [1000, 10_000, 100_000], 2)
    for measure_all in (
        lambda run: grid_run.together(run.state, two_sides(), every),
        lambda run: grid_run.one_by_one(run.state, two_sides(), every, 2.0, 2),
    ):
        run = played(2.0)
        measure_all(run)
        assert run.clock.now <= 125
        assert {c["depth"] for c in run.state.left_out} >= {100_000}
        assert all(c["reason"] for c in run.state.left_out)
        assert {(r["side"], r["depth"]) for r in run.state.rows} >= {("a", 1000), ("b", 1000)}


def test_each_side_is_measured_again_with_its_own_best_ubatch(played: Any) -> None:
    run = played(None)
    chosen = grid_run.best_ubatch(run.state, two_sides(), [64, 256], cells([1], [1000, 3000], 2))
    assert {name: c["best"] for name, c in chosen.items()} == {"a": 256, "b": 64}
    best = [(r["side"], r["depth"], r["ubatch"]) for r in run.state.rows if r["kind"] == grid_table.BEST]
    assert best == [("a", 1000, 256), ("a", 3000, 256), ("b", 1000, 64), ("b", 3000, 64)]


def test_a_ubatch_that_fails_is_not_chosen(played: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run, plain = played(None), grid_run.measure
    grid_run.together(run.state, two_sides(), cells([1], [1000], 1))  # rows that are none of the probes

    def measure(server: Any, *rest: Any) -> dict[str, Any]:
        if server.name == "a" or grid_sides.ubatch_of(server.flags) == 64:
            raise SideError("no memory")
        return plain(server, *rest)

    monkeypatch.setattr(grid_run, "measure", measure)
    chosen = grid_run.best_ubatch(run.state, two_sides(), [64, 256], cells([1], [1000], 1))
    assert {name: (c["best"], list(c["prefill_tps"])) for name, c in chosen.items()} == {"b": (256, ["256"])}
    assert {c["side"] for c in run.state.left_out} == {"a", "b"}


def test_a_copied_cell_is_left_out_where_its_session_was(played: Any) -> None:
    run = played(None)
    run.state.copy_from = 1000
    grid_run.together(run.state, two_sides()[:1], cells([1, 5], [1000], 1, copy_from=1000)[1:])
    assert run.order == []
    assert "was not measured" in run.state.left_out[0]["reason"]
