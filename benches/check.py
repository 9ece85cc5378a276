"""Does every plugin keep its promise? Each one is recorded at work; the same batches are then computed without it.

Per plugin and model: the run is repeated batch by batch with all plugins off (exact: the same bits; same-tokens: the same
choices; close: KL and share of best tokens), and each request is computed alone. A token that fell the other way is a tie
when it was less than 0.5 nats behind the best one, or when the model itself gives it if its batches are cut in another
way; else a violation.
Exit status 1: a promise was broken, or a plugin did not act with any of the models, so nothing is known about it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from llamamg import library as native
from llamamg.config import Config
from llamamg.engine import Engine
from llamamg.guard import TIE_MARGIN, Guard, GuardKind
from llamamg.kvcache import KVCache
from llamamg.model import new_context
from llamamg.plugins import discover
from llamamg.plugins.selection import declaration_of, select, unknown
from llamamg.replay_alone import forbidden

from . import record
from .arguments import NO_CACHE, add_results, record_of
from .check_judge import alone, broken, misfed, missing, same_shapes, settle
from .check_trace import N_SLOTS, Sizes, trace
from .errors import BenchError
from .flags import config_of, model_path, opened, take_models, unavailable

NAME = "check"
HELP = "does every plugin keep its promise about the answers"
SERVE_FLAGS = True

MODELS = ("demo", "micro")
NO_PLUGIN = "(none)"
# What makes a plugin apply where it would stay off by itself.
OPTIONS = {"decode-groups": {"groups": "2", "prefill-slots": "1"}}
HELD, VIOLATED, DID_NOT_ACT, NOT_APPLICABLE = "held", "VIOLATED", "did not act", "not applicable"
Stage = Callable[[str], Callable[[int], None]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command line."""
    d = Sizes()
    parser.add_argument(
        "--plugin",
        action="append",
        default=[],
        metavar="NAMES",
        help="plugins to check: a,b (default: every one that is on)",
    )
    parser.add_argument("--tokens", type=int, default=d.n_tokens, help=f"tokens per answer (default {d.n_tokens})")
    parser.add_argument(
        "--prompt", type=int, default=d.n_prompt, help=f"tokens of an arriving prompt (default {d.n_prompt})"
    )
    add_results(parser)


def run(args: argparse.Namespace) -> int:
    """Check, keep, print."""
    if args.tokens < 4 or args.prompt < 8:
        raise BenchError("--tokens must be at least 4 and --prompt at least 8")
    sizes = Sizes(args.tokens, args.prompt)
    models, given = take_models(args.flags)
    paths = [model_path(name) for name in models or MODELS]
    configs = [config_of(_flags(path, sizes, given)) for path in paths]
    names = _names(args.plugin, configs[0])
    rows = []
    with record.ResultFolder("check", args.results) as folder:
        for path, config in zip(paths, configs, strict=True):
            for name in (NO_PLUGIN, *names):
                with tqdm(desc=f"{name}, {path.stem}", unit="tok", leave=False, disable=None) as bar:
                    rows.append(
                        {"model": path.name, **check(config, name, sizes, _stages(bar, f"{name}, {path.stem}"))}
                    )
        result = {
            "bench": NAME,
            "flags": record.without_paths(given),
            "sizes": asdict(sizes),
            "tie_margin_nats": TIE_MARGIN,
            "rows": rows,
            "failures": failures(rows, [] if args.plugin else _inapplicable(rows)),
            "record": record_of(configs[0].build, *paths),
        }
        folder.write("result.json", result)
        folder.text("table.txt", table(result) + "\n")
    print(table(result))
    print(f"kept in {folder.final}", file=sys.stderr)
    return 1 if result["failures"] else 0


def _inapplicable(rows: list[dict[str, Any]]) -> list[str]:
    """Plugins that nobody asked for by name and that say of every model that they do not apply here."""
    statuses: dict[str, set[str]] = {}
    for row in rows:
        statuses.setdefault(row["plugin"], set()).add(row["status"])
    return [name for name, found in statuses.items() if found == {NOT_APPLICABLE}]


def _flags(model: Path, sizes: Sizes, given: list[str]) -> list[str]:
    n_ctx = N_SLOTS * sizes.n_ctx_slot
    return ["-m", str(model), "-np", str(N_SLOTS), "--no-kv-unified", "-c", str(n_ctx), "-lv", "2", *NO_CACHE, *given]


def _names(asked: list[str], config: Config) -> list[str]:
    """Plugins to check. Raises BenchError for one that is not there, or when none is."""
    found = discover()
    names = [name.strip() for word in asked for name in word.split(",") if name.strip()]
    for name in names:
        if name not in found:
            raise BenchError(unknown(name, found))
    names = names or list(select(config.plugins, found).order)
    if not names:
        raise BenchError("no plugin is on: name one with --plugin, or leave --enable none out")
    return names


def _stages(bar: Any, title: str) -> Stage:
    def begin(stage: str) -> Callable[[int], None]:
        bar.set_description(f"{title}: {stage}")
        return bar.update  # type: ignore[no-any-return]

    return begin


