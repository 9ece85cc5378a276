"""Integers between two bounds, digit by digit."""

from __future__ import annotations

from llamamg.json_schema.gbnf import choice, repeated

N_DIGITS = 16  # longer ones are not exact in a double


def between(low: int | None, high: int | None) -> str:
    """The integers from `low` to `high`, both included; None is no bound. `low` <= `high`."""
    parts = []
    if low is None or low < 0:
        nearest = 1 if high is None or high >= 0 else -high
        parts.append('"-" ' + choice(_natural(nearest, None if low is None else -low)))
    if high is None or high >= 0:
        parts += _natural(max(low or 0, 0), high)
    return choice(parts)


def _natural(low: int, high: int | None) -> list[str]:
    """Alternatives for `low` <= n <= `high`, with 0 <= `low`; by number of digits."""
    if high is None:
        n = len(str(low))
        more = [f"[1-9] {_any(n, max(n, N_DIGITS - 1))}"]
        return [_same_length(str(low), "9" * n), *more] if low else ['"0"', f"[1-9] {_any(0, N_DIGITS - 1)}"]
    parts = []
    for n in range(len(str(low)), len(str(high)) + 1):
        first, last = max(low, 10 ** (n - 1) if n > 1 else 0), min(high, 10**n - 1)
        parts.append(_same_length(str(first), str(last)))
    return parts


def _same_length(low: str, high: str) -> str:
    if not low:
        return ""
    head_low, head_high, tail_low, tail_high = low[0], high[0], low[1:], high[1:]
    n = len(tail_low)
    if head_low == head_high:
        return _join(f'"{head_low}"', _same_length(tail_low, tail_high))
    parts, first, last = [], int(head_low), int(head_high)
    if tail_low.strip("0"):
        parts.append(_join(f'"{head_low}"', _same_length(tail_low, "9" * n)))
        first += 1
    above = tail_high.strip("9") != ""
    if above:
        last -= 1
    if first <= last:
        parts.append(_join(f"[{first}-{last}]" if first < last else f'"{first}"', _any(n, n)))
    if above:
        parts.append(_join(f'"{head_high}"', _same_length("0" * n, tail_high)))
    return choice(parts)


def _any(n_min: int, n_max: int) -> str:
    return repeated("[0-9]", n_min, n_max) if n_max else ""


def _join(head: str, tail: str) -> str:
    return f"{head} {tail}" if tail else head
