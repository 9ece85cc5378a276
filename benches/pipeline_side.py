"""One build on one set of devices, in a process of its own; started by pipeline.py. Prints one JSON object per line.

The environment is the parent's matter: CUDA reads it once.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from llamamg import library
from llamamg.config import Config, ModelConfig, PluginsConfig
from llamamg.devices import split
from llamamg.model import load_model, new_context
from llamamg.modelfile import open_model

from .flags import config_of
from .json_side import say, serve

COUNTS = ("ubatch", "reused", "rebuilt", "realloc", "drained")


class Prefill:
    """A context, and one prompt cut into batches before anything is timed."""

    def __init__(self, lib: library.Library, model: Any, config: Config, n_tokens: int) -> None:
        self._lib, self._llama = lib, lib.llama
        self._context = new_context(lib, model, config)
        n_vocab = self._llama.llama_vocab_n_tokens(self._llama.llama_model_get_vocab(model))
        self._n_vocab, self._n_tokens = n_vocab, n_tokens
        tokens = np.random.default_rng(0).integers(0, n_vocab, n_tokens)
        self._batches = [
            self._batch(tokens, at, config.context.n_batch) for at in range(0, n_tokens, config.context.n_batch)
        ]

    def _batch(self, tokens: np.ndarray[Any, Any], at: int, n_batch: int) -> Any:
        piece = tokens[at : at + n_batch].tolist()
        batch = self._llama.llama_batch_init(len(piece), 0, 1)
        for i, token in enumerate(piece):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, at + i, 1, 0
            batch.logits[i] = at + i == self._n_tokens - 1
        batch.n_tokens = len(piece)
        return batch

    def run(self) -> float:
        """Compute the prompt from an empty cache; tokens per second."""
        llama = self._llama
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        llama.llama_synchronize(self._context)
        begin = time.perf_counter()
        for batch in self._batches:
            status = llama.llama_decode(self._context, batch)
            if status != 0:
                raise RuntimeError(f"llama_decode returned {status}: see the log above")
        llama.llama_synchronize(self._context)
        return self._n_tokens / (time.perf_counter() - begin)

    def digest(self) -> str:
        """Of the logits after the last token: equal for equal bits."""
        row = self._llama.llama_get_logits_ith(self._context, -1)
        return hashlib.sha256(ctypes.string_at(row, 4 * self._n_vocab)).hexdigest()[:16]

    def close(self) -> None:
        """Give everything back."""
        for batch in self._batches:
            self._llama.llama_batch_free(batch)
        self._llama.llama_free(self._context)


def on_one(lib: library.Library, model: ModelConfig) -> ModelConfig:
    """The same model on the first of its devices."""
    if model.devices is None and not model.rpc:
        gpus = [device.name for device in lib.mg.devices() if device.type in ("gpu", "igpu")]
        return replace(model, devices=tuple(gpus[:1]) or None, tensor_split=())
    if model.devices is not None:
        return replace(model, devices=model.devices[:1], tensor_split=())
    return replace(model, rpc=model.rpc[:1], tensor_split=())


def known(lib: library.Library) -> set[str]:
    """The switches of this build."""
    return {switch.name for switch in lib.mg.switches()}


def counts(lib: library.Library) -> dict[str, int]:
    """Drains and the like so far; an unpatched build counts nothing, and one from before some were counted not those."""
    found: dict[str, int] = {}
    for name in COUNTS if "trace" in known(lib) else ():
        with contextlib.suppress(KeyError):
            found[name] = lib.mg.trace_count(name)
    return found


def measure(
    lib: library.Library, model: Any, config: Config, cell: dict[str, Any], order: dict[str, Any]
) -> dict[str, Any]:
    """One cell: some shape, some switches."""
    compiled = known(lib)
    for name in compiled:
        lib.mg.set_switch(name, int(name in cell["switches"]))
    context = replace(config.context, n_batch=cell["n_batch"], n_ubatch=cell["n_ubatch"])
    prefill = Prefill(lib, model, replace(config, context=context), order["n_tokens"])
    try:
        prefill.run()  # pools grow and kernels are loaded in the first one
        before = counts(lib)
        rates = [prefill.run() for _ in range(order["repeats"])]
        after = counts(lib)
        result = {
            "rates": rates,
            "digest": prefill.digest(),
            "missing": sorted(set(cell["switches"]) - compiled),
            "counts": {name: (after[name] - before[name]) / len(rates) for name in before},
        }
        if cell.get("trace") and "trace" in compiled:
            lib.mg.set_switch("trace", 1)
            result["traced_rate"] = prefill.run()
            lib.mg.set_switch("trace", 0)
            lib.mg.write_trace(Path(cell["trace"]))
        return result
    finally:
        prefill.close()


def main(order: dict[str, Any]) -> None:
    """Measure all cells of one order."""
    lib = library.load()
    config = config_of(order["flags"])
    n_ctx = -(-(order["n_tokens"] + 1) // 256) * 256
    context = replace(config.context, n_ctx=n_ctx, n_parallel=1, kv_unified=False)
    config = replace(config, context=context, plugins=PluginsConfig(none=True))
    if order["devices"] == "one":
        config = replace(config, model=on_one(lib, config.model))
    config = split.resolve(lib, config, open_model(config.model.path), _note, pooled_keys=True)
    model = load_model(lib, config.model)
    say({"devices": [device.name for device in lib.mg.devices()], "build": str(lib.dir)})
    for cell in order["cells"]:
        say(measure(lib, model, config, cell, order))
    lib.llama.llama_model_free(model)


def _note(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    serve(main)
