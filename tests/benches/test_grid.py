"""The grid: order and budget of cells, rates of a cell, prompts, sides and their errors; and once against a real server."""

from __future__ import annotations

import contextlib
import json
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llamamg_benches import grid, grid_cells, grid_sides, grid_table, grid_watch
from llamamg_benches.client import Answer
from llamamg_benches.errors import BenchError
from llamamg_benches.grid_cells import Budget, Cell, cells, parse_depths
from llamamg_benches.grid_measure import Stream, generate_row, prefill_row, stream_of, token_gaps
from llamamg_benches.grid_prompts import Prompts
from llamamg_benches.grid_watch import PAGE, Nvml, Watch, rss_mib, session_pids
from llamamg_benches.program import run_module
from llamamg_benches.sides import Server, SideError

from llamamg import paths


class Clock:
    """Time that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# -- which cells


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


# -- what a cell says


def answer(t_sent: float, stamps: list[float], n_prompt: int = 0, events: tuple[bytes, ...] = ()) -> Answer:
    final = {"timings": {"prompt_n": n_prompt, "prompt_per_second": 1.0}}
    return Answer(t_sent, np.array(stamps), (stamps or [t_sent])[-1] + 0.5, final, events)


def test_prefill_together_and_for_each_session() -> None:
    row = prefill_row([answer(10.0, [12.0], 1000), answer(10.0, [14.0], 1000)])
    assert row["tps"] == pytest.approx(2000 / 4)
    assert row["slot_tps"] == pytest.approx((1000 / 2 + 1000 / 4) / 2)
    assert row["ttft_ms"] == [2000.0, 4000.0]


def test_a_first_token_without_an_event_of_its_own_counts_at_the_end() -> None:
    assert prefill_row([answer(1.0, [], 100)])["ttft_ms"] == [500.0]


def test_prefill_without_a_count_of_tokens_is_no_measurement() -> None:
    with pytest.raises(SideError, match="prompt_n"):
        prefill_row([answer(0.0, [1.0], 0)])


def test_generation_counts_only_while_all_sessions_decode() -> None:
    early = Stream(np.array([0.0, 1.0, 2.0, 3.0]), np.array([1, 2, 3, 4]))
    late = Stream(np.array([1.5, 2.5, 3.5, 4.5]), np.array([1, 2, 3, 4]))
    row = generate_row([early, late])
    assert row["window_s"] == pytest.approx(1.5)
    assert row["n_tokens"] == 3  # 2.0 and 3.0 of the first, 2.5 of the second
    assert row["tps"] == pytest.approx(2.0)
    assert row["slot_tps"] == pytest.approx(1.0)
    assert row["itl_ms"]["max"] == pytest.approx(1000)


def test_latencies_are_percentiles_of_all_gaps() -> None:
    gaps = np.arange(1, 102) / 1000  # 1 to 101 ms
    stamps = np.concatenate([[0.0], np.cumsum(gaps)])
    itl = generate_row([Stream(stamps, np.arange(1, len(stamps) + 1))])["itl_ms"]
    assert itl == {key: pytest.approx(ms) for key, ms in (("p50", 51.0), ("p90", 91.0), ("p99", 100.0), ("max", 101.0))}


def test_sessions_that_never_decode_together_are_an_error() -> None:
    with pytest.raises(SideError, match="--n-predict"):
        generate_row([Stream(np.array([0.0, 1.0]), np.array([1, 2])), Stream(np.array([2.0, 3.0]), np.array([1, 2]))])


def test_an_event_with_several_tokens_counts_them_all() -> None:
    events = tuple(json.dumps({"tokens_predicted": n}).replace(" ", "").encode() for n in (1, 4))
    stream = stream_of(answer(0.0, [1.0, 1.3], events=events))
    assert stream.counts.tolist() == [1, 4]
    assert token_gaps(stream, 1.0, 1.3) == pytest.approx([100.0] * 3)
    assert generate_row([stream])["n_tokens"] == 3


def test_a_server_that_does_not_count_sends_one_token_an_event() -> None:
    assert stream_of(answer(0.0, [1.0, 2.0], events=(b"{}", b"{}"))).counts.tolist() == [1, 2]


# -- prompts


def test_prompts_are_alike_on_all_sides_and_new_for_every_run() -> None:
    a, b = Prompts(1, 50_000), Prompts(1, 50_000)
    assert a.make(0, 300, 0) == b.make(0, 300, 0)
    assert len(a.make(0, 300, 0)) == 300
    different = [a.make(*key) for key in ((0, 300, 0), (1, 300, 0), (0, 300, 1))] + [Prompts(2, 50_000).make(0, 300, 0)]
    assert len({tuple(prompt[:2]) for prompt in different}) == 4  # not even a common beginning
    assert max(max(prompt) for prompt in different) < 50_000


def test_the_second_prompt_only_adds() -> None:
    ids, words = Prompts(1, 1000).make(0, 50, 0), Prompts(1, None).make(0, 50, 0)
    assert Prompts(1, 1000).longer(ids)[:-1] == ids
    assert str(Prompts(1, None).longer(words)).startswith(str(words))
    assert len(str(words).split()) == 50


# -- sides


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


class Bar:
    def update(self, n: int) -> None: ...
    def set_postfix_str(self, text: str) -> None: ...


class FakeServer(Server):
    """Answers from a dictionary."""

    def __init__(self, name: str, n_ctx: int = 4096, n_slots: int = 5, **meta: int) -> None:
        super().__init__(name, "http://127.0.0.1:1")
        self.answers: dict[str, Any] = {
            "/health": {"status": "ok"},
            "/props": {"default_generation_settings": {"n_ctx": n_ctx}, "total_slots": n_slots},
            "/v1/models": {"data": [{"meta": {"n_vocab": 1000, **meta}}]},
        }

    def get(self, path: str) -> Any:
        return self.answers[path]


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


def test_different_models_are_said_of_sides_that_run_one_after_the_other() -> None:
    def side(name: str, n_params: int) -> Any:
        return types.SimpleNamespace(name=name, url=None, server=lambda *_: FakeServer(name, n_params=n_params))

    state = grid.Run(Path(), [], 8, 1, False, grid_sides.Checks(1, 100), Budget(None), grid.Nvml(), Bar())
    with state.started([side("a", 5)], []), state.started([side("b", 5)], []):
        pass
    with pytest.raises(BenchError, match="different models"), state.started([side("c", 6)], []):
        pytest.fail("it would be measured")


# -- memory


def test_memory_of_a_process_and_what_it_started(tmp_path: Path) -> None:
    for pid, session, pages in ((10, 10, 300), (11, 10, 200), (12, 9, 700)):
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "stat").write_text(f"{pid} (a) b) S 1 {session} {session} 0")
        (folder / "statm").write_text(f"9999 {pages} 1")
    pids = session_pids(10, tmp_path)
    assert sorted(pids) == [10, 11]
    assert rss_mib(pids, tmp_path) == round(500 * PAGE / 2**20, 1)
    assert rss_mib([77], tmp_path) is None


class FakeNvml(types.ModuleType):
    """One GPU that does not count PCIe traffic; process 10 has memory on it and 99 is somebody else's."""

    class NVMLError(Exception):
        """As in the real one."""

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return types.SimpleNamespace(gpu=80)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return types.SimpleNamespace(used=3000 << 20)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> Any:
        return [types.SimpleNamespace(pid=pid, usedGpuMemory=mib << 20) for pid, mib in ((10, 2000), (99, 500))]

    counts_pcie = False

    def nvmlDeviceGetPcieThroughput(self, handle: int, counter: int) -> int:
        if not self.counts_pcie:
            raise self.NVMLError
        return 1_000_000 if counter else 2_000_000  # KiB/s; 1 is NVML_PCIE_UTIL_RX_BYTES


