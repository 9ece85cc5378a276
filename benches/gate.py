"""What a prompt costs the streams beside it: `llamamg bench gate [flags of llamamg serve]`.

One set of sessions that decode, in one context with the prompts or in another one beside theirs (`--contexts`). First t(c),
the time between two tokens with c prompt tokens in every batch, and the bound it implies; then the same prompts under each
policy: gaps between tokens against those of the sessions alone, and the prompts' rate against that of one when nobody decodes.
`off` leaves the gate out: decode rows first, then prompts up to --batch-size, which is how upstream fills a batch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from llamamg import library
from llamamg.config import Config
from llamamg.devices import split
from llamamg.engine import Engine
from llamamg.model import load_model
from llamamg.modelfile import open_model
from llamamg.plugins import PluginSet, discover
from llamamg.plugins.discovery import Found

from . import program, record
from .arguments import add_results, record_of
from .errors import BenchError
from .flags import config_of, model_path, opened, take_models, with_plugin
from .gate_measure import Plan, measure
from .gate_policy import Policy, Switched
from .gate_table import table
from .grid_cells import parse_counts

NAME = "gate"
HELP = "time of a step with c prompt tokens, and what each policy of prefill-gate makes of it"
SERVE_FLAGS = True
POLICIES = {
    "one": ("itl-ratio=3,min-share=0.3", "itl-target-ms=60", "chunk=256,itl-ratio=0", "off"),
    "separate": ("itl-ratio=2,min-share=0.3", "itl-ratio=5,min-share=0.65"),
}
GROUPS = "decode-groups"
# The bench has a gate of its own; drafts are tokens that come in bunches.
NOT_MEASURED = ("prefill-gate", "spec")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command line."""
    add = parser.add_argument
    add("--decoders", type=int, default=2, metavar="N", help="sessions that decode (default %(default)s)")
    add("--prompts", type=int, default=1, metavar="N", help="prompts that arrive together (default %(default)s)")
    add("--then", metavar="D+P", help="after that, D sessions and P prompts under the first policy, e.g. 4+2")
    add("--depth", type=int, default=512, metavar="N", help="tokens a session begins with (default %(default)s)")
    add("--prompt", type=int, default=2048, metavar="N", help="tokens of an arriving prompt (default %(default)s)")
    add("--short", type=int, default=0, metavar="N",
        help="a prompt of so many tokens arrives in the middle of the long ones; 0: none (default %(default)s)")  # fmt: skip
    add("--solo", type=int, default=0, metavar="N",
        help="how much of a prompt is computed by itself, to know that rate; 0: all of it (default %(default)s)")  # fmt: skip
    add("--chunks", default="1,2,4,8,16,32,64,128,256,512", metavar="LIST", help="values of c (default %(default)s)")
    add("--steps", type=int, default=10, metavar="N", help="steps timed for each c (default %(default)s)")
    add("--alone", type=int, default=500, metavar="N", help="steps timed without a prompt (default %(default)s)")
    add("--gaps", type=int, default=500, metavar="N",
        help="a policy ends when each session has had so many gaps; prompts that end are followed by others. "
        "0: it ends with the prompts (default %(default)s)")  # fmt: skip
    add("--seconds", type=float, default=0.0, metavar="S",
        help="a policy ends after so long in any case; 0: no limit (default %(default)s)")  # fmt: skip
    add("--block", type=int, default=512, metavar="N",
        help="prompt tokens of each block with the gate on or off and nobody decoding; 0: none (default %(default)s)")  # fmt: skip
    add("--block-steps", type=int, default=50, metavar="N",
        help="steps of each block with the gate on or off and no prompt; 0: none (default %(default)s)")  # fmt: skip
    add("--contexts", default="one", choices=("one", "separate", "both"),
        help="one: prompts in the context of the sessions; separate: in one of their own (decode-groups); both, one "
        "after the other (default %(default)s)")  # fmt: skip
    add("--policy", action="append", default=[], metavar="OPTIONS",
        help="for one context: options of prefill-gate, e.g. itl-target-ms=60,min-share=0.3, or off; @S behind them "
        f"is a limit of S seconds for this one; repeat it for several (default: {' '.join(POLICIES['one'])})")  # fmt: skip
    add("--separate-policy", action="append", default=[], metavar="OPTIONS",
        help="the same for separate contexts, and there prefill-sms=N too, the SMs that prompts may use: "
        f"itl-ratio=2,prefill-sms=96 or off,prefill-sms=96 (default: {' '.join(POLICIES['separate'])})")  # fmt: skip
    add("--so-far", type=Path, metavar="FILE", help="keep what is measured so far there, table and JSON")
    add("--synthetic", metavar="TEXT", help="how a generated model was made, for the record")
    add_results(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, keep, print."""
    for name, least in (("decoders", 1), ("prompts", 1), ("depth", 8), ("prompt", 64), ("steps", 4), ("alone", 20)):
        if getattr(args, name) < least:
            raise BenchError(f"--{name} must be at least {least}")
    if not args.gaps and args.seconds:
        raise BenchError("--seconds limits --gaps: give both, or neither")
    chunks = parse_counts(args.chunks, "--chunks")
    then = _pair(args.then) if args.then else None
    if then and then[0] <= args.decoders:
        raise BenchError(f"--then {args.then}: more sessions than --decoders {args.decoders}, which go on meanwhile")
    policies = {
        "one": [Policy.parse(text) for text in args.policy or POLICIES["one"]],
        "separate": [Policy.parse(text) for text in args.separate_policy or POLICIES["separate"]],
    }
    if any(policy.n_sms for policy in policies["one"]):
        raise BenchError("prefill-sms bounds a context for prompts: give it to --separate-policy")
    models, given = take_models(args.flags)
    model = model_path(models[0] if models else "demo")
    n_prompts = max(args.prompts, then[1] if then else 0) + (args.short > 0)
    n_slots = max(args.decoders + args.prompts, sum(then) if then else 0) + (args.short > 0)
    flags = ["-m", str(model), "-np", str(n_slots), "--no-kv-unified", "-c", str(n_slots * _n_ctx(args, policies)),
             "-lv", "2", *given]  # fmt: skip
    config = config_of(flags)
    plan = Plan(args, chunks, then)
    result: dict[str, Any] = {
        "bench": NAME,
        "sizes": {name: getattr(args, name) for name in ("depth", "prompt", "short", "gaps", "seconds")},
        "flags": record.without_paths(flags),
        "contexts": [],
    }
    names = ("one", "separate") if args.contexts == "both" else (args.contexts,)
    with record.ResultFolder(NAME, args.results) as folder, _model(config) as handle:
        for name in names:
            with _engine(config, name, n_prompts, handle) as engine:
                part = {"contexts": name, "flights": engine.runner.n_contexts}
                result["contexts"].append(part)
                for _ in measure(engine, plan, policies[name], part):
                    if args.so_far:  # what is there, should the rest be cut off
                        args.so_far.write_text(table(result) + "\n\n" + json.dumps(result) + "\n", encoding="utf-8")
        result["record"] = record_of(config.build, Path(model))
        if args.synthetic:
            result["record"]["synthetic"] = args.synthetic
        folder.write("result.json", result)
        folder.text("table.txt", table(result) + "\n")
    print(table(result))
    print(f"kept in {folder.final}", file=sys.stderr)
    return 0


def _pair(text: str) -> tuple[int, int]:
    parts = text.split("+")
    if len(parts) != 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise BenchError(f"--then {text}: sessions and prompts, such as 4+2")
    return int(parts[0]), int(parts[1])


def _n_ctx(args: argparse.Namespace, policies: dict[str, list[Policy]]) -> int:
    """Tokens of a slot: what a session gets in all policies, or a prompt."""
    n_most = max(map(len, policies.values())) + 1
    steps = len(args.chunks.split(",")) * (args.steps + 8)
    need = args.depth + 2 * args.alone + 8 * args.block_steps + steps + n_most * (2 * args.gaps + 64) + 4096
    return -(-max(need, args.prompt + 64) // 256) * 256


@contextlib.contextmanager
def _model(config: Config) -> Iterator[Any]:
    """The loaded model, for one engine after the other."""
    lib = library.load(config.build)
    header = open_model(config.model.path)
    resolved = split.resolve(lib, config, header, lambda sentence: print(sentence, file=sys.stderr), pooled_keys=True)
    handle = load_model(lib, resolved.model)
    try:
        yield handle
    finally:
        lib.llama.llama_model_free(handle)


@contextlib.contextmanager
def _engine(config: Config, contexts: str, n_prompts: int, handle: Any) -> Iterator[Engine]:
    """An engine with the plugins asked for, the bench's gate, and as many contexts as wanted."""
    found = dict(discover())
    for name in NOT_MEASURED:
        if name in found:
            config = with_plugin(config, name, False)
    if contexts == "one":
        config = with_plugin(config, GROUPS, False)
    else:
        given = dict(config.plugins.options.get(GROUPS, {}))
        options = {"groups": "1", "prefill-slots": str(n_prompts), **given}
        config = replace(config, plugins=replace(config.plugins, options={**config.plugins.options, GROUPS: options}))
        config = with_plugin(config, GROUPS, True)
    declaration = Switched.declaration  # type: ignore[attr-defined]
    found[declaration.name] = Found(declaration.name, False, "this bench", Switched, declaration)
    config = with_plugin(config, declaration.name, True)
    Switched.stamps.clear()
    Switched.gate = None
    with opened(config, PluginSet(config.plugins, found), handle) as engine:
        yield engine


if __name__ == "__main__":
    sys.exit(program.alone(sys.modules[__name__]))
