"""The `llamamg synth` command."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from llamamg.synth.preset import PRESETS, SynthError
from llamamg.synth.writer import WEIGHTS, write_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write a qwen4exp model with random weights, for tests and speed measurements."
    parser.add_argument("out", metavar="OUT.gguf", type=Path, help="the file to write")
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        default="micro",
        help="micro: under 40 MB, for tests; full: the widths and layer mix of the published model (default: micro)",
    )
    parser.add_argument(
        "--experts",
        type=int,
        metavar="N",
        help="experts per layer; sets the file size, not the work per token "
        f"(default: {', '.join(f'{name} {preset.n_expert}' for name, preset in PRESETS.items())})",
    )
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="same seed, same bytes (default: 1)")
    parser.add_argument(
        "--weights",
        choices=WEIGHTS,
        default="default",
        help="encoding of the weight matrices; default is a mixture as in published quantisations (default: default)",
    )
    parser.add_argument("--ctx", type=int, metavar="N", help="trained context in tokens (default: 262144)")
    parser.add_argument(
        "--vocab",
        type=Path,
        metavar="FILE",
        help="GGUF whose tokenizer is copied (default: a vocabulary file of the tree that `llamamg build` unpacks)",
    )
    parser.add_argument(
        "--dense", action="store_true", help="same weights, but without the keys that switch sparse attention on"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="processes that write at the same time (default: 1)"
    )
    parser.add_argument("--force", action="store_true", help="replace OUT.gguf if it exists")


def run(args: argparse.Namespace) -> int:
    try:
        if args.out.exists() and not args.force and not args.out.is_dir():
            raise SynthError(f"{args.out} exists already: give --force to replace it, or another name")
        path = write_model(
            args.out,
            preset=args.preset,
            experts=args.experts,
            seed=args.seed,
            weights=args.weights,
            vocab=args.vocab,
            ctx=args.ctx,
            progress=True,
            dense=args.dense,
            n_processes=args.jobs,
        )
    except SynthError as error:
        print(f"llamamg synth: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nllamamg synth: interrupted; the unfinished file was removed", file=sys.stderr)
        return 130
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    return 0
