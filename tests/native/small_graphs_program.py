"""Random interleavings of decoding rows, prompt chunks, cancels and copies, for test_small_graphs.py.

usage: small_graphs_program.py MODEL ENDPOINT,ENDPOINT      the same over rpc devices; prints JSON
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from qsa_context import Context, Logits, Model

from llamamg import library
from llamamg.config import ModelConfig
from llamamg.library import Library
from llamamg.model import load_model

SWITCH = "small-graphs"
COUNTS = ("ubatch", "reused", "spared", "built")


@contextmanager
def counted(lib: Library) -> Iterator[dict[str, int]]:
    """What the native library counts inside a `with`."""
    before = {name: lib.mg.trace_count(name) for name in COUNTS}
    counts: dict[str, int] = {}
    yield counts
    counts.update({name: lib.mg.trace_count(name) - before[name] for name in COUNTS})


class Program:
    """Operations on the sequences of a context: ("decode", rows, n_logits), ("remove", seq), ("copy", from, to).

    Batches come in runs of the same shape, as in a server: some sequences decode (or verify drafts), one is a prompt. A
    run ends anywhere; often its prompt is cancelled, so that it begins again.
    """

    def __init__(self, model: Model, seed: int, n_seq: int, n_run: int) -> None:
        self._chance = np.random.default_rng(seed)
        self._at = [0] * n_seq
        self._n_token = min(model.n_vocab, 40000)
        self.operations: list[tuple[Any, ...]] = []
        for _ in range(n_run):
            self._run()

    def _run(self) -> None:
        chance, at = self._chance, self._at
        prompt, *others = (int(i) for i in chance.permutation(len(at)))
        chunk = int(chance.choice([0, 1, 2, 5, 31, 64, 70, 150]))
        n_draft = int(chance.choice([0, 0, 0, 3]))
        decoders = [seq for seq in others if at[seq] and chance.random() < 0.7]
        is_last = False
        for _ in range(int(chance.integers(2, 7))):
            n = chunk if at[prompt] + chunk < 480 else 0
            is_last = chance.random() < 0.2
            rows = self._rows(prompt, n)
            for seq in decoders:
                if at[seq] < 500:
                    rows += self._rows(seq, 1 + n_draft)
            n_decode = len(rows) - n
            if rows:
                self.operations.append(("decode", rows, max(1, n_decode + (is_last and n > 0))))
        if chance.random() < 0.5 and at[prompt]:
            self.operations.append(("remove", prompt))
            at[prompt] = 0
        elif chance.random() < 0.2 and at[prompt]:
            self.operations += [("remove", others[0]), ("copy", prompt, others[0])]
            at[others[0]] = at[prompt]

    def _rows(self, seq: int, n: int) -> list[tuple[int, int, int]]:
        begin = self._at[seq]
        self._at[seq] += n
        return [(seq, begin + i, int(self._chance.integers(self._n_token))) for i in range(n)]


def run(program: Program, context: Context, values: Sequence[int] | None) -> list[Logits]:
    """Logits of each batch. `values`: the switch, five operations each, in turn; None leaves it."""
    mg = context.model.library.mg
    before = mg.switch(SWITCH)
    results = []
    try:
        for i, (what, *arguments) in enumerate(program.operations):
            if values is not None:
                mg.set_switch(SWITCH, values[i // 5 % len(values)])
            if what == "remove":
                assert context.remove(arguments[0], 0)
            elif what == "copy":
                context.copy(*arguments)
            else:
                rows, n_logits = arguments
                results.append(context.decode(rows, min(n_logits, len(rows))))
    finally:
        mg.set_switch(SWITCH, before)
    return results


def main() -> None:
    path, endpoints = sys.argv[1:]
    lib = library.load()
    model = Model.__new__(Model)
    model.library, model.llama = lib, lib.llama
    model.pointer = load_model(lib, ModelConfig(Path(path), rpc=tuple(endpoints.split(",")), n_gpu_layers="all"))
    model.n_vocab = lib.llama.llama_vocab_n_tokens(lib.llama.llama_model_get_vocab(model.pointer))
    program = Program(model, 11, 4, 15)
    results, spared = [], {}
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        lib.mg.set_log("info", log)
        with lib.mg.held({"prefill-rebuild": 1, "stable-graph": 1}):
            for values in ([0], [1], [3], [0, 2]):
                with counted(lib) as counts, Context(model, n_seq=4, n_ubatch=64) as context:
                    results.append(run(program, context, values))
                spared[str(values)] = counts["spared"]
        lib.mg.set_log("warn")
        pipeline = "pipeline parallelism enabled" in log.read_text()
    different = sum(int((a != b).any()) for other in results[1:] for a, b in zip(results[0], other, strict=True))
    print(json.dumps({"pipeline": pipeline, "n_result": len(results[0]), "n_different": different, "spared": spared}))


if __name__ == "__main__":
    main()
