"""Parts of a split product are added up by other threads, in upstream's order: the rules of who adds up what, and bits.

The kernel itself takes a CUDA device: LLAMAMG_TEST_BACKEND=CUDA0, or `python tests/native/mmq_products.py CUDA0` for all
types. On the CPU the same tests compare the products with float64, and see that nothing is changed there.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from mmq_products import MAX_ERROR, SWITCH, Products, Shape

from llamamg import paths
from llamamg.library import Library

BACKEND = os.environ.get("LLAMAMG_TEST_BACKEND", "CPU")
Ask = Callable[[list[tuple[int, ...]]], list[str]]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """The rules of the header, compiled for the host."""
    program = tmp_path_factory.mktemp("mmq") / "host"
    source = Path(__file__).with_name("mmq_fixup_host.cpp")
    compiler = os.environ.get("CXX", "c++").split()
    subprocess.run([*compiler, "-std=c++17", "-O1", f"-I{paths.native() / 'src'}", source, "-o", program], check=True)

    def answers(cases: list[tuple[int, ...]]) -> list[str]:
        given = "\n".join(" ".join(map(str, case)) for case in cases)
        ran = subprocess.run([program], input=given, capture_output=True, text=True, check=True)
        return ran.stdout.split(".\n")[:-1]

    return answers


def split_tiles(n_tiles: int, n_inner: int, n_inner_step: int, n_ranges: int) -> dict[int, list[int]]:
    """Tiles that several ranges compute -> those but the last, backwards: by giving each range its blocks one by one."""
    begins = [r * n_tiles * n_inner // n_ranges for r in range(n_ranges + 1)]
    begins = [begin - begin % n_inner % n_inner_step for begin in begins]
    owners: dict[int, list[int]] = {}
    for r, (begin, end) in enumerate(pairwise(begins)):
        for tile in dict.fromkeys(block // n_inner for block in range(begin, end)):
            owners.setdefault(tile, []).append(r)
    return {tile: mine[-2::-1] for tile, mine in owners.items() if len(mine) > 1}


def some_cases() -> list[tuple[int, ...]]:
    chance = np.random.default_rng(1)
    cases = [(1, 1, 1, 1, 8, 8, 132), (1, 1, 1, 1, 1, 1, 132), (1, 1, 1, 200, 64, 8, 132), (2, 64, 1, 4, 3, 2, 7)]
    for _ in range(400):
        step = int(chance.choice([1, 2, 4, 8]))
        n_inner = step * int(chance.integers(1, 60)) + int(chance.integers(step)) * int(chance.random() < 0.2)
        sizes = (int(chance.integers(1, high)) for high in (4, chance.choice([2, 65]), 3, 20))
        cases.append((*sizes, n_inner, step, int(chance.choice([132, 114, 108, 16, 7]))))
    return cases


def test_every_split_tile_is_added_up_once_in_upstreams_order(ask: Ask) -> None:
    cases = some_cases()
    n_parts = 0
    for case, answer in zip(cases, ask(cases), strict=True):
        columns, channels, samples, rows, *rest = case
        n_inner, step, n_ranges = rest
        lines = [[int(word) for word in line.split()] for line in answer.splitlines()]
        wanted = split_tiles(columns * channels * samples * rows, n_inner, step, n_ranges)
        assert {tile: parts for tile, _, _, _, _, *parts in lines} == wanted, case
        assert len(lines) == len(wanted), "nothing is added up twice"
        for tile, row, column, channel, sample, *_ in lines:
            assert np.ravel_multi_index((row, sample, channel, column), (rows, samples, channels, columns)) == tile
        n_parts += sum(map(len, wanted.values()))
    assert n_parts > 10_000


@pytest.fixture(scope="module")
def products(library: Library) -> Iterator[Products]:
    assert SWITCH in {switch.name for switch in library.mg.switches()}, (
        "the build is older than patch 0018: run `llamamg build`"
    )
    products = Products(library, BACKEND)
    yield products
    products.close()


SHAPES = [
    Shape(512, 64, 9),
    Shape(1280, 100, 33),
    Shape(256, 128, 16, n_channels=2, n_samples=2, ratio=2),
    Shape(512, 96, 24, n_channels=8, n_used=2),
]
ODD = Shape(2080, 64, 40)  # no multiple of 256, the block of the K types


@pytest.mark.parametrize(
    ("kind", "shape"), [("Q8_0", ODD), *((kind, shape) for kind in ("Q8_0", "Q4_K", "Q6_K") for shape in SHAPES)]
)
def test_the_switch_changes_no_bit(products: Products, kind: str, shape: Shape) -> None:
    outcome = products.outcome(kind, shape)
    assert outcome is not None
    assert outcome.n_different == 0
    assert outcome.error < MAX_ERROR
    assert (outcome.n_fixups > 0) == BACKEND.startswith("CUDA")
