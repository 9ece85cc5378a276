"""Kinds of lookup speculation: which n-grams are indexed, and how a draft is chosen among their occurrences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llamamg import DraftRule

NAMES = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "suffix")  # in the order they are asked
SUFFIX_ORDERS = (32, 16, 8, 4)
VOTERS = 32  # occurrences that vote where several continuations count


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind with its sizes. `orders` are n-gram lengths; `n_max` tokens are drafted at most."""

    name: str
    orders: tuple[int, ...]
    n_max: int
    rule: DraftRule


def kind(name: str, sizes: Mapping[str, int | float]) -> Kind:
    """The kind of a name; `sizes` are the plugin's options with `_` for `-`. Raises ValueError for an unknown name."""
    p_min = float(sizes["draft_p_min"])
    if name == "suffix":
        rule = DraftRule(VOTERS, longest=True, extend=True, min_share=0.5, p_min=max(p_min, 0.1))
        return Kind(name, SUFFIX_ORDERS, 1 << 10, rule)
    if name == "ngram-mod":
        rule = DraftRule(extend=True, n_min=max(1, int(sizes["ngram_mod_n_min"])), p_min=p_min)
        return Kind(name, (int(sizes["ngram_mod_n_match"]),), int(sizes["ngram_mod_n_max"]), rule)
    if name not in NAMES:
        raise ValueError(f"there is no kind {name!r}; use one of {', '.join(NAMES)}")
    key = name.replace("-", "_")
    n, m, hits = (int(sizes[f"{key}_{what}"]) for what in ("size_n", "size_m", "min_hits"))
    if name == "ngram-simple":
        rule = DraftRule(min_hits=hits, p_min=p_min)
    elif name == "ngram-map-k":
        rule = DraftRule(min_hits=hits, adaptive=True, p_min=p_min)
    else:
        # A continuation must have twice the votes of all others together.
        rule = DraftRule(VOTERS, min_hits=hits, adaptive=True, min_share=2 / 3, p_min=p_min)
    return Kind(name, (n,), m, rule)


def kinds(text: str, sizes: Mapping[str, int | float]) -> tuple[Kind, ...]:
    """The kinds of a comma-separated list, in the order they are asked; none for "none". Raises ValueError."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if names == ["none"]:
        return ()
    wanted = {name: kind(name, sizes) for name in names if name != "none"}
    return tuple(wanted[name] for name in NAMES if name in wanted)
