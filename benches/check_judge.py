"""Compare a recorded run with the same batches computed without the plugin, and each request with itself alone."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from llamamg.guard import Divergence, Guard, GuardKind
from llamamg.kvcache import KVCache
from llamamg.replay import Logits, play
from llamamg.replay_alone import Alone, diverges, other_cuts, still_there
from llamamg.request import Tokens
from llamamg.vocab import Vocabulary

from .check_trace import Row, Trace

Told = Callable[[int], None]
N_SHOWN = 20  # violations kept in a result


@dataclass(slots=True)
class Count:
    """One comparison. A tie is a token that fell the other way because the two best were too near to call."""

    n_positions: int = 0
    n_ties: int = 0
    n_unstable: int = 0  # of the ties: farther apart, but the model itself gives both, depending on how batches are cut
    n_same_bits: int | None = None
    kl_mean: float | None = None  # nats per position; only where the plugin promises closeness
    top1: float | None = None  # share of positions whose best token is the one that was given
    violations: list[Divergence] = field(default_factory=list)
    largest_tie: float = 0.0  # nats
    _kl: list[float] = field(default_factory=list)

    def add(self, divergence: Divergence | None) -> None:
        """Count one position."""
        self.n_positions += 1
        if divergence is None:
            return
        if divergence.tie:
            self.n_ties += 1
            self.largest_tie = max(self.largest_tie, divergence.behind)
        else:
            self.violations.append(divergence)

    @property
    def n_violations(self) -> int:
        """Positions that no tie explains."""
        return len(self.violations)

    @property
    def first(self) -> Divergence | None:
        """The first of them."""
        return self.violations[0] if self.violations else None

    def forgive(self, unstable: set[tuple[int, int]]) -> None:
        """Count violations at these (request, position) as ties."""
        left = [d for d in self.violations if (d.request, d.position) not in unstable]
        n = len(self.violations) - len(left)
        self.violations, self.n_unstable, self.n_ties = left, self.n_unstable + n, self.n_ties + n

    def close(self) -> Count:
        """Work out the shares."""
        if self.n_positions:
            self.top1 = 1 - (self.n_ties + self.n_violations) / self.n_positions
        if self._kl:
            self.kl_mean = float(np.mean(self._kl))
        return self

    def add_kl(self, recorded: Any, now: Any) -> None:
        """KL divergence of the recorded distribution from what the model says without the plugin."""
        self._kl.append(kl(now, recorded))

    def json(self) -> dict[str, Any]:
        """Plain values."""
        values = {**asdict(self), "n_violations": self.n_violations}
        del values["_kl"]
        values["violations"] = values["violations"][:N_SHOWN]
        return values


def kl(p: Any, q: Any) -> float:
    """KL(p || q) in nats of two rows of logits, in float64."""
    log_p, log_q = _log_softmax(p), _log_softmax(q)
    both = np.isfinite(log_p)
    return float(np.sum(np.exp(log_p[both]) * (log_p[both] - log_q[both])))


def _log_softmax(logits: Any) -> Any:
    x = np.asarray(logits, np.float64)
    x = x - x.max()
    return x - np.log(np.exp(x).sum())


def same_shapes(
    trace: Trace, llama: Any, context: Any, kv: KVCache, vocab: Vocabulary, never: Tokens, told: Told
) -> Count:
    """Every decode again with the same rows: are the tokens given to the clients the ones the model prefers now?"""
    count = Count(n_same_bits=0)
    played = play(trace.recording, llama, context, kv, vocab.n_vocab)
    for i, (call, logits) in enumerate(played):
        recorded = trace.logits[i] if trace.logits else None
        _count_decode(count, trace, trace.rows[i], call[2], logits, recorded, never)
        told(sum(len(row.tokens) for row in trace.rows[i]))
    return count.close()


def _count_decode(
    count: Count, trace: Trace, rows: list[Row], outputs: list[Any], now: Logits, recorded: Logits | None, never: Tokens
) -> None:
    at = 0
    for row in rows:
        for j in positions(row, trace):
            k = at + j
            position = row.pos0 + len(row.tokens) - row.n_logits + j + 1 - len(trace.prompts[row.request])
            given = trace.answers[row.request][position]
            count.add(diverges(now[k], given, trace.number(row.request), position, never))
            assert count.n_same_bits is not None
            count.n_same_bits += outputs[k][1] == zlib.crc32(now[k].tobytes())
            if recorded is not None:
                count.add_kl(recorded[k], now[k])
        at += row.n_logits


def positions(row: Row, trace: Trace) -> Iterator[int]:
    """Which outputs of a row gave a token of the answer: those of a rejected draft did not."""
    text = trace.text(row.request)
    n_before = len(row.tokens) - row.n_logits
    for j in range(row.n_logits):
        at = row.pos0 + n_before + j
        if at + 1 >= len(text) or text[at] != row.tokens[n_before + j]:
            return
        yield j


def misfed(trace: Trace) -> str | None:
    """A sentence when a token was computed for a request that is not of its prompt or answer."""
    for decode in trace.rows:
        for row in decode:
            text = trace.text(row.request)
            n_certain = len(row.tokens) - max(row.n_logits - 1, 0)  # the rest is a draft
            for i, token in enumerate(row.tokens[:n_certain]):
                at = row.pos0 + i
                if at >= len(text) or text[at] != token:
                    expected = f"token {text[at]}" if at < len(text) else "nothing"
                    number = trace.number(row.request)
                    return f"at position {at} of request {number} token {token} was computed in place of {expected}"
    return None


def missing(trace: Trace) -> str | None:
    """A sentence when an answer has tokens that no computed output stands for."""
    got: dict[int, set[int]] = {id_: set() for id_ in trace.answers}
    for decode in trace.rows:
        for row in decode:
            first = row.pos0 + len(row.tokens) - row.n_logits + 1 - len(trace.prompts[row.request])
            got[row.request].update(first + j for j in positions(row, trace))
    for id_, answer in trace.answers.items():
        lost = sorted(set(range(len(answer))) - got[id_])
        if lost:
            return f"token {lost[0]} of the answer to request {trace.number(id_)} was given and never computed"
    return None


def alone(
    trace: Trace, llama: Any, context: Any, kv: KVCache, vocab: Vocabulary, n_batch: int, never: Tokens, told: Told
) -> Count:
    """Every request by itself, with its own tokens given: shapes differ from the recorded run, so ties are expected."""
    count = Count()
    for id_, answer in trace.answers.items():
        kv.clear()
        again = Alone(llama, context, 0, trace.prompts[id_], np.array(answer, np.int32), vocab.n_vocab)
        while again.n_left > 0:
            n_left = again.n_left
            for divergence in again.compare(n_batch, trace.number(id_), never):
                count.add(divergence)
            told(n_left - again.n_left)
    return count.close()


def settle(
    counts: tuple[Count, ...],
    trace: Trace,
    llama: Any,
    context: Any,
    kv: KVCache,
    vocab: Vocabulary,
    never: Tokens,
    told: Told,
) -> None:
    """Count as ties what the model itself gives, alone and without the plugin, when its batches are cut in another way."""
    suspects: dict[int, dict[int, Divergence]] = {}
    for d in (d for count in counts for d in count.violations):
        suspects.setdefault(d.request, {})[d.position] = d
    ids = list(trace.prompts)
    unstable: set[tuple[int, int]] = set()
    for number, found in suspects.items():
        id_, left = ids[number], list(found.values())
        for cut in other_cuts(len(trace.prompts[id_])):
            kv.clear()
            again = Alone(llama, context, 0, trace.prompts[id_], np.array(trace.answers[id_], np.int32), vocab.n_vocab)
            seen: list[Divergence] = []
            while again.n_left > 0 and left:
                n_left = again.n_left
                seen += [d for d in again.compare(cut, number, never) if d is not None]
                told(n_left - again.n_left)
            left = still_there(left, seen)
        unstable |= {(number, position) for position in found} - {(d.request, d.position) for d in left}
    for count in counts:
        count.forgive(unstable)
        count.close()


def broken(guard: Guard, replayed: Count, by_itself: Count) -> str | None:
    """A sentence when the promise was not kept."""
    if guard.kind is GuardKind.CLOSE:
        assert guard.kl is not None
        assert guard.top1 is not None
        if replayed.kl_mean is not None and replayed.kl_mean > guard.kl:
            return f"the mean KL divergence is {replayed.kl_mean:.3g} nats and it promises {guard.kl:g}"
        for count, where in ((replayed, "in the same batches"), (by_itself, "alone")):
            share = 1 - count.n_violations / max(count.n_positions, 1)
            if share < guard.top1:
                return f"{share:.4f} of the tokens are the best ones {where} and it promises {guard.top1:g}"
        return None
    if guard.kind is GuardKind.EXACT and replayed.n_same_bits != replayed.n_positions:
        n = replayed.n_positions - (replayed.n_same_bits or 0)
        return f"it promises the same bits and {n} of {replayed.n_positions} rows of logits differ"
    for count, where in ((replayed, "in the same batches without it"), (by_itself, "alone and without it")):
        d = count.first
        if d is not None:
            return (
                f"token {d.position} of request {d.request} was {d.given}; {where} the model chooses {d.best}, "
                f"{_nats(d.behind)} ahead"
            )
    return None


def _nats(behind: float) -> str:
    return "far" if behind > 1e6 else f"{behind:.2f} nats"
