"""An index of a sequence's own tokens, from which drafts are looked up: microseconds per look, however long the text is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llamamg.request import Tokens

N_MOST = (1 << 31) - 1  # tokens added in one call, where nobody says less


@dataclass(frozen=True, slots=True)
class DraftRule:
    """How a draft is chosen among the earlier occurrences of the text's end. Defaults: follow the latest one."""

    n_candidates: int = 1  # earlier occurrences that vote, the latest ones; at most 64
    min_hits: int = 1  # occurrences there must be at least
    longest: bool = False  # only those vote that match farthest back
    extend: bool = False  # where a text ends, look for another one behind what is drafted
    adaptive: bool = False  # what a key drafts depends on how much of its last draft was accepted
    n_min: int = 1  # shorter drafts are dropped
    min_share: float = 0.0  # of the votes, that each drafted token needs
    p_min: float = 0.0  # least product of these shares
    _native: Any = field(default=None, init=False, repr=False, compare=False)

    @property
    def native(self) -> Any:
        """The rule as the native library takes it."""
        if self._native is None:
            from llamamg.abi import ffi  # plugins are listed without loading it

            rule = ffi.new("struct mg_lookup_rule *")
            rule.n_candidates, rule.min_hits, rule.n_min = self.n_candidates, self.min_hits, self.n_min
            rule.longest, rule.extend, rule.adaptive = int(self.longest), int(self.extend), int(self.adaptive)
            rule.min_share, rule.p_min = self.min_share, self.p_min
            object.__setattr__(self, "_native", rule)
        return self._native


@dataclass(frozen=True, slots=True)
class Draft:
    """What was found: tokens, the key for `judge`, the length of the n-gram, how many occurrences voted."""

    tokens: list[int]
    key: int
    n_matched: int
    n_hits: int


NOTHING = Draft([], 0, 0, 0)


class DraftIndex:
    """N-grams of the given lengths of one sequence; used by one thread. Raises RuntimeError without the native library."""

    __slots__ = ("_array", "_draft", "_ffi", "_follow", "_found", "_handle", "_lib", "_out", "_size_max")

    def __init__(self, orders: tuple[int, ...], n_max: int) -> None:
        from llamamg import library
        from llamamg.abi import ffi

        loaded = library.current()
        if loaded is None:
            raise RuntimeError("no native library is loaded, so there is nothing to look drafts up with")
        self._ffi, self._lib = ffi, loaded.mg.lib
        handle = self._lib.mg_lookup_new(ffi.new("int32_t[]", orders), len(orders))
        if handle == ffi.NULL:
            raise loaded.mg.error()
        self._handle: Any = ffi.gc(handle, self._lib.mg_lookup_free)
        self._out, self._size_max = ffi.new("int32_t[]", max(1, n_max)), n_max
        self._found = ffi.new("struct mg_lookup_found *")
        # Looked up once: these are called for each sequence in each step, when nothing of it is in the CPU's caches.
        self._array, self._follow, self._draft = (
            ffi.typeof("int32_t[]"),
            self._lib.mg_lookup_follow,
            self._lib.mg_lookup_draft,
        )

    def follow(self, tokens: Tokens, *, whole: bool = False, n_most: int = N_MOST) -> int:
        """Hold exactly these tokens; how many are new. Only the end of those held is compared, or the `whole` of them.

        When `n_most` were added there may be more: call again, without `whole`.
        """
        if tokens.dtype != np.int32 or not tokens.flags.c_contiguous:
            tokens = np.ascontiguousarray(tokens, np.int32)
        n: int = self._follow(self._handle, self._ffi.from_buffer(self._array, tokens), len(tokens), whole, n_most)
        return n

    def draft(self, last: int, rule: DraftRule, n_max: int, where: DraftIndex | None = None) -> Draft:
        """At most `n_max` tokens that may follow the held ones and `last`, looked for in `where` (default: here)."""
        other = self._ffi.NULL if where is None else where._handle
        found = self._found
        n = self._draft(self._handle, other, last, rule.native, min(n_max, self._size_max), self._out, found)
        return Draft(self._ffi.unpack(self._out, n), found.key, found.n_matched, found.n_hits) if n > 0 else NOTHING

    def judge(self, draft: Draft, n_drafted: int, n_accepted: int) -> None:
        """Tell what became of the first `n_drafted` tokens of a draft; for rules that are adaptive."""
        self._lib.mg_lookup_judge(self._handle, draft.key, n_drafted, n_accepted)

    def __len__(self) -> int:
        return int(self._lib.mg_lookup_size(self._handle, self._ffi.new("uint64_t *")))

    @property
    def n_bytes(self) -> int:
        """Memory it takes."""
        out = self._ffi.new("uint64_t *")
        self._lib.mg_lookup_size(self._handle, out)
        return int(out[0])
