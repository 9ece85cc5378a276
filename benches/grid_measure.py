"""One cell of the grid on one server: the prompts of all sessions at once, then generation from all of them at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import client
from .grid_cells import Cell
from .grid_prompts import Prompts
from .grid_watch import Watch
from .sides import Server, SideError

COUNT_KEY = b'"tokens_predicted":'


@dataclass(frozen=True, slots=True)
class Stream:
    """Arrivals of one session: seconds, and how many tokens there were then."""

    stamps: NDArray[np.float64]
    counts: NDArray[np.int64]

    def count_at(self, t: float) -> int:
        """Tokens that had come at `t`."""
        i = int(np.searchsorted(self.stamps, t, side="right"))
        return int(self.counts[i - 1]) if i else 0


def measure(
    server: Server, cell: Cell, prompts: Prompts, n_predict: int, watch: Watch, keep: bool = False
) -> dict[str, Any]:
    """Prefill and generation of a cell. `keep` saves the slot of a single session for cells that are copies of it.

    A copied cell has no prefill: every session holds the same tokens and goes on with another one. Raises SideError and
    ServerError.
    """
    row: dict[str, Any] = {"prefill": None, "prefill_watch": None}
    if cell.is_copied:
        texts = [prompts.make(0, cell.depth, cell.repeat)] * cell.n_sessions
        for session in range(cell.n_sessions):
            slot_file(server, session, "restore", cell)
    else:
        texts = [prompts.make(session, cell.depth, cell.repeat) for session in range(cell.n_sessions)]
        with watch.phase() as seen:
            first = _ask(server, [_body(text, 1, session, cache=False) for session, text in enumerate(texts)])
        row = {"prefill": prefill_row(first), "prefill_watch": seen.summary()}
        if keep and cell.n_sessions == 1:
            slot_file(server, 0, "save", cell)
    more = [_body(prompts.longer(text, i), n_predict, i, cache=True) for i, text in enumerate(texts)]
    with watch.phase() as seen:
        answers = _ask(server, more, keep=True)
    row["generate"] = generate_row([stream_of(a) for a in answers], server.name)
    row["generate"]["n_predict"] = n_predict
    row["generate"]["n_recomputed"] = sum(max(0, _timing(a, "prompt_n") - 1) for a in answers)
    row["generate"]["server_tps"] = [_timing(a, "predicted_per_second") for a in answers]
    row["generate_watch"] = seen.summary()
    return row


def slot_file(server: Server, slot: int, action: str, cell: Cell) -> None:
    """Save a slot under a name that its depth gives it, or load it. Raises SideError."""
    server.post(f"/slots/{slot}?action={action}", {"filename": f"depth-{cell.depth}-{cell.repeat}.slot"})


def _body(prompt: list[int] | str, n_predict: int, session: int, cache: bool) -> dict[str, Any]:
    return {
        "prompt": prompt, "n_predict": n_predict, "temperature": 0, "ignore_eos": True, "stream": True,
        "cache_prompt": cache, "id_slot": session,
    }  # fmt: skip


def _ask(server: Server, bodies: Sequence[dict[str, Any]], keep: bool = False) -> list[client.Answer]:
    kept: list[list[bytes]] = [[] for _ in bodies]

    def keeper(i: int) -> Any:
        return (lambda payload, _now: kept[i].append(payload)) if keep else None

    posts = [client.Post(server.url, "/completion", body, keeper(i)) for i, body in enumerate(bodies)]
    answers: list[client.Answer] = client.run_loop(lambda: client.together(posts))
    if not keep:
        return answers
    return [
        client.Answer(a.t_sent, a.stamps, a.t_end, a.final, tuple(events[: len(a.stamps)]))
        for a, events in zip(answers, kept, strict=True)
    ]


def _timing(answer: client.Answer, key: str) -> Any:
    return (answer.final.get("timings") or {}).get(key, 0)


def prefill_row(answers: Sequence[client.Answer]) -> dict[str, Any]:
    """Rates of the prompts; a session's own rate counts its waiting for the others."""
    # A first token that is half a character comes with the final event.
    first = [float(a.stamps[0]) if len(a.stamps) else a.t_end for a in answers]
    ttft = [t - a.t_sent for t, a in zip(first, answers, strict=True)]
    n_prompt = [int(_timing(a, "prompt_n") or a.final.get("tokens_evaluated", 0)) for a in answers]
    if min(n_prompt) <= 0:
        raise SideError("the server does not say how many prompt tokens it computed (`timings.prompt_n`)")
    wall = max(first) - min(a.t_sent for a in answers)
    return {
        "n_prompt": n_prompt,
        "wall_s": wall,
        "tps": sum(n_prompt) / wall,
        "slot_tps": float(np.mean([n / t for n, t in zip(n_prompt, ttft, strict=True)])),
        "ttft_ms": [1000 * t for t in ttft],
        "server_tps": [_timing(a, "prompt_per_second") for a in answers],
    }


def stream_of(answer: client.Answer) -> Stream:
    """Arrivals with the server's own token counts; one token for each event where it does not count."""
    counts = [_count(event, i + 1) for i, event in enumerate(answer.text_events)]
    return Stream(answer.stamps[: len(counts)], np.asarray(counts, np.int64))


def _count(event: bytes, default: int) -> int:
    if COUNT_KEY not in event:
        return default
    value = json.loads(event).get("tokens_predicted", default)
    return int(value)


def generate_row(streams: Sequence[Stream], name: str = "the server") -> dict[str, Any]:
    """Rates and latencies while all sessions decode: from the last first token to the first last one."""
    if any(len(s.stamps) < 2 for s in streams):
        raise SideError(f"{name} sent fewer than two tokens to a session: nothing to measure")
    begin, end = max(s.stamps[0] for s in streams), min(s.stamps[-1] for s in streams)
    if end <= begin:
        raise SideError(f"{name}: the sessions never decoded all at the same time: try a larger --n-predict")
    n_tokens = sum(s.count_at(end) - s.count_at(begin) for s in streams)
    gaps = np.concatenate([token_gaps(s, begin, end) for s in streams])
    p50, p90, p99 = (float(v) for v in np.percentile(gaps, (50, 90, 99)))
    window = float(end - begin)
    return {
        "n_tokens": n_tokens,
        "window_s": window,
        "tps": n_tokens / window,
        "slot_tps": n_tokens / window / len(streams),
        "itl_ms": {"p50": p50, "p90": p90, "p99": p99, "max": float(gaps.max())},
    }


def token_gaps(stream: Stream, begin: float, end: float) -> NDArray[np.float64]:
    """Milliseconds per token: an event that brings k tokens counts as k gaps of a k-th of its wait."""
    gaps, tokens = 1000 * np.diff(stream.stamps), np.diff(stream.counts)
    inside = (stream.stamps[1:] > begin) & (stream.stamps[1:] <= end) & (tokens > 0)
    return np.asarray(np.repeat(gaps[inside] / tokens[inside], tokens[inside]))
