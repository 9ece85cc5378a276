"""What the plugin spec books: the time that steps take longer, to everybody who was in them."""

from __future__ import annotations

import time
from collections.abc import Iterable

from llamamg import Batch, StepState
from llamamg_plugins.spec_cost import Account, Beside, StepTimes
from llamamg_plugins.spec_report import Totals

BUSY = 1.5  # times its usual length that a step is booked with at most
AFTER = 3  # steps behind a draft that pay for what it left: graphs that it replaced are made anew, and recorded anew on a GPU


class Books:
    """Accounts of all requests, and what steps take. `max_loss` is the part of each step that everybody may lose."""

    def __init__(self, totals: Totals, max_loss: float) -> None:
        self.accounts: dict[int, Account] = {}  # request id
        self.times = StepTimes()
        self._totals, self._max_loss = totals, max_loss
        self._began: dict[int, float] = {}  # context -> when its step began; seconds, perf_counter clock
        self._n_after: dict[int, int] = {}  # context -> steps that the last draft is still booked with
        self._mixed_s: dict[int, float] = {}  # context -> what its last step with prompts and decoders took
        self._extra: dict[int, float] = {}  # context -> part of its step with prompts that drafts are booked with

    def begin(self, context: int, now: float) -> None:
        """A step of a context is being planned."""
        self.times.step += 1
        self._began[context] = now

    def cost(self, state: StepState, context: int) -> tuple[StepTimes | Beside, str]:
        """What drafts take in this step, and why there can be none."""
        if not state.prefilling:
            return self.times, ""
        plain_s = self.times.plain_s(len(state.decoding))
        part_s = self._mixed_s.get(context, 0.0) - plain_s
        if plain_s == 0.0 or part_s <= 0.0:
            return self.times, "beside a prompt"
        return Beside(self.times, part_s / plain_s), ""

    def earn(self, prompts: Iterable[Account]) -> None:
        """Prompts wait for a step, whether any of their tokens are in it or not."""
        for account in prompts:
            account.book(self._max_loss)

    def spend(self, context: int, prompts: Iterable[Account], extra: float) -> None:
        """Drafts beside prompts are expected to take this part of the step."""
        self._extra[context] = extra
        for account in prompts:
            account.book(-extra)

    def done(self, batch: Batch, elapsed_s: float) -> None:
        """A batch was computed."""
        rows, context, times = batch.rows, batch.group, self.times
        if began := self._began.pop(context, 0.0):  # looking up, copying states and sampling belong to the step too
            elapsed_s = max(elapsed_s, time.perf_counter() - began)
        extra = self._extra.pop(context, 0.0) if self._extra else 0.0
        n_users, n_draft, n_again = len(rows), 0, 0
        for row in rows:
            if row.is_prompt:
                self._mixed(batch, elapsed_s, extra)
                return
            n_draft += row.n_logits - 1
            n_again += len(row.tokens) - row.n_logits  # after a snapshot came back
        if n_again == 0:
            times.observe(n_users, n_draft, elapsed_s)
        plain_s = times.plain_s(n_users)
        if plain_s == 0.0:
            return
        change = self._max_loss
        if n_draft or n_again:
            self._totals.n_again += n_again
            self._totals.verify_s += max(0.0, elapsed_s - plain_s)
            # Not much more than such a step takes usually: nobody is in debt because the machine was busy.
            usual = times.ratio(n_users, n_draft) if n_again == 0 else 1.0 + n_again
            change -= max(0.0, min(elapsed_s / plain_s, BUSY * usual) - 1.0)
            self._n_after[context] = AFTER
        elif n_after := self._n_after.get(context, 0):
            usual = times.behind(n_users, elapsed_s / plain_s)
            change -= max(0.0, min(elapsed_s / plain_s, BUSY * usual, 2 * BUSY) - 1.0)
            self._n_after[context] = n_after - 1
        for row in rows:
            if (account := self.accounts.get(row.sequence.request.id)) is not None:
                account.book(change)

    def _mixed(self, batch: Batch, elapsed_s: float, extra: float) -> None:
        """A step with prompts: its length says nothing of drafts, so decoders are booked with what they were expected to take."""
        self._n_after.pop(batch.group, None)  # the graphs of what comes next are made anew because of the prompt
        decoding = [row for row in batch.rows if not row.is_prompt]
        if decoding:
            self._mixed_s[batch.group] = elapsed_s
        for row in decoding:
            if (account := self.accounts.get(row.sequence.request.id)) is not None:
                account.book(self._max_loss - extra)
