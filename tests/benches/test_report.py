"""The report and README's table: made from the JSON alone, machine by machine, and never from a half-written run."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from llamamg_benches import grid_table, report, report_plots, retable
from llamamg_benches.errors import BenchError
from llamamg_benches.program import run_module
from llamamg_benches.report_load import machines, newest
from llamamg_benches.results_table import FOLDER, results_table

from llamamg import readmedocs


def grid_row(
    side: str, depth: int, repeat: int, prefill: float, generate: float, n: int = 1, kind: str = "same flags"
) -> Any:
    watch = {
        "host_rss_mib": 100.0,
        "devices": [{"gpu_percent": {"mean": 90.0, "max": 99.0}, "memory_mib": {"mean": 5.0, "max": 7.0}}],
    }
    return {
        "side": side, "n_sessions": n, "depth": depth, "repeat": repeat, "ubatch": 512, "kind": kind,
        "prefill": {"tps": prefill, "slot_tps": prefill / n, "ttft_ms": [1000.0 * depth / prefill] * n},
        "generate": {"tps": generate, "slot_tps": generate / n, "itl_ms": {"p50": 10.0, "p90": 11.0, "p99": 12.0, "max": 13.0}},
        "prefill_watch": watch, "generate_watch": watch,
    }  # fmt: skip


def grid_result(date: str, cpu: str = "Fast CPU", ratio: float = 1.0, n_repeats: int = 2) -> dict[str, Any]:
    rows = [
        grid_row(side, depth, repeat, base * 1000 + repeat, base * 50 + repeat, n)
        for side, base in (("off", ratio), ("upstream", 1.0))
        for n in (1, 5)
        for depth in (5000, 50_000)
        for repeat in range(n_repeats)
    ]
    result = {
        "bench": "grid",
        "order": "alternating",
        "sides": [
            {"name": "off", "label": "llamamg, plugins off"},
            {"name": "upstream", "label": "llama-server (unpatched)"},
        ],
        "rows": rows,
        "best_ub": {},
        "left_out": [{"n_sessions": 5, "depth": 250_000, "repeat": 0, "side": "", "reason": "the time was up"}],
        "record": {
            "date": date,
            "machine": {"cpu": cpu, "n_cpus_usable": 4, "memory_gib": 16.0, "gpus": []},
            "software": {"commit": "0123456789abcdef", "dirty": False},
            "model": {"file": "m<1>.gguf"},
            "flags": ["-np", "5"],
        },
    }
    return {**result, "comparisons": grid_table.comparisons(result)}


ABLATION = {
    "bench": "ablation",
    "flags": [["-np", "5"]],
    "rows": [
        {
            "plugin": "seq-compact", "load": "five", "model": "micro.gguf", "status": "acted", "reason": None,
            "metrics": {
                "decode_tps": {"change_percent": 12.5, "change_interval": [10.0, 15.0], "better": True},
                "itl_p99_ms": {"change_percent": -3.0, "change_interval": [-8.0, 2.0], "better": None},
            },
        },
        {"plugin": "prefill-gate", "load": "solo", "model": "micro.gguf", "status": "no effect", "reason": "nothing <arrived>"},
    ],
    "record": {
        "date": "2026-01-03", "machine": {"cpu": "Fast CPU", "n_cpus_usable": 4, "memory_gib": 16.0, "gpus": []},
        "software": {"commit": "0123456789abcdef", "dirty": True}, "models": [{"file": "micro.gguf"}],
    },
}  # fmt: skip


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Two machines: one with two grids and an ablation, one with a single grid."""
    put(tmp_path, "fast", "2026-01-01-grid", "grid.json", grid_result("2026-01-01T00:00:00"))
    put(tmp_path, "fast", "2026-01-02-grid", "grid.json", grid_result("2026-01-02T00:00:00", ratio=2.0))
    put(tmp_path, "fast", "2026-01-03-ablation", "result.json", ABLATION)
    put(tmp_path, "fast", "2026-01-03-ablation", "plot.json", {"kind": "bars"})
    put(tmp_path, "fast", ".unfinished-x", "grid.json", {"bench": "grid"})
    put(tmp_path, "slow", "2026-01-01-grid", "grid.json", grid_result("2026-01-01T00:00:00", cpu="Slow CPU"))
    return tmp_path


