"""Answers asked again with nothing else running: equal, a near tie, or changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from llamamg.guard import TIE_MARGIN

from .sides import Server
from .soak_client import Kept, body

N_PROBS = 20  # candidates looked at where an answer differs


def again(server: Server, kept: Sequence[Kept], name: str) -> dict[str, Any]:
    """Each request by itself; how many tokens were the same, and what the others were."""
    counts: dict[str, Any] = {"n": len(kept), "n_equal": 0, "n_ties": 0, "changed": []}
    for one in tqdm(kept, desc=f"{name}, alone", unit="request", disable=None):
        answer = server.post("/completion", body(one.prompt, one.n_predict, n_probs=N_PROBS))
        tokens = list(answer["tokens"])
        if tokens == one.tokens:
            counts["n_equal"] += 1
            continue
        at = next((i for i, (a, b) in enumerate(zip(tokens, one.tokens, strict=False)) if a != b), -1)
        behind = float("inf")
        if at >= 0:
            behind = behind_by(answer, at, one.tokens[at])
            if behind >= TIE_MARGIN:
                behind = min(behind, *otherwise(server, one, at))
        if behind < TIE_MARGIN:
            counts["n_ties"] += 1
        else:
            said = None if np.isinf(behind) else round(behind, 3)
            counts["changed"].append({"at": at, "n_prompt": len(one.prompt), "behind_nats": said})
    return counts


def otherwise(server: Server, one: Kept, at: int) -> list[float]:
    """How far the token is behind when the text up to it is computed in other batches: at once, and in two pieces.

    A quantized model with experts does not give one answer: what counts as changed must be changed in all of them.
    """
    text, found = [*one.prompt, *one.tokens[:at]], []
    for n_first in (0, len(text) * 2 // 3):
        if n_first:
            server.post("/completion", {**body(text[:n_first], 1), "id_slot": 0})
        again = {**body(text, 1, n_probs=N_PROBS), "id_slot": 0, "cache_prompt": n_first > 0}
        found.append(behind_by(server.post("/completion", again), 0, one.tokens[at]))
    return found


def behind_by(answer: dict[str, Any], at: int, token: int) -> float:
    """How far a token was behind the best one at this place, in nats; infinite when it is not among the best."""
    top = answer["completion_probabilities"][at]["top_logprobs"]
    best = max(candidate["logprob"] for candidate in top)
    found = [candidate["logprob"] for candidate in top if candidate["id"] == token]
    return float(best - found[0]) if found else float("inf")
