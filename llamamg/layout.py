"""Which sequence ids lie in which context: slots are shared out over several contexts of one model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from llamamg.config import ContextConfig
from llamamg.model import n_slots, n_ubatch_min

NO_IDS = range(0)


@dataclass(frozen=True, slots=True)
class Layout:
    """`groups[i]` are the ids of context i, one for each slot of it; `prefill` those of one more context, if any.

    Ids count through: groups, then `n_spare` ids (context 0 has them), then `prefill`.
    """

    groups: tuple[range, ...]
    prefill: range = NO_IDS
    n_spare: int = 0
    _context: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        of_slots = [i for i, ids in enumerate(self.groups) for _ in ids]
        of_prefill = [len(self.groups)] * len(self.prefill)
        object.__setattr__(self, "_context", (*of_slots, *[0] * self.n_spare, *of_prefill))

    @property
    def n_contexts(self) -> int:
        """Contexts, the one for prompts included."""
        return len(self.groups) + bool(self.prefill)

    def context(self, seq_id: int) -> int:
        """The context of an id."""
        return self._context[seq_id]

    def first(self, context: int) -> int:
        """The id that a context itself calls 0."""
        return (self.prefill if context == len(self.groups) else self.groups[context]).start

    def local(self, seq_id: int) -> int:
        """What the context of `seq_id` calls it."""
        context, n_slots = self.context(seq_id), self.groups[-1].stop
        if context == 0 and seq_id >= n_slots:
            return len(self.groups[0]) + seq_id - n_slots
        return seq_id - self.first(context)

    def n_seq(self, context: int) -> int:
        """Sequences of a context, spare ones included."""
        if context == len(self.groups):
            return len(self.prefill)
        return len(self.groups[context]) + (self.n_spare if context == 0 else 0)


def one_context(n_slots: int, n_spare: int = 0) -> Layout:
    """All slots in one context."""
    return Layout((range(n_slots),), n_spare=n_spare)


def layout_of(config: ContextConfig, n_spare: int = 0) -> Layout:
    """What a configuration asks for: groups of nearly the same size, the larger ones first."""
    slots = n_slots(config)
    n_groups = max(1, min(config.n_groups, slots))
    ids, start = [], 0
    for i in range(n_groups):
        size = slots // n_groups + (i < slots % n_groups)
        ids.append(range(start, start + size))
        start += size
    begin = slots + n_spare
    return Layout(tuple(ids), range(begin, begin + config.n_prefill_slots), n_spare)


def n_ubatch(config: ContextConfig, layout: Layout, context: int) -> int:
    """The ubatch of a context: a small one for answers where prompts have their own, but one step of a group must fit."""
    is_decode_only = bool(layout.prefill) and context < len(layout.groups)
    if not is_decode_only or not config.n_ubatch_decode:
        return config.n_ubatch
    step = max(layout.n_seq(context) * (1 + config.n_draft_max), n_ubatch_min(config.n_rs_seq))
    return min(max(config.n_ubatch_decode, step), config.n_ubatch)


def by_context(config: ContextConfig) -> list[ContextConfig]:
    """What each context would be configured like by itself, KV cache aside; [config] for a single one."""
    layout = layout_of(config)
    if layout.n_contexts == 1:
        return [config]
    return [
        replace(
            config,
            n_parallel=layout.n_seq(i),
            n_groups=1,
            n_prefill_slots=0,
            n_ubatch=n_ubatch(config, layout, i),
        )
        for i in range(layout.n_contexts)
    ]