def put(root: Path, machine: str, run: str, name: str, value: Any) -> None:
    folder = root / machine / run
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(value))


# -- finding


def test_results_of_each_machine_the_newest_first_and_no_unfinished_one(results: Path) -> None:
    found = machines(results)
    assert {name: [f.run for f in of] for name, of in found.items()} == {
        "fast": ["2026-01-03-ablation", "2026-01-02-grid", "2026-01-01-grid"],
        "slow": ["2026-01-01-grid"],
    }
    grid = newest(found["fast"], "grid")
    assert grid is not None
    assert grid.run == "2026-01-02-grid"


def test_a_file_that_is_no_json_is_named(results: Path) -> None:
    (results / "slow" / "2026-01-01-grid" / "grid.json").write_text("{")
    with pytest.raises(BenchError, match=r"slow.*grid\.json"):
        machines(results)


# -- tables


CELLS = [(1, 5000), (1, 50_000), (5, 5000), (5, 50_000)]


def test_pairs_are_the_same_cell_and_repeat_and_a_difference_is_found() -> None:
    found = grid_table.comparisons(grid_result("2026", ratio=1.1, n_repeats=3))
    assert [(c["metric"], c["n_sessions"], c["depth"]) for c in found] == [
        (metric, *cell) for metric in grid_table.METRICS for cell in CELLS
    ]
    for c in found:
        assert (c["n_pairs"], c["verdict"]) == (3, "A higher")
        assert c["mean"] == pytest.approx(1.1, rel=0.01)
    same = grid_table.comparisons(grid_result("2026", n_repeats=3))
    assert {c["verdict"] for c in same} == {"no difference"}


def test_depths_are_not_pooled() -> None:
    """A side that gains at one depth what it loses at another one: each of them is sure, together they would be nothing."""
    result = grid_result("2026", n_repeats=3)
    for row in result["rows"]:
        if row["side"] == "off":
            row["generate"]["tps"] *= 2.0 if row["depth"] == 5000 else 0.5
    said = {(c["n_sessions"], c["depth"]): c for c in grid_table.comparisons(result) if c["metric"] == "generation t/s"}
    assert {cell: c["verdict"] for cell, c in said.items()} == {
        cell: "A higher" if cell[1] == 5000 else "A lower" for cell in CELLS
    }
    (line,) = [line for line in grid_table.comparison_lines(result) if "generation" in line]
    assert "1 x 5k 2.000 (" in line
    assert "5 x 50k 0.500 (" in line


def test_fewer_than_three_pairs_of_a_cell_have_no_interval() -> None:
    result = grid_result("2026", ratio=1.1)
    assert {(c["n_pairs"], c["interval"], c["verdict"]) for c in grid_table.comparisons(result)} == {(2, None, None)}
    assert "1 x 5k 1.100 (2 pairs, no interval); 1 x 50k" in grid_table.markdown(result)


def test_plugins_off_and_the_unpatched_build_are_compared_whatever_comes_first() -> None:
    result = grid_result("2026", ratio=1.1, n_repeats=3)
    more = [{**row, "side": "ours"} for row in result["rows"] if row["side"] == "off"]
    result["sides"].insert(0, {"name": "ours", "label": "llamamg"})
    result["rows"] += more
    found = grid_table.comparisons(result)
    pairs = [("ours", "off"), ("ours", "upstream"), ("off", "upstream")]
    assert [(c["a"], c["b"]) for c in found] == [pair for pair in pairs for _ in grid_table.METRICS for _ in CELLS]
    assert [c["verdict"] for c in found] == ["no difference"] * 8 + ["A higher"] * 16
    assert "llamamg, plugins off / llama-server (unpatched), prefill t/s" in grid_table.markdown(result)


def test_what_is_ours_is_compared_with_the_unpatched_build_and_not_the_other_way_round() -> None:
    result = grid_result("2026", ratio=1.1, n_repeats=3)
    result["sides"].sort(key=lambda side: side["name"] != "upstream")
    assert result["sides"][0]["name"] == "upstream"
    found = grid_table.comparisons(result)
    assert {(c["a"], c["b"], c["verdict"]) for c in found} == {("off", "upstream", "A higher")}