def test_gpus_are_sampled_while_a_phase_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml("pynvml"))
    monkeypatch.setattr(grid_watch, "session_pids", lambda pid: [10])
    monkeypatch.setattr(grid_watch, "PERIOD_S", 0.01)
    with Watch(10, Nvml()).phase() as seen:
        deadline = time.monotonic() + 10
        while len(seen.devices[0].get("gpu_percent", [])) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    [device] = seen.summary()["devices"]
    assert device["gpu_percent"] == {"mean": 80.0, "max": 80.0}
    assert device["memory_mib"]["max"] == 3000.0
    assert device["process_memory_mib"]["max"] == 2000.0
    assert "pcie_rx_mb_s" not in device


def test_pcie_traffic_is_read_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    module = FakeNvml("pynvml")
    module.counts_pcie = True
    monkeypatch.setitem(sys.modules, "pynvml", module)
    found = Nvml().sample(0, {10})
    assert (found["pcie_rx_mb_s"], found["pcie_tx_mb_s"]) == (1024.0, 2048.0)


def test_without_the_package_nothing_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with Watch(-1, Nvml()).phase() as seen:
        pass
    assert seen.summary() == {"host_rss_mib": None, "devices": []}


# -- the command


def command(*arguments: str) -> int:
    return run_module(grid, list(arguments), "llamamg bench grid")


def test_an_unreachable_server_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from llamamg_benches.record import free_port

    status = command("--side", f"x=http://127.0.0.1:{free_port()}", "--depths", "64", "--results", str(tmp_path))
    assert status == 1
    assert "is the server running there?" in capsys.readouterr().err
    assert list(tmp_path.glob("*/*")) == []  # nothing half-written


