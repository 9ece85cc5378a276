"""A small model with a vocabulary as large as the published one's: sampling kernels need logits of that size."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from llamamg import synth
from llamamg.paths import home
from llamamg.synth.preset import FULL, PRESETS

from .errors import BenchError


def large_vocabulary_model() -> Path:
    """Made on first use. $LLAMAMG_KERNELS_MODEL names another model to take the vocabulary's size from."""
    if os.environ.get("LLAMAMG_KERNELS_MODEL"):
        return Path(os.environ["LLAMAMG_KERNELS_MODEL"])
    path = home() / "models" / "micro-248k.gguf"
    if not path.is_file():
        print(f"writing {path.name}, once ...", file=sys.stderr, flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        PRESETS[path.stem] = replace(
            PRESETS["micro"], name=path.stem, vocab_file=FULL.vocab_file, n_vocab_min=FULL.n_vocab_min
        )
        try:
            synth.write_model(path, preset=path.stem, progress=True)
        except synth.SynthError as error:
            raise BenchError(f"the model for sampling kernels cannot be written: {error}") from error
    return path