def test_committed_tables_are_what_their_json_says() -> None:
    root = Path(retable.__file__).parent / "results"
    stale = [path for path, text in retable.tables(root) if path.read_text(encoding="utf-8") != text]
    assert not stale, "run python -m benches.retable"


def test_tables_are_written_again(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "box" / "2026-grid"
    folder.mkdir(parents=True)
    (folder / "grid.json").write_text(json.dumps(grid_result("2026")))
    (folder / "table.md").write_text("old")
    assert run_module(retable, [str(tmp_path)], "retable") == 0
    assert (folder / "table.md").read_text() == grid_table.markdown(grid_result("2026")) + "\n"
    assert "table.md" in capsys.readouterr().out
    assert run_module(retable, [str(tmp_path)], "retable") == 0
    assert capsys.readouterr().out == ""


def test_a_cell_that_one_side_lacks_makes_no_pair() -> None:
    result = grid_result("2026")
    result["rows"] = [r for r in result["rows"] if not (r["side"] == "upstream" and r["n_sessions"] == 5)]
    assert {c["n_sessions"] for c in grid_table.comparisons(result)} == {1}


def test_rows_measured_with_other_flags_stay_out_of_the_table_and_of_the_pairs() -> None:
    result = grid_result("2026")
    before = grid_table.comparisons(result)
    result["rows"].append(grid_row("off", 5000, 0, 99_999.0, 99_999.0, kind="best ub"))
    assert "99999" not in "\n".join(grid_table.cell_table(result))
    assert "99999" in "\n".join(grid_table.cell_table(result, grid_table.BEST))
    assert grid_table.comparisons(result) == before


def test_the_markdown_says_what_was_left_out() -> None:
    assert "left out: 5 x 250k, measurement 1: the time was up" in grid_table.markdown(grid_result("2026"))


def test_readmes_table_has_the_newest_grid_of_each_machine_and_never_both_in_one(results: Path) -> None:
    fast, slow = results_table(results).split("**Slow CPU")
    assert "**Fast CPU, 4 cores**" in fast
    assert "2026-01-02" in fast
    assert "2026-01-01" not in fast
    assert fast.count("| sessions |") == slow.count("| sessions |") == 1
    assert "2000 (400)" in fast.replace("2001", "2000").replace("2000 (401)", "2000 (400)")
    assert "2000" not in slow


def test_a_newer_grid_of_our_sides_alone_is_not_readmes(results: Path) -> None:
    before = results_table(results)
    ours = grid_result("2026-01-09T00:00:00", ratio=3.0)
    ours["sides"] = [side for side in ours["sides"] if side["name"] != "upstream"]
    put(results, "slow", "2026-01-09-grid", "grid.json", ours)
    assert results_table(results) == before
    put(results, "slow", "2026-01-10-grid", "grid.json", grid_result("2026-01-10T00:00:00", ratio=3.0))
    assert results_table(results) != before


def test_grids_of_a_day_that_differ_in_depth_only_are_one_table_in_the_readme(tmp_path: Path) -> None:
    """A cell is the last run's, sides are told apart by what readers see, and peer copies are another table."""
    first, deep, again, peers = (grid_result(f"2026-01-02T0{hour}:00:00") for hour in range(1, 5))
    for row in deep["rows"]:
        row["depth"] *= 50
    for side in deep["sides"]:
        side["name"] = side["name"].replace("off", "other")
    deep["rows"] = [{**row, "side": row["side"].replace("off", "other")} for row in deep["rows"]]
    deep["record"]["flags"] = ["-np", "5", "-c", "99999"]
    again["rows"] = [grid_row(side, 5000, 0, 7777.0, 8888.0) for side in ("off", "upstream")]
    peers["record"]["software"]["environment"] = {"GGML_CUDA_P2P": "1"}
    for run, result in (("a", first), ("b", deep), ("c", again), ("d", peers)):
        put(tmp_path, "fast", run, "grid.json", result)
    table, other = results_table(tmp_path).split("`GGML_CUDA_P2P=1 -np 5`")
    assert [line.split("|")[2].strip() for line in table.splitlines() if line.startswith("| 1 |")] == [
        "5k",
        "50k",
        "250k",
        "2500k",
    ]
    assert "| 1 | 5k | 7777 | 7777 | 8888 | 8888 |" in table
    assert all(f"[{run}]({FOLDER}/fast/{run})" in table for run in "abc")
    assert "-c 99999" not in table
    assert "7777" not in other
    assert "5k" in other


def test_a_changed_result_makes_the_readme_stale(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(readmedocs.PARTS, "results", lambda: results_table(results))
    page = readmedocs.render("<!-- plugins -->\n<!-- /plugins -->\n<!-- results -->\n<!-- /results -->\n")
    assert readmedocs.render(page) == page
    put(results, "slow", "2026-01-09-grid", "grid.json", grid_result("2026-01-09T00:00:00", ratio=3.0))
    assert readmedocs.render(page) != page


# -- the report


class Shape(HTMLParser):
    """Counts what is in a page, and notes what it would load."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [
            str(value)
            for name, value in attrs
            if name == "src" or (name.endswith("href") and not str(value).startswith("#"))
        ]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_one_file_with_curves_and_bars_that_loads_nothing(results: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert run_module(report, ["--results", str(results), "-o", str(out)], "llamamg bench report") == 0
    text = out.read_text()
    shape = Shape()
    shape.feed(text)
    assert shape.loads == []
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    assert shape.tags.count("svg") == 3 * 2 + 2  # three grids with two numbers of sessions, two metrics of the ablation
    assert shape.tags.count("section") == 2
    assert shape.tags.count("h1") == 1
    assert "nothing <arrived>" in shape.text  # what results say is text, never markup
    assert "m<1>.gguf" in shape.text
    assert "left out: 5 x 250k" in shape.text
    assert not list(tmp_path.glob(".*unfinished*"))
    assert report.page(results) == text  # the same results, the same bytes


def mixed_result() -> Any:
    values = {"itl_p50_ms": 7.0, "itl_p99_ms": 9.0, "itl_max_ms": 12.0, "decode_tps": 130.0}
    rows = [
        {"side": side, "n_decoders": n, "n_prompts": m, "median": {**values, "prefill_tps": 80.0 * m}}
        for side in ("ours", "off") for n in (1, 2) for m in (0, 1, 2)
    ]  # fmt: skip
    sides = [{"name": "ours", "label": "llamamg"}, {"name": "off", "label": "plugins off"}]
    return {"bench": "mixed", "sides": sides, "rows": rows, "record": grid_result("2026-01-03T00:00:00")["record"]}


def depth_result() -> Any:
    rows = [
        {"n_sessions": 1, "depth": depth, "side": side, "repeat": repeat, "prefill_tps": 900.0 + repeat, "decode_tps": 9.0}
        for depth in (5000, 50_000) for side in ("on", "off") for repeat in (0, 1)
    ]  # fmt: skip
    same = {"largest": 0.0, "same_best": True, "same_bits": True}
    rows.append({"depth": 5000, "position": 4998, "compare": {"on/again": same}})
    record = grid_result("2026-01-03T00:00:00")["record"]
    return {
        "bench": "qsa-depth",
        "sides": ["on", "off"],
        "rows": rows,
        "cache_type": "q8_0",
        "ubatch": 512,
        "record": record,
    }


KERNELS = {
    "bench": "kernels", "device": "a <GPU>", "copy_bytes_per_s": 1e9, "record": {},
    "rows": [{"kernel": "one", "size": "1", "ok": None, "reason": "not here"}],
}  # fmt: skip


def test_mixed_loads_kernels_and_depth_are_in_the_report(tmp_path: Path) -> None:
    put(tmp_path, "box", "a-mixed", "result.json", mixed_result())
    put(tmp_path, "box", "b-qsa-depth", "qsa-depth.json", depth_result())
    put(tmp_path, "box", "c-kernels", "result.json", KERNELS)
    shape = Shape()
    shape.feed(report.page(tmp_path))
    assert shape.tags.count("svg") == 2
    assert "a <GPU>: a large copy moves 1.0 GB/s" in shape.text
    assert "native QSA and native QSA once more, a token at each depth: same bits" in shape.text
    assert "Not drawn" not in shape.text


def test_curves_go_through_what_was_measured() -> None:
    mixed = report_plots.mixed_figure(mixed_result())
    assert len(mixed.axes) == 2
    assert [len(axis.lines) for axis in mixed.axes] == [4, 4]
    assert [tuple(point) for point in mixed.axes[1].lines[0].get_xydata()] == [(0.0, 12.0), (80.0, 12.0), (160.0, 12.0)]
    depth = report_plots.depth_figure(depth_result(), {"on": "on", "off": "off"})
    assert [tuple(point) for point in depth.axes[0].lines[0].get_xydata()] == [(5000.0, 900.5), (50_000.0, 900.5)]


def test_small_changes_show_beside_large_ones_and_what_is_not_claimed_is_pale() -> None:
    bars = [
        ("large", 6900.0, 4000.0, 11_000.0, True), ("small", 8.0, 7.0, 9.0, True),
        ("half", -50.0, -55.0, -45.0, True), ("double", 100.0, 90.0, 110.0, False),
    ]  # fmt: skip
    figure = report_plots.bars_figure("decode tps", bars, lower_is_better=False)
    report_plots.svg(figure)
    [axis] = figure.axes
    wide = {bar[0]: patch.get_window_extent().width for bar, patch in zip(bars, axis.patches, strict=True)}
    assert wide["small"] > 0.01 * axis.get_window_extent().width
    assert wide["half"] == pytest.approx(wide["double"], rel=0.01)
    assert [patch.get_alpha() for patch in axis.patches] == [1.0, 1.0, 1.0, 0.25]
    colors = [patch.get_facecolor()[:3] for patch in axis.patches]
    assert colors[0] == colors[1] == colors[3] != colors[2]
    label = axis.xaxis.label.get_window_extent()
    assert figure.bbox.x0 <= label.x0
    assert label.x1 <= figure.bbox.x1


def test_latencies_and_memory_have_every_column() -> None:
    other = {"memory_mib": {"mean": 1.0, "max": 1.0}, "process_memory_mib": {"mean": 2.0, "max": 6.0}}
    row = grid_row("off", 5000, 0, 1000.0, 50.0)
    row["generate_watch"] = {
        "host_rss_mib": 100.0,
        "devices": [
            {"memory_mib": {"mean": 5.0, "max": 7.0}},
            other,
        ],
    }
    row["prefill_watch"] = {
        "devices": [{"gpu_percent": {"mean": 90.0, "max": 99.0}, "pcie_rx_mb_s": {"mean": 321.0, "max": 999.0}}]
    }
    result = {"sides": [{"name": "off", "label": "llamamg, plugins off"}], "rows": [row]}
    head, _, line = (
        [cell.strip() for cell in text.strip("| ").split("|")] for text in grid_table.latency_table(result)
    )
    assert dict(zip(head, line, strict=True)) == {
        "sessions": "1", "depth": "5k", "side": "llamamg, plugins off", "TTFT s": "5.00", "ITL p50 ms": "10.0", "p90": "11.0",
        "p99": "12.0", "max": "13.0", "host MiB": "100", "GPU MiB": "7 / 6", "GPU %": "90", "PCIe in MB/s": "321",
    }  # fmt: skip


def test_readme_has_native_qsa_over_depth(results: Path) -> None:
    put(results, "fast", "2026-01-03-qsa-depth", "qsa-depth.json", depth_result())
    fast = results_table(results).split("**Slow CPU")[0]
    assert "native QSA over depth: q8_0 cache, ubatches of 512" in fast
    assert "| prefill | 1 | 50k | 900 | 900 | 1.00 | 1.00 |" in fast


def test_no_results_are_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_module(report, ["--results", str(tmp_path)], "llamamg bench report") == 1
    assert "llamamg bench grid" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_a_sentence(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = results / "no" / "report.html"
    assert run_module(report, ["--results", str(results), "-o", str(out)], "llamamg bench report") == 1
    assert "-o" in capsys.readouterr().err
