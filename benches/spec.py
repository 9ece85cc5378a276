"""Lookup speculation on and off: what drafts gain, what they could gain at most, and what they cost those who do not draft.

One engine; the plugin spec is switched between blocks in A-B-B-A order. Every session continues the same prompt each time, so with
drafts and without it generates the same text; where not, it must be a near tie. The ceiling is the time of a batch of 1 + w tokens
against one of 1, measured on the same context: w + 1 over their ratio is what a draft of w tokens reaches when all of it is right.
Exit status 1: a token was changed.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from typing import Any

from tqdm import tqdm

from . import record
from .arguments import add_results, record_of
from .errors import BenchError
from .flags import config_of, model_path, opened, take_models
from .pairs import compare, order
from .quiet import busy_fraction
from .spec_blocks import PLUGIN, Block, Sessions, ceiling, report
from .spec_history import history
from .spec_loads import CELLS, script_of, scripted
from .spec_steps import summed_up, told
from .tokens import Reference, TokenCount

NAME = "spec"
HELP = "lookup speculation on and off: gain, ceiling, what neighbours lose"
SERVE_FLAGS = True
DEFAULT_CELLS = "repeat,list,prose,four"
DEFAULT_TYPE = "suffix"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command line."""
    add = parser.add_argument
    cells = "; ".join(f"{cell.name}: {cell.help}" for cell in CELLS.values())
    add(
        "--cells",
        default=DEFAULT_CELLS,
        help=f"what is measured, separated by commas (default {DEFAULT_CELLS}). {cells}",
    )
    add("--pairs", type=int, default=6, help="pairs of blocks, on and off (default 6; 3 or more)")
    add("--tokens", type=int, default=160, help="tokens that a session generates in a block (default 160)")
    add(
        "--depth",
        type=int,
        default=0,
        help="tokens that each session holds at least: random ones before its text (default 0)",
    )
    add(
        "--history",
        type=int,
        default=250_000,
        help="tokens behind which the index is timed (default 250000; 0: leave out)",
    )
    add("--synthetic", metavar="TEXT", help="parameters of a model that was generated, for the record")
    add_results(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, keep, print."""
    names = [name for name in args.cells.split(",") if name]
    unknown = [name for name in names if name not in CELLS]
    if unknown:
        raise BenchError(f"there is no cell {unknown[0]!r}: use {', '.join(CELLS)}")
    if args.pairs < 3 or args.tokens < 16:
        raise BenchError("--pairs must be at least 3 and --tokens at least 16")
    models, given = take_models(args.flags)
    model = model_path(models[0] if models else "demo")
    n_slots = max((len(CELLS[name].texts) for name in names), default=1)
    per_slot = -(-(max(args.depth, 512) + 8 * args.tokens + 1024) // 256) * 256
    kind = [] if "--spec-type" in given else ["--spec-type", DEFAULT_TYPE]
    kind += [] if "--enable" in given else ["--enable", f"only:{PLUGIN}"]
    defaults = ["-np", str(n_slots), "--no-kv-unified", "-c", str(n_slots * per_slot), "-lv", "2", *kind]
    flags = ["-m", str(model), *defaults, *given]
    config = config_of(flags)
    result: dict[str, Any] = {
        "bench": NAME,
        "flags": record.without_paths(flags),
        "tokens": args.tokens,
        "depth": args.depth,
    }
    with record.ResultFolder(NAME, args.results) as folder:
        result["busy_before"] = busy_fraction()
        with opened(config) as engine:
            engine.plugins.start(engine)
            if PLUGIN not in engine.plugins.enabled():
                raise BenchError(
                    next(v.reason or v.quarantined or "" for v in engine.plugins.views() if v.name == PLUGIN)
                )
            with tqdm(total=len(names) * (2 * args.pairs + 4), desc="blocks", disable=None) as bar:
                result["cells"] = [measure(engine, name, args, bar) for name in names]
            result["report"] = report(engine)
            if args.history:
                result["history"] = history(args.history)
        result["record"] = (
            record_of(config.build, model) if args.synthetic is None else _record(config, model, args.synthetic)
        )
        folder.write("result.json", result)
        folder.text("table.md", table(result) + "\n")
    print(table(result))
    print(f"kept in {folder.final}", file=sys.stderr)
    return 1 if any(cell["tokens_on"]["n_changed"] for cell in result["cells"]) else 0


def _record(config: Any, model: Any, synthetic: str) -> dict[str, Any]:
    from llamamg import library

    build = library.find(config.build)
    info = record.build(build) or record.build(build.parent)
    return record.everything(build=info, models=[record.model(model, synthetic)])


def measure(engine: Any, name: str, args: argparse.Namespace, bar: Any) -> dict[str, Any]:
    """One cell: a reference with other candidates, a block to learn in, pairs of blocks, the ceiling."""
    cell = CELLS[name]
    for slot in engine.slots:
        engine.scheduler.clear(slot)
    speaking = scripted(cell.scripted, script_of(engine.vocab).tolist()) if cell.scripted else nullcontext()
    with speaking:
        sessions = Sessions(engine, cell, args.depth, args.tokens)
        sessions.block(False)  # computes the prompts
        first = sessions.block(False, with_others=not cell.scripted)
        bar.update(2)
        learned = sessions.block(True)
        bar.update(1)
        blocks: dict[bool, list[Block]] = {True: [], False: []}
        for side in order(args.pairs):
            blocks[side == "A"].append(sessions.block(side == "A"))
            bar.update(1)
    counts = {True: TokenCount(), False: TokenCount()}
    if not cell.scripted:
        reference = Reference(first.tokens, first.others)
        for on, all_of in blocks.items():
            for block in all_of:
                counts[on].add(*reference.compare(block.tokens))
    widths = report(engine)["widths"]
    found = ceiling(engine, widths)
    bar.update(1)
    early = {
        "rate": learned.rate,
        "drafts_by_width": learned.counts["drafts_by_width"],
        "accepted": learned.counts["accepted"],
    }
    counted = {"first_on": early, "tokens_on": counts[True].json(), "tokens_off": counts[False].json()}
    return summary(name, blocks, found) | counted


def summary(name: str, blocks: dict[bool, list[Block]], found: dict[str, Any]) -> dict[str, Any]:
    """Ratios of on over off, with their intervals; the share of the ceiling of the width that drafted most."""
    on, off = blocks[True], blocks[False]
    out: dict[str, Any] = {"cell": name, "rate_on": [b.rate for b in on], "rate_off": [b.rate for b in off]}
    out["gain"] = _ratio([b.rate for b in on], [b.rate for b in off])
    if on[0].neighbour_rate:
        out["neighbours"] = _ratio([b.neighbour_rate for b in on], [b.neighbour_rate for b in off])
    by_width: dict[str, int] = {}
    for block in on:
        for width, n in block.counts["drafts_by_width"].items():
            by_width[width] = by_width.get(width, 0) + n
    out["drafts_by_width"] = by_width
    out["steps"] = summed_up([b.steps for b in on], [b.steps for b in off])
    for key in ("drafts", "drafted", "accepted", "computed_again", "lookup_s", "verify_s"):
        out[key] = sum(block.counts[key] for block in on)
    out["no_draft"] = on[-1].counts["no_draft"]
    out["ceilings"] = found
    if by_width:
        width = max(by_width, key=lambda w: int(w) * by_width[w])  # the one that drafted most tokens
        out["width"], out["ceiling"] = int(width), found["ceiling"].get(width)
        out["of_ceiling"] = out["gain"]["median"] / out["ceiling"] if out["ceiling"] else None
    return out


def _ratio(on: list[float], off: list[float]) -> dict[str, Any]:
    c = compare(on, off)
    return {"median": c.median, "mean": c.mean, "interval": [c.low, c.high], "verdict": c.verdict}


def table(result: dict[str, Any]) -> str:
    """The result for people, from its JSON alone."""
    lines = [
        "| cell | off t/s | on / off | 99 % | drafted | accepted | width | ceiling | of it | neighbours on / off |",
        "| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for c in result["cells"]:
        low, high = c["gain"]["interval"]
        share = f"{c['accepted'] / c['drafted']:.0%}" if c["drafted"] else ""
        reached = f"{c['width']} | {c['ceiling']:.2f} | {c['of_ceiling']:.2f}" if c.get("of_ceiling") else " | | "
        beside = ""
        if "neighbours" in c:
            n_low, n_high = c["neighbours"]["interval"]
            beside = f"{c['neighbours']['median']:.3f} ({n_low:.3f} … {n_high:.3f})"
        off = sorted(c["rate_off"])[len(c["rate_off"]) // 2]
        lines.append(
            f"| {c['cell']} | {off:.1f} | {c['gain']['median']:.2f} | {low:.2f} … {high:.2f} | {c['drafted']} | {share} "
            f"| {reached} | {beside} |"
        )
    for c in result["cells"]:
        on = c["tokens_on"]
        if on["n_compared"]:
            lines.append(
                f"\n{c['cell']}: {on['n_compared']} tokens compared, {on['n_ties']} near ties, {on['n_changed']} changes."
            )
        if c["no_draft"]:
            lines.append(f"{c['cell']}: no draft: " + ", ".join(f"{why} {n}" for why, n in c["no_draft"].items()) + ".")
        ceilings = ", ".join(f"{w}: {value:.2f}" for w, value in c["ceilings"]["ceiling"].items())
        if "steps" in c:
            lines.append(told(c["cell"], c["steps"]))
        lines.append(f"{c['cell']}: ceilings (w + 1) t(1) / t(1 + w): {ceilings}.")
    if result.get("history"):
        lines += [
            "",
            "| index | tokens | draft µs, median | p99 | update µs | built µs/token | MiB |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        lines += [
            f"| {h['kind']} | {h['n_tokens']} | {h['draft_us']['median']:.1f} | {h['draft_us']['p99']:.1f} "
            f"| {h['update_us']['median']:.2f} | {h['build_us_per_token']:.3f} | {h['mib']:.1f} |"
            for h in result["history"]
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    from .program import alone

    sys.exit(alone(sys.modules[__name__]))
