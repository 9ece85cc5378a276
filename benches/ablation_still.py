"""Plugins whose counters do not move under a load: found together, and their answers compared with all of them off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llamamg.engine import Engine
from llamamg.plugins import Found, PluginError
from llamamg.plugins.selection import declaration_of

from .errors import BenchError
from .judge import N_PROBES, STOOD_STILL, tokens_json
from .loads import Load, Sizes
from .session import Block, Session
from .tokens import Reference, TokenCount

HOW = "all that stand still, toggled together in one process"


def still_rows(
    engine: Engine, load: Load, sizes: Sizes, wanted: Sequence[str], found: Mapping[str, Found]
) -> dict[str, dict[str, Any]]:
    """Rows of those of the plugins that are on and stand still: blocks of all of them at once tell as much as blocks of each,
    and most rows are of that kind. Empty where one of them changed a token without counting: each is to be looked at alone.
    """
    asked = {view.name for view in engine.plugins.views() if view.enabled and view.name in wanted}
    if len(asked) < 2:
        return {}
    session = Session(engine, load, sizes)
    try:
        session.prepare()
        blocks = [session.block() for _ in range(N_PROBES)]
        asked -= {name for block in blocks for name, effect in block.effects.items() if effect}
        order = _order(engine, asked, found)
        counts = _compared(session, order, blocks) if order else None
    except (BenchError, PluginError):
        return {}  # each row says it of itself
    if counts is None or any(count.n_ties or count.n_changed for count in counts.values()):
        return {}
    tokens = tokens_json(counts)
    return {
        name: {"plugin": name, "how": HOW, "guard": declaration_of(name, found).guard.kind.value, "effect": 0, "n_pairs": 0,
               **tokens, **STOOD_STILL}
        for name in order
    }  # fmt: skip


def _order(engine: Engine, asked: set[str], found: Mapping[str, Found]) -> list[str]:
    """Those that can be switched off here, what requires others before them."""
    # One that failed meanwhile did not stand still.
    can = {view.name for view in engine.plugins.views() if view.quarantined is None and view.toggle != "restart"}
    on, order = set(engine.plugins.enabled()), []
    left = asked & can
    while free := sorted(
        name for name in left if not any(name in declaration_of(other, found).requires for other in on - {name})
    ):
        order += free
        on -= set(free)
        left -= set(free)
    return order


def _compared(session: Session, names: Sequence[str], blocks: Sequence[Block]) -> dict[bool, TokenCount]:
    """Blocks with these on, and one more with them off, against one with them off."""
    off: list[str] = []
    try:
        for name in names:
            session.toggle(name, False)
            off.append(name)
        first, again = session.block(with_others=True), session.block()
    finally:
        for name in reversed(off):
            session.toggle(name, True)
    reference, counts = Reference(first.tokens, first.others), {True: TokenCount(), False: TokenCount()}
    for on, made in ((True, blocks), (False, [again])):
        for block in made:
            counts[on].add(*reference.compare(block.tokens))
    return counts
