"""bench groups: what is compared with what, bad input, and a run over two rpc-servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benches import groups, groups_side, groups_table, program
from benches.flags import config_of, opened
from llamamg import paths
from llamamg.library import Library
from llamamg.slot import Slot


def row(n_groups: int, n_sessions: int, tps: float, threads: int | None = None, **more: Any) -> dict[str, Any]:
    what = {"side": "ours", "devices": "all", "rpc_threads": threads, "depth": 32, "shallow": 0}
    return {**what, "n_groups": n_groups, "n_sessions": n_sessions, "tps": tps, "runs": [tps], "overlaps": 1, **more}


def test_groups_are_compared_with_the_best_single_context() -> None:
    rows = [row(1, 2, 100.0, 1), row(1, 2, 80.0, 2), row(2, 2, 130.0, 1), row(3, 2, 90.0, 1)]
    (best,) = groups_table.best(rows, 0)
    assert best == {
        "depth": 32, "n_sessions": 2, "one": 100.0, "several": 130.0, "n_groups": 2, "ratio": 1.3, "reached": 130.0,
    }  # fmt: skip
    assert "2 groups are 1.30x of the best single context" in groups_table.table(
        {"rows": rows, "best": [best], "uneven": []}
    )


def test_what_is_possible_comes_from_the_times_of_one_context() -> None:
    # a step of b sessions takes b seconds: two stages and two groups could do twice as much
    rows = [row(1, b, 1.0) for b in (1, 2)] + [row(2, 2, 1.8)]
    best = groups_table.best(rows, 2)[1]
    assert (best["ideal"], best["of_ideal"]) == ({"tps": 2.0, "n_groups": 2}, 0.9)
    assert "ideal" not in groups_table.best(rows[1:], 2)[0]  # one time is missing


def test_one_device_says_what_is_possible_where_it_was_measured() -> None:
    # on one device a step of b sessions takes b seconds; a single context over both is slower by the hop
    one = [row(1, b, 1.0, devices="one") for b in (1, 2)]
    best = groups_table.best([*one, row(1, 2, 0.8), row(2, 2, 1.5)], 2)[0]
    assert best["ideal"] == {"tps": 2.0, "n_groups": 2}
    assert (best["of_ideal"], best["of_one_device"], best["ratio"]) == (0.75, 1.5, 1.5 / 0.8)
    assert best["steps_ms"] == {"1": 1000.0, "2": 2000.0}


def test_contexts_of_the_plain_library_are_a_measure_too() -> None:
    plain = [
        row(n, 2, tps, side="unpatched", devices=d) for d, n, tps in (("one", 1, 9), ("all", 1, 10), ("all", 2, 12))
    ]
    best = groups_table.best([*plain, row(1, 2, 11.0), row(2, 2, 15.0)], 0)[0]
    assert best["stock_all"] == {"one": 10, "contexts": 12, "ratio": 1.2}
    assert best["of_stock"] == 1.25
    assert "stock_one" not in best  # its contexts were not measured
    text = groups_table.table({"rows": plain, "best": [best], "uneven": []})
    assert "ours is 1.25x of the plain library's 2 contexts" in text


def test_depths_are_kept_apart() -> None:
    rows = [row(1, 1, 4.0, depth=d, devices=where) for d in (64, 128) for where in ("one", "all")]
    rows[0]["tps"] = 5.0
    assert [(b["depth"], b["of_one_device"]) for b in groups_table.best(rows, 0)] == [(64, 0.8), (128, 1.0)]


@pytest.mark.parametrize(("ms", "part"), [(20.0, 0.25), (50.0, 1.0)])  # its own work; as much as four deep ones
def test_a_deep_session_among_shallow_ones(ms: float, part: float) -> None:
    def steps(ms: float, **more: Any) -> dict[str, Any]:
        return row(1, 4, 4000.0 / ms, devices="one", **more)

    rows = [steps(10.0), steps(50.0, depth=900), steps(ms, depth=900, shallow=32)]
    (found,) = groups_table.uneven(rows)
    assert found["part"] == pytest.approx(part)
    assert "beside 3 at 32" in groups_table.table({"rows": rows, "best": [], "uneven": [found]})
    assert groups_table.uneven(rows[1:]) == []


def test_runs_of_a_row_are_joined() -> None:
    runs = [{**row(2, 2, tps), "effect": 3} for tps in (1.0, 5.0, 2.0)]
    joined = groups_table.joined(runs)
    assert (joined["tps"], joined["runs"], joined["overlaps"]) == (2.0, [1.0, 5.0, 2.0], 9)
    assert len({groups_table.key(run) for run in runs}) == 1
    assert groups_table.key(row(2, 2, 1.0)) != groups_table.key(row(2, 2, 1.0, depth=64))


def test_sessions_are_shared_out_over_the_groups() -> None:
    slots = [Slot(i, i, context=i // 3) for i in range(5)]
    assert [slot.id for slot in groups_side.spread(slots)] == [0, 3, 1, 4, 2]


def run(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    code = program.run_module(groups, arguments, "llamamg bench groups")
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--sessions", "x"), "--sessions x"),
        (("--tokens", "1"), "--tokens must be at least 16"),
        (("--depth", "1"), "--depths"),
        (("--one", "A,B,C"), "--one takes a device"),
        (("--stock", "--rpc-servers", "2"), "not with --rpc-servers"),
        (("--rpc-servers", "2", "--rpc-program", "nowhere"), "llamamg build --upstream --server"),
        (("-m", "nowhere.gguf"), "nowhere.gguf"),
    ],
)
def test_bad_input(tmp_path: Path, micro_model: Path, capsys: Any, arguments: tuple[str, ...], sentence: str) -> None:
    model = () if "-m" in arguments else ("-m", str(micro_model))
    code, _, err = run(capsys, *model, *arguments, "--results", str(tmp_path / "r"))
    assert (code, sentence in err) == (1, True), err
    assert not list(tmp_path.glob("r/*/*"))


def has_upstream(program: str = "ggml-rpc-server") -> None:
    if not (paths.build("upstream") / "bin" / program).is_file():
        pytest.skip("there is no unpatched build: run `llamamg build --upstream --server`")


def result_of(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("*/*/result.json")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_over_two_rpc_servers(library: Library, micro_model: Path, tmp_path: Path, capsys: Any) -> None:
    has_upstream()
    code, out, err = run(
        capsys, "-m", str(micro_model), "--rpc-servers", "2", "--rpc-threads", "1", "--tokens", "16", "--repeats", "1",
        "-t", "1", "--no-warmup", "--sessions", "1,2", "--results", str(tmp_path / "r"),
    )  # fmt: skip
    assert code == 0, err
    result = result_of(tmp_path / "r")
    assert [(r["n_groups"], r["n_sessions"]) for r in result["rows"]] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert all(r["tps"] > 0 for r in result["rows"])
    assert [r["overlaps"] > 0 for r in result["rows"]] == [False, False, False, True]
    assert "ideal" in result["best"][1]
    assert out == groups_table.table(result) + "\n"


def test_one_load_serves_all_depths_and_the_plain_library_is_beside(
    library: Library, micro_model: Path, tmp_path: Path, capsys: Any
) -> None:
    has_upstream("libllamamg.so")
    code, out, err = run(
        capsys, "-m", str(micro_model), "--one", "none", "--stock", "--stages", "2", "--sessions", "3", "--groups", "1,2",
        "--depth", "64,300", "--tokens", "16", "--repeats", "1", "-t", "1", "-b", "128", "--no-warmup",
        "--results", str(tmp_path / "r"),
    )  # fmt: skip
    assert code == 0, err
    result = result_of(tmp_path / "r")
    every = {(r["side"], r["devices"], r["depth"], r["n_groups"], r["n_sessions"]) for r in result["rows"]}
    ours = {("ours", "one", d, 1, n) for d in (64, 300) for n in (1, 2, 3)}
    ours |= {("ours", "all", d, g, 3) for d in (64, 300) for g in (1, 2)}
    assert [(u["n_sessions"], u["depth"], u["shallow"]) for u in result["uneven"]] == [(3, 300, 64)]
    assert every == ours | {
        ("unpatched", where, d, n, 3) for where in ("one", "all") for d in (64, 300) for n in (1, 3)
    }
    for best in result["best"]:
        assert {"ideal", "of_ideal", "of_stock", "of_one_device", "stock_one", "stock_all"} <= set(best)
    assert not result["stock_build"]["patches"]
    assert err.count("kept in") == 1, out


@pytest.mark.parametrize("n_groups", [1, 2])
def test_sessions_go_on_from_a_copied_state_as_from_their_own_prompt(
    library: Library, micro_model: Path, monkeypatch: pytest.MonkeyPatch, n_groups: int
) -> None:
    flags = ["-m", str(micro_model), "-np", "3", "--no-kv-unified", "-c", "1536", "-t", "1", "--no-warmup", "-lv", "1"]
    monkeypatch.setattr(groups_side, "spread", lambda slots: slots[::-1])  # the prompt is computed in the first slot
    with opened(config_of([*flags, "--ctx-checkpoints", "0", *groups.group_flags(n_groups)])) as engine:
        sessions, (first, _, copied) = groups_side.Sessions(engine), engine.slots
        sessions.run([200], 16)
        tokens = copied.tokens.view().copy()
        assert len(tokens) > 216
        engine.scheduler.clear(first)
        for n_prompt in (200, 200 + groups_side.N_OWN):  # in the same pieces, so that the bits are the same
            n_predict = len(tokens) - n_prompt + 1 if n_prompt > 200 else 1
            request = sessions._request(tokens[:n_prompt], first, n_predict)
            sessions._stamps[request.id] = []
            engine.submit(request)
            while engine.step():
                pass
        assert first.tokens.view().tolist() == tokens.tolist()
