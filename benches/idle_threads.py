"""CPU time that ggml's threads take while nothing is to be computed: `python -m benches.idle_threads -m MODEL --threads 1,2`.

A step of one token is computed, then this thread sleeps as long as a GPU would compute the rest of it; whatever CPU time the
process takes meanwhile is that of threads that wait for the next step. Contexts of all numbers of threads take turns.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from llamamg import library
from llamamg.config import Config, ContextConfig, ModelConfig
from llamamg.model import load_model, new_context

from . import interrupt, record
from .arguments import add_results, record_of
from .errors import BenchError
from .flags import model_path
from .grid_cells import parse_counts
from .program import alone

NAME = "idle-threads"
N_CTX = 512
N_WARM = 4  # steps of each block that are not counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command line."""
    add = parser.add_argument
    add("-m", "--model", default="micro", metavar="FILE", help="a model; demo and micro are made here (default micro)")
    add("--threads", default="1,2", metavar="LIST", help="values of -t (default %(default)s)")
    add("--wait-ms", type=float, default=12.0, metavar="MS", help="from one step to the next (default %(default)s)")
    add("--steps", type=int, default=40, metavar="N", help="steps of each block (default %(default)s)")
    add("--blocks", type=int, default=4, metavar="N", help="blocks of each number of threads (default %(default)s)")
    add_results(parser)


class Steps:
    """A context that computes one token after the other."""

    def __init__(self, lib: library.Library, config: Config, model: Any) -> None:
        self._llama = lib.llama
        self._context = new_context(lib, model, config)
        self._batch = lib.llama.llama_batch_init(1, 0, 1)

    def block(self, n_steps: int, wait_s: float) -> list[float]:
        """CPU milliseconds of the process in each wait."""
        llama, batch, found = self._llama, self._batch, []
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        batch.n_tokens = batch.n_seq_id[0] = batch.logits[0] = 1
        batch.seq_id[0][0] = 0
        for pos in range(N_WARM + n_steps):
            interrupt.check()
            batch.token[0], batch.pos[0] = 100 + pos, pos
            if (code := llama.llama_decode(self._context, batch)) != 0:
                raise BenchError(f"llama_decode gave {code}")
            llama.llama_synchronize(self._context)
            begin = time.process_time()
            time.sleep(wait_s)
            found.append(1e3 * (time.process_time() - begin))
        return found[N_WARM:]

    def free(self) -> None:
        """Give the context back."""
        self._llama.llama_batch_free(self._batch)
        self._llama.llama_free(self._context)


def run(args: argparse.Namespace) -> int:
    """Measure, keep, print."""
    counts = parse_counts(args.threads, "--threads")
    if args.wait_ms <= 0 or args.blocks < 1 or not 1 <= args.steps <= N_CTX - N_WARM:
        raise BenchError(f"give --wait-ms above 0, --blocks from 1 on, and --steps from 1 to {N_CTX - N_WARM}")
    model = model_path(args.model)
    configs = [Config(ModelConfig(model), ContextConfig(n_ctx=N_CTX, n_parallel=1, n_threads=n)) for n in counts]
    lib = library.load()
    busy: dict[int, list[float]] = {n: [] for n in counts}
    with record.ResultFolder(NAME, args.results) as folder:
        handle = load_model(lib, configs[0].model, None)
        steps = [Steps(lib, config, handle) for config in configs]
        with tqdm(total=args.blocks * len(counts), desc=NAME, unit="block", disable=None) as bar:
            for _ in range(args.blocks):
                for n, one in zip(counts, steps, strict=True):
                    busy[n] += one.block(args.steps, args.wait_ms / 1e3)
                    bar.update(1)
        for one in steps:
            one.free()
        lib.llama.llama_model_free(handle)
        result = {
            "bench": NAME,
            "wait_ms": args.wait_ms,
            "n_blocks": args.blocks,
            "rows": [{"n_threads": n, "cpu_ms": [round(ms, 3) for ms in busy[n]], **spread(busy[n])} for n in counts],
            "record": record_of(None, model),
        }
        folder.write("result.json", result)
        folder.text("table.txt", table(result) + "\n")
    print(table(result))
    print(f"kept in {folder.final}", file=sys.stderr)
    return 0


def spread(cpu_ms: Sequence[float]) -> dict[str, float]:
    """Median, and the range of the middle 80 %."""
    low, median, high = (round(float(ms), 3) for ms in np.percentile(cpu_ms, (10, 50, 90)))
    return {"p10_ms": low, "p50_ms": median, "p90_ms": high}


def table(result: Mapping[str, Any]) -> str:
    """The result for people."""
    lines = [f"CPU time of the process while it waits {result['wait_ms']:g} ms for its next step"]
    lines += [
        f"-t {row['n_threads']}: {row['p50_ms']:.1f} ms ({row['p10_ms']:.1f} to {row['p90_ms']:.1f} in 8 of 10 waits)"
        for row in result["rows"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(alone(sys.modules[__name__]))
