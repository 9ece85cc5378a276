"""`bench check` lets the shipped plugins pass and catches one that changes a token, feeds another, or breaks its promise."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benches import check, check_judge, program
from benches.check_judge import Count
from benches.check_trace import Sizes
from llamamg import hookimpl
from llamamg.config import Config, ContextConfig, ModelConfig, PluginsConfig
from llamamg.engine import Engine
from llamamg.guard import Divergence, Guard
from llamamg.library import Library
from llamamg.loading import load
from llamamg.plugins import PluginSet, discover
from llamamg.plugins.testing import Point, declared
from llamamg_plugins.seq_compact import SeqCompact

SMALL = Sizes(n_tokens=6, n_prompt=24)
Opened = Callable[..., Engine]


@pytest.fixture
def opened(library: Library, micro_model: Path) -> Iterator[Opened]:
    """`opened(Class, model=None)`: an engine, not started, with this plugin alone."""
    engines: list[Engine] = []

    def make(plugin: type[Any], model: Path | None = None) -> Engine:
        name = plugin.declaration.name
        plugins = PluginSet.discover(PluginsConfig(enable=(name,), only=True), [Point(name, plugin)])
        context = ContextConfig(n_ctx=6 * 256, n_parallel=6, kv_unified=False, n_threads=1, warmup=False)
        engines.append(load(Config(ModelConfig(model or micro_model), context), plugins))
        return engines[-1]

    yield make
    for engine in engines:
        engine.stop(0.0)


def shipped() -> list[str]:
    """The plugins that come with llamamg."""
    return [name for name, found in discover().items() if found.shipped]


def meddler(name: str, guard: Guard, meddle: Callable[[Engine], None]) -> type[Any]:
    """A plugin that patches the engine at the start and claims to have done something."""

    class Base:
        def __init__(self) -> None:
            self.effect = 0

        @hookimpl
        def engine_start(self, engine: Engine) -> None:
            self.effect += 1
            meddle(engine)

    return declared(name, Base, guard=guard)


def checked(engine: Engine, name: str, guard: Guard) -> dict[str, Any]:
    return check.check_engine(engine, name, guard, SMALL)


def another_token(engine: Engine) -> None:
    """The seventh batch gives its first row another token than the model chose."""
    collect, n = engine.runner.collect, [0]

    def wrong() -> Any:
        done = collect()
        if done is not None:
            n[0] += 1
            if n[0] == 7:
                done.outputs[0].tokens[0] = (done.outputs[0].tokens[0] + 1) % 1000
        return done

    engine.runner.collect = wrong  # type: ignore[method-assign]


def another_prompt(engine: Engine) -> None:
    """A token of the first prompt is exchanged on its way to the library."""
    submit, n = engine.runner.submit, [0]

    def wrong(batch: Any) -> None:
        n[0] += 1
        if n[0] == 1:
            tokens = np.array(batch.rows[0].tokens, np.int32)
            tokens[3] = (tokens[3] + 1) % 1000
            batch.rows[0].tokens = tokens
        submit(batch)

    engine.runner.submit = wrong  # type: ignore[method-assign]


def slightly_other_logits(engine: Engine) -> None:
    """Stands in for a native switch that computes nearly the same: every logit is one part in a million larger."""
    from llamamg import library

    collect, runner = engine.runner.collect, engine.runner
    submit, last = runner.submit, [0]

    def counting(batch: Any) -> None:
        last[0] = sum(row.n_logits for row in batch.rows)
        submit(batch)

    def other() -> Any:
        if last[0]:
            llama = library.load().llama
            first = llama.llama_get_logits_ith(runner.context, -last[0])  # type: ignore[attr-defined]
            logits = np.ctypeslib.as_array(first, (last[0] * engine.vocab.n_vocab,))
            logits *= np.float32(1.000001)
            last[0] = 0
        return collect()

    runner.submit, runner.collect = counting, other  # type: ignore[method-assign]


def test_a_token_that_was_changed(opened: Opened) -> None:
    guard = Guard.same_tokens()
    row = checked(opened(meddler("changer", guard, another_token)), "changer", guard)
    assert row["status"] == check.VIOLATED
    assert row["same_batches"]["n_violations"] == row["alone"]["n_violations"] == 1
    (first,) = row["same_batches"]["violations"]
    assert first["given"] != first["best"]
    assert f"was {first['given']}" in row["reason"]
    assert f"chooses {first['best']}" in row["reason"]


def test_a_prompt_that_was_changed(opened: Opened) -> None:
    guard = Guard.same_tokens()
    row = checked(opened(meddler("feeder", guard, another_prompt)), "feeder", guard)
    assert row["status"] == check.VIOLATED
    assert "at position 3 of request 0" in row["reason"]


@pytest.mark.parametrize(
    ("guard", "status"),
    [
        (Guard.exact(), check.VIOLATED),
        (Guard.same_tokens(), check.HELD),
        (Guard.close(kl=1e-3, top1=0.99), check.HELD),
        (Guard.close(kl=0.0, top1=0.99), check.VIOLATED),
    ],
)
def test_nearly_the_same_is_not_exact(opened: Opened, guard: Guard, status: str) -> None:
    row = checked(opened(meddler("nearly", guard, slightly_other_logits)), "nearly", guard)
    assert (row["status"], row["same_batches"]["n_same_bits"]) == (status, 0)
    if guard == Guard.exact():
        assert "promises the same bits" in row["reason"]
    if guard == Guard.close(kl=0.0, top1=0.99):
        assert 0 < row["same_batches"]["kl_mean"] < 1e-3
        assert "KL" in row["reason"]


def test_a_move_that_loses_a_part(opened: Opened, smol_model: Path) -> None:
    """The replay loses the same part: only computing the request alone shows it."""

    class Loses(SeqCompact):
        def __init__(self, **options: Any) -> None:
            super().__init__(**{**options, "always": True})

        @hookimpl
        def engine_start(self, engine: Engine) -> None:
            kv = engine.scheduler.kv
            copy = kv.copy

            def wrong(source: int, target: int) -> None:
                copy(source, target)
                kv.remove(target, 2, 20)

            kv.copy = wrong  # type: ignore[method-assign]

    plugin = declared("loses", Loses, guard=Guard.same_tokens())
    row = checked(opened(plugin, smol_model), "loses", Guard.same_tokens())
    assert row["effect"] > 0
    assert row["same_batches"]["n_violations"] == 0
    assert row["alone"]["n_violations"] > 0
    assert (row["status"], "alone" in row["reason"]) == (check.VIOLATED, True)


def test_a_plugin_that_does_nothing_was_not_checked(opened: Opened) -> None:
    class Lazy:
        effect = 0

    row = checked(opened(declared("lazy", Lazy, guard=Guard.exact())), "lazy", Guard.exact())
    assert row["status"] == check.DID_NOT_ACT
    assert row["same_batches"]["n_same_bits"] == row["same_batches"]["n_positions"] > 0
    sentences = check.failures([{"plugin": "lazy", "model": "m", **row}])
    assert [sentence.split(" with any")[0] for sentence in sentences] == ["lazy was not checked"]


def test_ties_are_counted_and_told_apart() -> None:
    count = Count()
    for behind in (0.1, 0.49, 0.51):
        count.add(Divergence(0, 0, 1, 2, behind))
    count.add(None)
    count.close()
    assert (count.n_positions, count.n_ties, count.n_violations, count.top1) == (4, 2, 1, 0.25)
    assert (count.largest_tie, count.first) == (0.49, Divergence(0, 0, 1, 2, 0.51))
    count.forgive({(0, 1)})
    assert count.n_violations == 1
    replayed = Count(n_positions=4, n_same_bits=4)
    assert check_judge.broken(Guard.same_tokens(), replayed, count) is not None
    assert check_judge.broken(Guard.close(kl=1.0, top1=0.7), replayed, count) is None
    assert check_judge.broken(Guard.close(kl=1.0, top1=0.8), replayed, count) is not None
    count.forgive({(0, 0)})
    assert (count.n_ties, count.n_unstable, count.n_violations) == (3, 1, 0)
    assert check_judge.broken(Guard.same_tokens(), replayed, count) is None


def test_kl_of_known_distributions() -> None:
    p, q = np.log([0.5, 0.5]), np.log([0.9, 0.1])
    assert check_judge.kl(p, q) == pytest.approx(0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(0.5 / 0.1))
    assert check_judge.kl(p, p + 3.0) == pytest.approx(0.0, abs=1e-15)


def run(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    code = program.run_module(check, arguments, "llamamg bench check")
    out = capsys.readouterr()
    return code, out.out, out.err


NOT_HERE = (
    "prefill-pipeline",
    "expert-tiles",
    "spec",
    "async-cache",
)  # one device, no kind of drafts, no cache beside recorded batches


def test_the_command(library: Library, micro_model: Path, tmp_path: Path, capsys: Any) -> None:
    results = tmp_path / "results"
    code, out, err = run(
        capsys, "-m", str(micro_model), "-t", "1", "--no-warmup", "--tokens", "6", "--prompt", "300",
        "--seq-compact-always", "on", "--results", str(results),
    )  # fmt: skip
    assert code == 0, err
    (file,) = results.glob("*/*/result.json")
    result = json.loads(file.read_text())
    statuses = {row["plugin"]: row["status"] for row in result["rows"]}
    assert set(statuses) >= {"(none)", *shipped()}
    assert {status for name, status in statuses.items() if name not in NOT_HERE} == {"held"}
    done = [row for row in result["rows"] if "same_batches" in row]
    exact = [row["same_batches"] for row in done if not str(row["guard"]).startswith("close")]
    assert len(exact) >= 3  # a plugin with kernels of its own promises less
    assert all(same["n_same_bits"] == same["n_positions"] for same in exact)
    assert out == check.table(result) + "\n"
    assert (file.parent / "table.txt").read_text() == out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--plugin", "seq-compackt"), "seq-compact"),
        (("--tokens", "1"), "--tokens must be at least 4"),
        (("--enable", "none"), "no plugin is on"),
        (("-c", "600"), "exceeds the available context size"),
    ],
)
def test_bad_input(
    library: Library, micro_model: Path, tmp_path: Path, capsys: Any, arguments: tuple[str, ...], sentence: str
) -> None:
    code, _, err = run(capsys, "-m", str(micro_model), "-t", "1", *arguments, "--results", str(tmp_path / "r"))
    assert (code, sentence in err) == (1, True), err
    assert not list(tmp_path.glob("r/*/*"))


def test_one_slot_is_nothing_to_compact(library: Library, micro_model: Path, tmp_path: Path, capsys: Any) -> None:
    code, out, _ = run(
        capsys, "-m", str(micro_model), "-t", "1", "-np", "1", "--tokens", "4", "--prompt", "8", "--plugin", "seq-compact",
        "--results", str(tmp_path),
    )  # fmt: skip
    assert code == 1
    assert "seq-compact was not checked with any model" in out
    assert "there is one slot" in out


def test_ctrl_c_keeps_nothing(
    library: Library, micro_model: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "same_shapes", interrupted)
    code, out, err = run(
        capsys, "-m", str(micro_model), "-t", "1", "--tokens", "4", "--prompt", "8", "--results", str(tmp_path)
    )
    assert (code, out) == (130, "")
    assert "interrupted" in err
    assert not list(tmp_path.glob("*/*"))