def check(config: Config, name: str, sizes: Sizes, stage: Stage = lambda stage: lambda n: None) -> dict[str, Any]:
    """One plugin with one model; `(none)` checks that the model repeats itself."""
    found = discover()
    guard, unit, names = Guard.same_tokens(), "", ()
    if name != NO_PLUGIN:
        declaration = declaration_of(name, found)
        guard, unit, names = declaration.guard, declaration.effect, (*declaration.requires, name)
    plugins = replace(config.plugins, enable=names, disable=(), only=bool(names), none=not names)
    options = {n: {**OPTIONS.get(n, {}), **config.plugins.options.get(n, {})} for n in names}
    plugins = replace(plugins, options={**config.plugins.options, **options})
    row: dict[str, Any] = {"plugin": name, "guard": str(guard), "effect_unit": unit}
    try:
        with opened(replace(config, plugins=plugins)) as engine:
            return {**row, **check_engine(engine, name, guard, sizes, stage)}
    except Exception as error:
        reason = unavailable(error)
        if reason is None:
            raise
        return {**row, "status": NOT_APPLICABLE, "reason": reason}


def check_engine(
    engine: Engine, name: str, guard: Guard, sizes: Sizes, stage: Stage = lambda stage: lambda n: None
) -> dict[str, Any]:
    """The same with an engine that is loaded, not started, and closed afterwards by the caller."""
    done = trace(engine, sizes, guard.kind is GuardKind.CLOSE, stage("recording"))
    vocab, never = engine.vocab, forbidden(engine.vocab, ignore_eos=True)
    with without_plugins(engine) as (llama, context, kv):
        replayed = same_shapes(done, llama, context, kv, vocab, never, stage("the same batches"))
        by_itself = alone(done, llama, context, kv, vocab, engine.runner.n_batch, never, stage("each request alone"))
        settle((replayed, by_itself), done, llama, context, kv, vocab, never, stage("what differs, cut otherwise"))
    effect = done.effects.get(name, 0)
    reason = misfed(done) or missing(done) or broken(guard, replayed, by_itself)
    status = VIOLATED if reason else HELD
    if reason is None and name != NO_PLUGIN and effect == 0:
        status, reason = DID_NOT_ACT, "its effect counter did not move, so nothing was checked"
    return {
        "status": status,
        "reason": reason,
        "effect": effect,
        "n_requests": len(done.answers),
        "same_batches": replayed.json(),
        "alone": by_itself.json(),
    }


@contextmanager
def without_plugins(engine: Engine) -> Iterator[tuple[Any, Any, KVCache]]:
    """The engine's model with a fresh context of the same kind, all plugins' switches at their defaults."""
    llama = native.load(engine.config.build).llama
    runner: Any = engine.runner
    handle = llama.llama_get_model(runner.context)
    engine.plugins.stop()
    runner.close()  # its memory may be needed; the model stays
    if engine.plugins.apply_switches is not None:
        engine.plugins.apply_switches({})
    config, model = engine.config, engine.model
    context = new_context(native.load(config.build), handle, config)
    try:
        n_swa = 0 if config.context.swa_full else model.n_swa
        yield llama, context, KVCache(llama, context, is_recurrent=model.is_recurrent or model.is_hybrid, n_swa=n_swa)
    finally:
        llama.llama_free(context)


def failures(rows: list[dict[str, Any]], excused: Sequence[str] = ()) -> list[str]:
    """What is wrong, a sentence each. Plugins that are `excused` may not apply to any model."""
    out = []
    for row in rows:
        if row["status"] == VIOLATED and row["plugin"] == NO_PLUGIN:
            out.append(f"{row['model']} does not repeat itself with all plugins off: {row['reason']}")
        elif row["status"] == VIOLATED:
            out.append(f"{row['plugin']} with {row['model']}: {row['reason']}")
    checked = {row["plugin"] for row in rows if row["status"] in (HELD, VIOLATED)}
    for name in dict.fromkeys(row["plugin"] for row in rows):
        if name not in checked and name not in excused:
            reasons = "; ".join(f"{row['model']}: {row['reason']}" for row in rows if row["plugin"] == name)
            out.append(f"{name} was not checked with any model ({reasons})")
    return out


def table(result: Mapping[str, Any]) -> str:
    """The result for people."""
    head = ("plugin", "model", "guard", "requests", "positions", "same bits", "ties", "violations", "")
    lines = [head]
    for row in result["rows"]:
        same, by_itself = row.get("same_batches"), row.get("alone")
        figures = ("", "", "", "", "")
        if same is not None:
            figures = (
                str(row["n_requests"]),
                f"{same['n_positions']} + {by_itself['n_positions']}",
                f"{100 * same['n_same_bits'] / max(same['n_positions'], 1):.1f} %",
                " + ".join(_share(count) for count in (same, by_itself)),
                f"{same['n_violations']} + {by_itself['n_violations']}",
            )
        lines.append((row["plugin"], Path(row["model"]).stem, row["guard"], *figures, row["status"]))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    out = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    out.append("")
    out.append("n + m: in the same batches without the plugin + each request alone")
    out.append(
        f"tie: the given token was less than {result['tie_margin_nats']:g} nats behind the best one, "
        "or the model gives both, depending on the batches"
    )
    out += [
        f"{row['plugin']}, {row['model']}: {row['status']}: {row['reason']}" for row in result["rows"] if row["reason"]
    ]
    out += [f"FAILED: {sentence}" for sentence in result["failures"]]
    return "\n".join(out)


def _share(count: dict[str, Any]) -> str:
    return f"{count['n_ties']} ({100 * count['n_ties'] / max(count['n_positions'], 1):.1f} %)"


if __name__ == "__main__":
    from .program import alone as _alone

    sys.exit(_alone(sys.modules[__name__]))
