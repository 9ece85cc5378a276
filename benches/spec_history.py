"""How long a look-up and an update of the lookup index take behind a long text."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from tqdm import tqdm

from llamamg import DraftIndex, Options
from llamamg_plugins.spec_options import declare
from llamamg_plugins.spec_types import NAMES, kind

N_VOCAB = 150_000
N_MEASURED = 400


def history(n_tokens: int) -> list[dict[str, Any]]:
    """For each kind: µs of a draft and of an update as the plugin makes them, behind `n_tokens` of which a third repeats."""
    random = np.random.default_rng(0)
    phrase = random.integers(0, N_VOCAB, 5000)
    pieces = [random.integers(0, N_VOCAB, 5000) if i % 3 else phrase for i in range(-(-n_tokens // 5000))]
    text = np.concatenate([*pieces, phrase[: N_MEASURED + 64]]).astype(np.int32)
    begin = len(text) - N_MEASURED
    declared = Options("spec")
    declare(declared)
    return [_measure(name, text, begin, declared.values({})) for name in tqdm(NAMES, desc="index", leave=False)]


def _measure(name: str, text: Any, begin: int, sizes: Any) -> dict[str, Any]:
    chosen = kind(name, sizes)
    index = DraftIndex(chosen.orders, 64)
    began = time.perf_counter()
    for at in range(2048, begin, 2048):
        index.follow(text[:at])
    index.follow(text[:begin])
    build_s = time.perf_counter() - began
    drafts, updates, lengths = [], [], []
    for n in range(begin, len(text) - 1):
        t0 = time.perf_counter()
        index.follow(text[:n])
        t1 = time.perf_counter()
        draft = index.draft(int(text[n]), chosen.rule, 63)
        t2 = time.perf_counter()
        updates.append(1e6 * (t1 - t0))
        drafts.append(1e6 * (t2 - t1))
        lengths.append(len(draft.tokens))
    return {
        "kind": name,
        "n_tokens": begin,
        "draft_us": _spread(drafts),
        "update_us": _spread(updates),
        "build_us_per_token": 1e6 * build_s / begin,
        "n_drafted": float(np.mean(lengths)),
        "mib": index.n_bytes / 2**20,
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": float(np.median(values)), "p99": float(np.percentile(values, 99)), "max": max(values)}
