"""POOL, SELECT and ATTN against float64 numpy, on the backend $LLAMAMG_TEST_BACKEND names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest
from numpy.typing import NDArray
from qsa_ops import BACKEND, TYPES, Floats, Ops, Rope, attention, check_list, scores, selected

from llamamg.library import Library

R = 4


@pytest.fixture(scope="session")
def ops(library: Library) -> Iterator[Ops]:
    if not library.patched:
        pytest.skip("the unpatched build has no QSA operations")
    ops = Ops(library)
    yield ops
    ops.close()


@pytest.fixture(scope="session")
def threaded(library: Library) -> Iterator[Ops]:
    if BACKEND != "CPU":
        pytest.skip("threads are a matter of the CPU backend")
    ops = Ops(library, n_threads=3)
    yield ops
    ops.close()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(4)


def normal(rng: np.random.Generator, *shape: int) -> Floats:
    return rng.standard_normal(shape, np.float32)


def cells_of(positions: list[tuple[int, int]], kv_size: int) -> NDArray[np.int64]:
    """Global cells of (stream, position) pairs."""
    return np.array([stream * kv_size + position for stream, position in positions], np.int64)


# ---- POOL ------------------------------------------------------------------------------------------------------------


def rope(n_rot: int, *, yarn: bool = False) -> Rope:
    return Rope(n_rot, 4096, 1e7, 0.25 if yarn else 1.0, 1.0 if yarn else 0.0, 1.0, 32.0, 1.0)


def pooled_reference(rows: NDArray[np.float64], gamma: Floats, block: int, rope: Rope) -> NDArray[np.float64]:
    mean = rows.mean(axis=0)
    x = mean / np.sqrt((mean**2).mean() + 1e-6) * gamma
    half = rope.n_rot // 2
    i = np.arange(half)
    angle = block * R * float(rope.freq_base) ** (-2.0 * i / rope.n_rot)
    magnitude = rope.attn_factor
    theta = rope.freq_scale * angle
    if rope.ext_factor:

        def dimension(beta: float) -> float:
            return rope.n_rot * np.log(rope.n_ctx_orig / (beta * 2 * np.pi)) / (2 * np.log(rope.freq_base))

        low, high = max(0, np.floor(dimension(rope.beta_fast))), min(rope.n_rot - 1, np.ceil(dimension(rope.beta_slow)))
        mix = (1 - np.clip((i - low) / max(0.001, high - low), 0, 1)) * rope.ext_factor
        theta = theta * (1 - mix) + angle * mix
        magnitude *= 1 + 0.1 * np.log(1 / rope.freq_scale)
    c, s = np.cos(theta) * magnitude, np.sin(theta) * magnitude
    a, b = x[:half], x[half : 2 * half]
    return np.concatenate([a * c - b * s, a * s + b * c, x[2 * half :]])


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("yarn", [False, True])
def test_pool_writes_the_ranges_and_nothing_else(ops: Ops, rng: np.random.Generator, kind: str, yarn: bool) -> None:
    d, kv_size, n_stream = 128, 256, 3
    raw = ops.store(normal(rng, kv_size * n_stream, d), kind)
    before, gamma = normal(rng, kv_size // R * n_stream, d), normal(rng, d)
    ranges = np.array([[2, 3, 64, 0], [0, 0, 1, 0], [1, 7, 7, 0]], np.int32)
    after = ops.pool(raw, before, gamma, ranges, R, kv_size, 1e-6, rope(64, yarn=yarn))
    written = np.zeros(len(before), bool)
    for stream, low, high, _ in ranges:
        for block in range(low, high):
            row = stream * (kv_size // R) + block
            written[row] = True
            cells = raw.values[stream * kv_size + block * R :][:R]
            assert np.abs(after[row] - pooled_reference(cells, gamma, block, rope(64, yarn=yarn))).max() < 1e-4
    assert written.sum() == 62
    assert (after[~written] == before[~written]).all()


def test_pool_at_large_positions(ops: Ops, rng: np.random.Generator) -> None:
    """The angle is an F32 product as everywhere in ggml: its error grows with the position, fastest in the first pair."""
    d, kv_size = 64, 262144
    raw, gamma = ops.store(normal(rng, kv_size, d), "F16"), normal(rng, d)
    block = kv_size // R - 1
    ranges = np.array([[0, block - 8, block + 1, 0]], np.int32)
    after = ops.pool(raw, np.zeros((kv_size // R, d), np.float32), gamma, ranges, R, kv_size, 1e-6, rope(64))
    error = np.abs(after[block] - pooled_reference(raw.values[block * R :][:R], gamma, block, rope(64)))
    assert error.max() < 5e-7 * kv_size
    assert error[[12, 20, 31, 44, 52, 63]].max() < 1e-2


def test_pool_does_not_depend_on_ranges_or_threads(ops: Ops, threaded: Ops, rng: np.random.Generator) -> None:
    d, kv_size = 128, 512
    raw, gamma = ops.store(normal(rng, kv_size, d), "Q8_0"), normal(rng, d)
    empty = np.zeros((kv_size // R, d), np.float32)
    whole = ops.pool(raw, empty, gamma, np.array([[0, 0, 128, 0]], np.int32), R, kv_size, 1e-6, rope(64))
    first = ops.pool(raw, empty, gamma, np.array([[0, 0, 53, 0]], np.int32), R, kv_size, 1e-6, rope(64))
    both = threaded.pool(raw, first, gamma, np.array([[0, 53, 128, 0]], np.int32), R, kv_size, 1e-6, rope(64))
    assert (both == whole).all()


# ---- SELECT ----------------------------------------------------------------------------------------------------------


def check_lists(
    ops: Ops, q: Floats, pooled: Floats, positions: list[tuple[int, int]], kv_size: int, n_top: int
) -> None:
    lists = ops.select(q, pooled, cells_of(positions, kv_size), R, kv_size, n_top)
    n_close = 0
    for t, (stream, position) in enumerate(positions):
        blocks = pooled[stream * (kv_size // R) :][: (position + 1) // R]
        n_close += check_list(lists[t], scores(q[t], blocks), n_top)
    print(f"{n_close} blocks too close to call")


@pytest.mark.parametrize("tail", [0, 1, 2, 3])
@pytest.mark.parametrize("n_blocks", [1, 511, 512, 513, 514, 1500])
def test_select_equals_float64(ops: Ops, rng: np.random.Generator, n_blocks: int, tail: int) -> None:
    q, pooled = normal(rng, 1, 4, 128), normal(rng, 2048, 128)
    check_lists(ops, q, pooled, [(0, n_blocks * R + tail - 1)], 8192, 512)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_select_without_a_complete_block(ops: Ops, rng: np.random.Generator, position: int) -> None:
    lists = ops.select(normal(rng, 1, 4, 128), normal(rng, 64, 128), np.array([position], np.int64), R, 256, 32)
    assert (lists == -1).all()


@pytest.mark.parametrize("n_tokens", [1, 9])
def test_select_over_65536_blocks(ops: Ops, rng: np.random.Generator, n_tokens: int) -> None:
    kv_size = 262144
    q, pooled = normal(rng, n_tokens, 4, 128), normal(rng, kv_size // R, 128)
    check_lists(ops, q, pooled, [(0, kv_size - n_tokens + t) for t in range(n_tokens)], kv_size, 512)


@pytest.mark.parametrize(("h", "d", "n_top", "r"), [(4, 128, 512, 4), (2, 64, 16, 4), (3, 8, 5, 2), (1, 72, 100, 16)])
@pytest.mark.parametrize("n_tokens", [1, 5, 70])
def test_select_of_integers_is_exact(
    ops: Ops, rng: np.random.Generator, h: int, d: int, n_top: int, r: int, n_tokens: int
) -> None:
    """Every score is a small integer: ties everywhere, and no rounding to hide behind."""
    kv_size = 1024 * r
    q = rng.integers(-2, 3, (n_tokens, h, d)).astype(np.float32)
    pooled = rng.integers(-2, 3, (2 * 1024, d)).astype(np.float32)
    positions = [(1, int(p)) for p in rng.integers(0, kv_size, n_tokens)]
    lists = ops.select(q, pooled, cells_of(positions, kv_size), r, kv_size, n_top)
    for t, (stream, position) in enumerate(positions):
        wanted = selected(scores(q[t], pooled[stream * 1024 :][: (position + 1) // r]), n_top)
        assert lists[t].tolist() == wanted.tolist() + [-1] * (n_top - len(wanted))


@pytest.mark.parametrize("case", ["equal", "negative", "huge", "nan", "infinite", "tiny"])
def test_select_of_adversarial_scores(ops: Ops, rng: np.random.Generator, case: str) -> None:
    kv_size, n_top, n = 8192, 512, 2000
    q, pooled = np.abs(normal(rng, 3, 4, 128)), np.abs(normal(rng, kv_size // R, 128))
    if case == "equal":
        pooled[:] = pooled[0]
    elif case == "negative":
        pooled *= -1
    elif case == "tiny":
        q, pooled = q * np.float32(1e-18), pooled * np.float32(1e-18)
    else:
        pooled[1234] = {"huge": 1e30, "nan": np.nan, "infinite": np.inf}[case]
    lists = ops.select(q, pooled, cells_of([(0, n * R + t) for t in range(3)], kv_size), R, kv_size, n_top)
    for t in range(3):
        assert len(lists[t]) == n_top
        assert (np.diff(lists[t]) > 0).all()
        if case in ("equal", "negative"):
            assert lists[t].tolist() == list(range(n_top))
        elif case == "tiny":
            check_list(lists[t], scores(q[t], pooled[: (n * R + t + 1) // R]), n_top)
        else:
            assert (1234 in lists[t]) == (case != "nan")


@pytest.mark.parametrize("n_streams", [1, 2, 3, 4, 5])
def test_select_of_streams_of_different_depth(ops: Ops, rng: np.random.Generator, n_streams: int) -> None:
    kv_size = 4096
    depths = [4093, 3, 513, 511, 2050][:n_streams]
    positions = [(stream, depth + t) for stream, depth in enumerate(depths) for t in range(3)]
    check_lists(ops, normal(rng, len(positions), 4, 128), normal(rng, 5 * kv_size // R, 128), positions, kv_size, 128)


def nearly_equal(rng: np.random.Generator, n_tokens: int, n_blocks: int) -> tuple[Floats, Floats]:
    """One query and blocks whose scores differ by rounding alone: any other order of accumulation reorders them."""
    q = np.broadcast_to(normal(rng, 1, 4, 1), (n_tokens, 4, 128)).copy()
    one = np.abs(normal(rng, 128))
    return q, np.stack([rng.permutation(one) for _ in range(n_blocks)])


def test_select_does_not_depend_on_the_ubatch(ops: Ops, rng: np.random.Generator) -> None:
    q, pooled = nearly_equal(rng, 130, 2048)
    idx = np.full(130, 8000, np.int64)
    many = ops.select(q, pooled, idx, R, 8192, 64)
    assert many[0].tolist() != list(range(64))
    assert (many == many[0]).all()
    for n in (1, 2, 8, 9, 64, 65):
        assert (ops.select(q[:n], pooled, idx[:n], R, 8192, 64) == many[:n]).all()


def test_select_does_not_depend_on_threads(ops: Ops, threaded: Ops, rng: np.random.Generator) -> None:
    q, pooled = nearly_equal(rng, 130, 2048)
    idx = np.full(130, 8001, np.int64)
    one = ops.select(q, pooled, idx, R, 8192, 64)
    for n in (1, 2, 3, 65, 130):
        assert (threaded.select(q[:n], pooled, idx[:n], R, 8192, 64) == one[:n]).all()


# ---- ATTN ------------------------------------------------------------------------------------------------------------


def random_lists(
    rng: np.random.Generator, positions: list[tuple[int, int]], kv_size: int, n_top: int
) -> tuple[NDArray[np.int32], list[NDArray[np.int64]]]:
    """Lists as SELECT writes them, and the cells they stand for."""
    lists = np.full((len(positions), n_top), -1, np.int32)
    cells = []
    for t, (stream, position) in enumerate(positions):
        n = (position + 1) // R
        listed = np.sort(rng.choice(n, min(n, n_top), replace=False)) if n else np.empty(0, np.int64)
        lists[t, : len(listed)] = listed
        own = [np.arange(b * R, b * R + R) for b in listed] + [np.arange(n * R, position + 1)]
        cells.append(stream * kv_size + np.concatenate(own).astype(np.int64))
    return lists, cells


def check_attention(
    ops: Ops, rng: np.random.Generator, kinds: tuple[str, str], shape: tuple[int, int, int], n_top: int, kv_size: int,
    positions: list[tuple[int, int]],
) -> None:  # fmt: skip
    n_head, n_kv_head, head_size = shape
    n_streams = max(stream for stream, _ in positions) + 1
    k = ops.store(normal(rng, kv_size * n_streams, n_kv_head * head_size), kinds[0])
    v = ops.store(normal(rng, kv_size * n_streams, n_kv_head * head_size), kinds[1])
    q = normal(rng, len(positions), n_head, head_size) * np.float32(2)
    scale = head_size**-0.5
    lists, cells = random_lists(rng, positions, kv_size, n_top)
    got = ops.attn(q, k, v, cells_of(positions, kv_size), lists, R, kv_size, scale)
    wanted = attention(q, k, v, cells, scale)
    error = (np.abs(got - wanted).max(axis=(1, 2)) / np.abs(wanted).max(axis=(1, 2))).max()
    print(f"{kinds}: largest relative error {error:.1e}")
    assert error < 1e-3


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("n_tokens", [1, 6])
def test_attention_of_every_cache_type(ops: Ops, rng: np.random.Generator, kind: str, n_tokens: int) -> None:
    check_attention(ops, rng, (kind, kind), (24, 2, 256), 512, 4096, [(0, 4090 + t) for t in range(n_tokens)])


@pytest.mark.parametrize("kinds", [("F16", "Q8_0"), ("Q8_0", "F16"), ("Q8_0", "Q4_0"), ("BF16", "F32")])
def test_attention_of_mixed_cache_types(ops: Ops, rng: np.random.Generator, kinds: tuple[str, str]) -> None:
    check_attention(ops, rng, kinds, (8, 2, 128), 64, 1024, [(1, 900), (0, 5), (0, 700)])


@pytest.mark.parametrize("shape", [(4, 2, 64), (24, 2, 256), (5, 1, 96), (7, 7, 32), (6, 2, 160)])
def test_attention_of_head_shapes(ops: Ops, rng: np.random.Generator, shape: tuple[int, int, int]) -> None:
    check_attention(ops, rng, ("Q8_0", "Q8_0"), shape, 16, 512, [(0, p) for p in (0, 1, 2, 3, 4, 62, 63, 64, 500, 511)])


@pytest.mark.parametrize("position", [0, 1, 2, 3, 4, 2046, 2047, 2048, 2049, 2050, 2051, 2052])
def test_attention_around_the_budget(ops: Ops, rng: np.random.Generator, position: int) -> None:
    check_attention(ops, rng, ("F16", "F16"), (12, 2, 64), 512, 4096, [(0, position)])


@pytest.mark.parametrize("n_streams", [2, 3, 4, 5])
def test_attention_of_streams_of_different_depth(ops: Ops, rng: np.random.Generator, n_streams: int) -> None:
    depths = [1000, 1, 66, 255, 513][:n_streams]
    positions = [(stream, depth + t) for stream, depth in enumerate(depths) for t in range(3)]
    check_attention(ops, rng, ("Q8_0", "Q8_0"), (4, 2, 64), 16, 1024, positions)


def test_attention_does_not_depend_on_threads(ops: Ops, threaded: Ops, rng: np.random.Generator) -> None:
    """Alone a token is cut into pieces that threads share; the sums are the same."""
    kv_size, n_top = 4096, 512
    k, v = (ops.store(normal(rng, kv_size, 128), "Q8_0") for _ in range(2))
    positions = [(0, 3000 + 7 * t) for t in range(9)]
    q, (lists, _), idx = (
        normal(rng, 9, 4, 64),
        random_lists(rng, positions, kv_size, n_top),
        cells_of(positions, kv_size),
    )
    one = ops.attn(q, k, v, idx, lists, R, kv_size, 0.125)
    assert (threaded.attn(q, k, v, idx, lists, R, kv_size, 0.125) == one).all()
    for run in (ops, threaded):
        assert (run.attn(q[:1], k, v, idx[:1], lists[:1], R, kv_size, 0.125) == one[:1]).all()


# ---- views -----------------------------------------------------------------------------------------------------------


def refused(ops: Ops, aligned: bool) -> AbstractContextManager[object]:
    """A device must leave to the CPU what its 16-byte loads cannot read; the CPU reads everything."""
    return nullcontext() if ops.name == "CPU" or aligned else pytest.raises(pytest.skip.Exception)


@pytest.mark.parametrize("padding", [(64, 0), (0, 64), (4, 4), (1, 3), (2, 0)])
def test_queries_inside_wider_rows(ops: Ops, rng: np.random.Generator, padding: tuple[int, int]) -> None:
    """As beside a gate: same bits as alone, and nothing around them is read."""
    kv_size, positions = 1024, [(0, 900), (0, 3), (0, 1000)]
    idx, aligned = cells_of(positions, kv_size), all(n % 4 == 0 for n in padding)
    q, pooled = normal(rng, 3, 4, 64), normal(rng, kv_size // R, 64)
    with refused(ops, aligned):
        lists = ops.select(q, pooled, idx, R, kv_size, 16, padding)
        assert (lists == ops.select(q, pooled, idx, R, kv_size, 16)).all()
    k, v = (ops.store(normal(rng, kv_size, 128), "F16") for _ in range(2))
    lists, _ = random_lists(rng, positions, kv_size, 16)
    with refused(ops, aligned):
        got = ops.attn(q, k, v, idx, lists, R, kv_size, 0.125, padding)
        assert (got == ops.attn(q, k, v, idx, lists, R, kv_size, 0.125)).all()


@pytest.mark.parametrize(("kind", "skip", "aligned"), [("F16", 3, True), ("Q8_0", 2, True), ("Q8_0", 1, False)])
def test_caches_that_are_views(ops: Ops, rng: np.random.Generator, kind: str, skip: int, aligned: bool) -> None:
    """Two heads of 64: rows of 256 bytes (F16) and 136 (Q8_0), so that one row ahead is not aligned to 16."""
    kv_size, positions = 512, [(0, 400), (0, 1), (0, 511)]
    idx = cells_of(positions, kv_size)
    k, v = (ops.store(normal(rng, kv_size, 128), kind) for _ in range(2))
    q, (lists, _) = normal(rng, 3, 4, 64), random_lists(rng, positions, kv_size, 16)
    with refused(ops, aligned):
        got = ops.attn(q, k, v, idx, lists, R, kv_size, 0.125, skip=skip)
        assert (got == ops.attn(q, k, v, idx, lists, R, kv_size, 0.125)).all()


# ---- shapes ----------------------------------------------------------------------------------------------------------

MODEL = {"r": 4, "n_top": 512, "d": 128, "h": 4, "n_rot": 64, "head_size": 256, "n_head": 24, "n_head_kv": 2}


@pytest.mark.parametrize(
    ("change", "fine"),
    [
        ({}, True),
        ({"r": 0}, False),
        ({"r": 3}, False),
        ({"r": 16}, True),
        ({"n_top": 0}, False),
        ({"n_top": 1025}, False),
        ({"d": 68}, False),
        ({"h": 0}, False),
        ({"n_rot": 130}, False),
        ({"head_size": 40}, False),
        ({"n_head_kv": 5}, False),
        ({"n_head_kv": 0}, False),
    ],
)
def test_shapes_the_operations_can_do(ops: Ops, change: dict[str, int], fine: bool) -> None:
    assert ops.base.qsa_shapes_ok(*{**MODEL, **change}.values()) is fine
