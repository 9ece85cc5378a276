"""What the plugin spec keeps: of each slot its index, of each request the draft of this step and one that is only compared."""

from __future__ import annotations

from dataclasses import dataclass

from llamamg import Draft, DraftIndex, Sequence
from llamamg_plugins.spec_cost import Account


@dataclass(slots=True)
class Found:
    """A draft of one sequence; the first `width` tokens of it are verified in this step."""

    draft: Draft
    kind: int
    width: int = 0


@dataclass(slots=True)
class Guess:
    """A draft that was not verified: it is compared with the tokens that come, which costs nothing and tells as much."""

    tokens: list[int]
    draft: Draft
    n_decoded: int  # of the sequence when it was made
    n_right: int = 0

    def compare(self, sequence: Sequence, account: Account) -> bool:
        """Look at the sequence's last token, if it is the next one; whether there is more to compare."""
        n_came = sequence.n_decoded - self.n_decoded - self.n_right
        if n_came != 1:  # more: tokens that nobody showed, in a step without drafts at all, or while the plugin was off
            return n_came == 0
        n_matched = self.draft.n_matched
        if self.n_right == 0:
            account.begin_guess(n_matched)
        is_right = sequence.last_token == self.tokens[self.n_right]
        account.guess(n_matched, is_right)
        self.n_right += is_right
        if is_right and self.n_right < len(self.tokens):
            return True
        account.count_round(len(self.draft.tokens) if is_right else self.n_right)
        return False


@dataclass(slots=True)
class Reader:
    """What is kept of one slot: an index for each kind, and which request it follows."""

    indexes: list[DraftIndex]
    request: int = -1
    n_prompt: int = 0  # of that request
    account: Account | None = None  # of that request
    is_behind: bool = False  # there is more of its text to take in
