"""How far llama.cpp searches a grammar for what may come next: a few rules can make that a number of ways with many digits.

It follows every first item of every alternative, and the next one where an item may be nothing: for left recursion each way
again however often it leads to the same rule, then for the stacks of rules that it compares with each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

LETTER = -1  # instead of a rule: something that takes a letter or token
N_WAYS_MAX, N_STACKS_MAX = 20_000_000, 50_000  # either is a second or two


@dataclass(slots=True)
class Item:
    """A reference to a rule, perhaps repeated: it is there `n` times, and times `n_if_empty` where the rule may be nothing."""

    rule: int
    is_optional: bool = False
    n: int = 1
    n_if_empty: int = 1
    is_last: bool = True  # of its alternative, and there once


Alternative = list[Item]


class Search:
    """Filled while a grammar is read, in the order of its text; `complaint` at the end."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._rules: list[list[Alternative]] = []
        self._open: list[int] = []  # the rule that is being read, and the brackets
        self._last: Item | None = None
        self._empty: set[int] = set()  # rules that may be nothing

    def _new(self) -> int:
        self._rules.append([[]])
        return len(self._rules) - 1

    def _id(self, name: str) -> int:
        if name not in self._ids:
            self._ids[name] = self._new()
        return self._ids[name]

    def begin(self, name: str) -> None:
        """A rule."""
        self._open, self._last = [self._id(name)], None

    def open(self) -> None:
        """A bracket."""
        self._open.append(self._new())
        self._last = None

    def close(self) -> None:
        """Its end."""
        if len(self._open) > 1:
            self._add(self._open.pop())

    def choice(self) -> None:
        """Another alternative."""
        if self._open:
            self._rules[self._open[-1]].append([])
            self._last = None

    def nothing(self) -> None:
        """An empty text."""
        self._last = None

    def letter(self) -> None:
        """Something that takes a letter or token."""
        self._add(LETTER)

    def reference(self, name: str) -> None:
        """To a rule."""
        self._add(self._id(name))

    def repeat(self, least: int, n: int, has_end: bool) -> None:
        """The last item, `least` times at least and written out `n` times."""
        item = self._last
        if item is None:
            return
        if item.is_optional:
            item.n = min(item.n * max(1, n), N_WAYS_MAX)
        else:
            item.n_if_empty = min(item.n_if_empty * max(1, n), N_WAYS_MAX)
        item.is_optional = item.is_optional or least == 0
        item.is_last = item.is_last and has_end and n == 1

    def _add(self, rule: int) -> None:
        if self._open:
            alternative = self._rules[self._open[-1]][-1]
            if alternative:
                alternative[-1].is_last = False
            self._last = Item(rule)
            alternative.append(self._last)

    def complaint(self) -> str | None:
        """Why it would not end in time."""
        self._find_empty()
        known: dict[int, tuple[int, int]] = {LETTER: (1, 1)}  # ways and stacks of a rule
        for start in range(len(self._rules)):
            path: dict[int, int] = {}  # rules on the way, and how many before did not end with the next one
            unseen = [(start, 0)]
            while unseen:
                rule, n_behind = unseen[-1]
                if rule in known:
                    unseen.pop()
                    continue
                begins = [next(self._parts(alternative), []) for alternative in self._rules[rule]]
                if rule in path:
                    unseen.pop()
                    del path[rule]
                    sums = [self._sum(part, known) for part in begins]
                    known[rule] = _capped(1 + sum(ways for ways, _ in sums), sum(stacks for _, stacks in sums))
                    continue
                path[rule] = n_behind
                for item in (item for part in begins for item in part):
                    n = n_behind + (not item.is_last)
                    if item.rule not in path:
                        unseen.append((item.rule, n))
                    elif n > path[item.rule]:  # each time round more is left to be done behind it
                        return "the grammar has a rule that begins with itself: have it begin with what it takes first"
        parts = (part for rule in self._rules for alternative in rule for part in self._parts(alternative))
        worst = [*known.values(), *(self._sum(part, known) for part in parts)]
        if all(ways <= N_WAYS_MAX and stacks <= N_STACKS_MAX for ways, stacks in worst):
            return None
        return (
            "the grammar is too ambiguous: what comes next is reached in too many ways, so take out alternatives that begin "
            "alike, or repetitions of what may be nothing"
        )

    def _sum(self, part: Alternative, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
        ways = stacks = 0
        for item in part:
            n = item.n * (item.n_if_empty if item.rule in self._empty else 1)
            of_rule = known.get(item.rule, (0, 0))  # a rule that leads back to itself is left to the parser
            ways, stacks = ways + n * (1 + of_rule[0]), stacks + n * of_rule[1]
        return _capped(ways, stacks)

    def _may_be_nothing(self, item: Item) -> bool:
        return item.is_optional or item.rule in self._empty

    def _parts(self, alternative: Alternative) -> Iterator[Alternative]:
        """It, cut behind each item that takes something."""
        begin = 0
        for i, item in enumerate(alternative):
            if not self._may_be_nothing(item):
                yield alternative[begin : i + 1]
                begin = i + 1
        if begin < len(alternative):
            yield alternative[begin:]

    def _find_empty(self) -> None:
        users: dict[int, list[int]] = {}
        for i, rule in enumerate(self._rules):
            for item in (item for alternative in rule for item in alternative):
                users.setdefault(item.rule, []).append(i)
        unseen = list(range(len(self._rules)))
        while unseen:
            i = unseen.pop()
            if i not in self._empty and any(all(map(self._may_be_nothing, a)) for a in self._rules[i]):
                self._empty.add(i)
                unseen += users.get(i, [])


def _capped(ways: int, stacks: int) -> tuple[int, int]:
    return min(ways, N_WAYS_MAX + 1), min(stacks, N_STACKS_MAX + 1)