def test_a_missing_model_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--side", "off", "-m", str(tmp_path / "no.gguf"), "--results", str(tmp_path)) == 1
    assert "give a model with -m" in capsys.readouterr().err


def test_ctrl_c_in_the_middle_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, micro_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(grid, "one_by_one", interrupted)
    assert command("--side", "off", "-m", str(micro_model), "--results", str(tmp_path)) == 130
    assert list(tmp_path.glob("*/*")) == []
    assert "interrupted" in capsys.readouterr().err


def test_a_cell_that_fails_is_left_out_and_what_was_measured_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first failure of all ends the run: then the command line is wrong and not the cell."""

    def fail(*_: Any) -> dict[str, Any]:
        raise SideError("it broke off")

    side, server = grid_sides.parse(["x=http://127.0.0.1:1"], None)[0], FakeServer("x")
    state = grid.Run(Path(), [], 8, 1, False, grid_sides.Checks(1, 100), Budget(None), grid.Nvml(), Bar())
    monkeypatch.setattr(grid, "measure", fail)
    with pytest.raises(SideError):
        state.measure(side, server, Prompts(1, 1000), Cell(1, 64), [], "same flags")
    monkeypatch.setattr(grid, "measure", lambda *_: {})
    state.measure(side, server, Prompts(1, 1000), Cell(1, 64), [], "same flags")
    monkeypatch.setattr(grid, "measure", fail)
    state.measure(side, server, Prompts(1, 1000), Cell(1, 128), [], "same flags")
    assert [row["depth"] for row in state.rows] == [64]
    assert state.left_out[0]["reason"] == "failed: it broke off"
    assert state.n_failed == 1


@dataclass
class Played:
    """A run whose servers are names and whose measurements take the time that they are told to."""

    state: grid.Run
    clock: Clock
    starts: list[tuple[str, int]]
    order: list[tuple[str, Cell]]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Played]:
    """`played(minutes)`: prefill takes 1 ms a token, twice that on side b; -ub 256 is best for a and 64 for b."""

    def make(minutes: float | None) -> Played:
        clock = Clock()
        checks = grid_sides.Checks(1, 100)
        state = grid.Run(Path(), ["-ub", "128"], 8, 1, False, checks, Budget(minutes, clock), grid.Nvml(), Bar())
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

        monkeypatch.setattr(grid.Run, "started", lambda self, sides, flags: started(sides, flags))
        monkeypatch.setattr(grid, "measure", measure)
        monkeypatch.setattr(grid, "warm_up", lambda *_: None)
        monkeypatch.setattr(grid, "Budget", lambda minutes: Budget(minutes, clock))
        monkeypatch.setattr(grid.time, "monotonic", clock)
        return run

    return make


def two_sides() -> list[grid_sides.Side]:
    return [grid_sides.Side("a", "a"), grid_sides.Side("b", "b")]


def test_loaded_together_each_kind_of_cell_has_both_orders(played: Any) -> None:
    run = played(None)
    grid.together(run.state, two_sides(), cells([1], [1000, 3000], 2))
    firsts: dict[int, list[str]] = {}
    for (name, cell), (_, again) in zip(run.order[::2], run.order[1::2], strict=True):
        assert cell == again
        firsts.setdefault(cell.depth, []).append(name)
    assert {depth: sorted(names) for depth, names in firsts.items()} == {1000: ["a", "b"], 3000: ["a", "b"]}
    assert run.starts == [("a", 128), ("b", 128)]


def test_one_at_a_time_the_order_of_the_sides_turns(played: Any) -> None:
    run = played(None)
    grid.one_by_one(run.state, two_sides(), cells([1], [1000], 2), None, 2)
    assert [name for name, _ in run.starts] == ["a", "b", "b", "a"]
    assert run.state.left_out == []


def test_a_limited_time_is_kept_and_what_was_left_out_is_said(played: Any) -> None:
    every = cells([1], [1000, 10_000, 100_000], 2)
    for measure_all in (
        lambda run: grid.together(run.state, two_sides(), every),
        lambda run: grid.one_by_one(run.state, two_sides(), every, 2.0, 2),
    ):
        run = played(2.0)
        measure_all(run)
        assert run.clock.now <= 125
        assert {c["depth"] for c in run.state.left_out} >= {100_000}
        assert all(c["reason"] for c in run.state.left_out)
        assert {(r["side"], r["depth"]) for r in run.state.rows} >= {("a", 1000), ("b", 1000)}


def test_each_side_is_measured_again_with_its_own_best_ubatch(played: Any) -> None:
    run = played(None)
    chosen = grid.best_ubatch(run.state, two_sides(), [64, 256], cells([1], [1000, 3000], 2))
    assert {name: c["best"] for name, c in chosen.items()} == {"a": 256, "b": 64}
    best = [(r["side"], r["depth"], r["ubatch"]) for r in run.state.rows if r["kind"] == grid_table.BEST]
    assert best == [("a", 1000, 256), ("a", 3000, 256), ("b", 1000, 64), ("b", 3000, 64)]


def test_a_ubatch_that_fails_is_not_chosen(played: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run, plain = played(None), grid.measure
    grid.together(run.state, two_sides(), cells([1], [1000], 1))  # rows that are none of the probes

    def measure(server: Any, *rest: Any) -> dict[str, Any]:
        if server.name == "a" or grid_sides.ubatch_of(server.flags) == 64:
            raise SideError("no memory")
        return plain(server, *rest)

    monkeypatch.setattr(grid, "measure", measure)
    chosen = grid.best_ubatch(run.state, two_sides(), [64, 256], cells([1], [1000], 1))
    assert {name: (c["best"], list(c["prefill_tps"])) for name, c in chosen.items()} == {"b": (256, ["256"])}
    assert {c["side"] for c in run.state.left_out} == {"a", "b"}


def test_a_copied_cell_is_left_out_where_its_session_was(played: Any) -> None:
    run = played(None)
    run.state.copy_from = 1000
    grid.together(run.state, two_sides()[:1], cells([1, 5], [1000], 1, copy_from=1000)[1:])
    assert run.order == []
    assert "was not measured" in run.state.left_out[0]["reason"]


@pytest.mark.parametrize(
    "side", ["off", "upstream", "groups:--enable decode-groups --plugin-option decode-groups.groups=2"]
)
def test_sessions_are_copies_of_one(
    tmp_path: Path, micro_model: Path, capsys: pytest.CaptureFixture[str], side: str
) -> None:
    if side == "upstream" and not (paths.build("upstream") / "bin" / "llama-server").is_file():
        pytest.skip("there is no llama-server: run `llamamg build --upstream --server`")
    status = command(
        "--side", side, "-m", str(micro_model), "--slots", "1,3", "--depths", "70,200", "--repeats", "1", "--copy-from", "200",
        "--n-predict", "12", "--results", str(tmp_path), "-t", "1", "-b", "256", "-ub", "64",
    )  # fmt: skip
    assert status == 0, capsys.readouterr().err
    [folder] = tmp_path.glob("*/*")
    result = json.loads((folder / "grid.json").read_text())
    rows = {(row["n_sessions"], row["depth"]): row for row in result["rows"]}
    assert {cell: row["prefill"] is None for cell, row in rows.items()} == {
        (1, 70): False, (1, 200): False, (3, 70): False, (3, 200): True,
    }  # fmt: skip
    copied = rows[3, 200]["generate"]
    assert copied["n_recomputed"] == 0  # the file held all of it, recurrent layers included
    assert copied["n_tokens"] > 12
    assert "| 3 | 200 |  |" in (folder / "table.md").read_text()


def test_copies_need_somebody_to_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--side", "off", "--slots", "2,3", "--copy-from", "200", "--results", str(tmp_path)) == 1
    assert "give --slots from 1 on" in capsys.readouterr().err


def test_one_side_of_a_real_grid(tmp_path: Path, micro_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Our own server on the synthetic hybrid: rows, files and no path of this machine."""
    flags = ("-t", "1", "-b", "256", "-ub", "64")
    status = command(
        "--side", "off", "-m", str(micro_model), "--slots", "1,2", "--depths", "70,200", "--repeats", "1",
        "--n-predict", "12", "--results", str(tmp_path), *flags,
    )  # fmt: skip
    assert status == 0, capsys.readouterr().err
    [folder] = tmp_path.glob("*/*")
    result = json.loads((folder / "grid.json").read_text())
    assert [(r["n_sessions"], r["depth"]) for r in result["rows"]] == [(1, 70), (2, 70), (1, 200), (2, 200)]
    for row in result["rows"]:
        assert row["prefill"]["n_prompt"] == [row["depth"]] * row["n_sessions"]
        assert row["generate"]["n_recomputed"] == 0  # what the slots held was used, recurrent layers included
        assert 1 <= row["generate"]["n_tokens"] < 12 * row["n_sessions"]
        assert row["generate_watch"]["host_rss_mib"] > 0
    assert result["left_out"] == []
    assert result["record"]["model"]["sha256"]
    assert str(tmp_path) not in (folder / "grid.json").read_text()
    assert str(micro_model.parent) not in "".join(p.read_text() for p in folder.iterdir() if p.suffix != ".svg")
    assert (folder / "table.md").read_text().rstrip() == grid_table.markdown(result)
    assert (folder / "off-ub64.log").is_file()
