"""Sides of a grid by name and by address, their flags, and what is said where they cannot be compared."""

from __future__ import annotations

import pytest
from llamamg_benches import grid_sides
from llamamg_benches.errors import BenchError

from .grid_doubles import FakeServer


def test_sides_by_name_and_by_address() -> None:
    sides = grid_sides.parse(["off", "theirs=http://10.0.0.1:8080/"], None)
    assert [(side.name, side.url) for side in sides] == [("off", None), ("theirs", "http://10.0.0.1:8080")]
    assert [side.name for side in grid_sides.parse([], None)] == ["ours", "off", "upstream"]


@pytest.mark.parametrize("text", ["mine", "x=10.0.0.1", "=http://h:1", "x=ftp://h", "x=http://h:99999", "x=http://h:p"])
def test_a_side_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BenchError, match="--side"):
        grid_sides.parse([text], None)


def test_two_sides_with_one_name_are_refused() -> None:
    with pytest.raises(BenchError, match="name of its own"):
        grid_sides.parse(["off", "off"], None)


def test_flags_have_room_for_the_deepest_cell_and_what_is_given_counts() -> None:
    flags = grid_sides.serve_flags(["-t", "1"], 5, 5130)
    assert int(flags[flags.index("-c") + 1]) // 5 >= 5130 + grid_sides.SPARE_TOKENS
    assert grid_sides.serve_flags(["-c", "99", "-np", "2", "-cram", "1"], 5, 5130) == [
        "-c",
        "99",
        "-np",
        "2",
        "-cram",
        "1",
    ]


def test_another_ubatch_takes_the_batch_along() -> None:
    assert grid_sides.with_ubatch(["-ub", "512", "-b", "1024", "-t", "1"], 4096) == [
        "-t",
        "1",
        "-b",
        "4096",
        "-ub",
        "4096",
    ]
    assert grid_sides.with_ubatch([], 256) == ["-b", "2048", "-ub", "256"]
    assert grid_sides.ubatch_of(["-ub", "256", "-t", "1"]) == 256
    assert grid_sides.ubatch_of(["-t", "1"]) == 512


def test_depth_beyond_the_context_is_said() -> None:
    with pytest.raises(BenchError, match="4096 tokens of context per slot"):
        grid_sides.Checks(5, 5000).check(FakeServer("a"))


def test_too_few_slots_are_said() -> None:
    with pytest.raises(BenchError, match="-np 6"):
        grid_sides.Checks(6, 100).check(FakeServer("a"))


def test_different_models_are_said() -> None:
    checks = grid_sides.Checks(1, 100)
    for server in (FakeServer("a", n_params=5), FakeServer("b"), FakeServer("c", n_params=5)):
        checks.check(server)
    with pytest.raises(BenchError, match=r"different models \(n_params: a 5, d 6\)"):
        checks.check(FakeServer("d", n_params=6))
