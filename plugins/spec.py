"""Lookup speculation: drafts what the context already contains, verified in the same batch, only where it pays."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from llamamg import (
    Batch,
    Config,
    Draft,
    DraftIndex,
    Guard,
    Options,
    Request,
    Sequence,
    SequenceState,
    StepState,
    Timings,
    Unavailable,
    affordable_rollback,
    has_lookup,
    hookimpl,
    keeps_state,
    plugin,
)
from llamamg_plugins.spec_cost import Account, Offer, StepTimes, choose, width_below
from llamamg_plugins.spec_kept import Found, Guess, Reader
from llamamg_plugins.spec_options import declare
from llamamg_plugins.spec_report import Totals
from llamamg_plugins.spec_types import NAMES, Kind, kinds

PLAIN_EVERY = 64  # steps after which one without drafts is taken, to know how long it takes now
BUSY = 1.5  # times its usual length that a step is booked with at most
AFTER = 3  # steps behind a draft that pay for what it left: graphs that it replaced are made anew, and recorded anew on a GPU
MARGIN = 0.03  # a gain below this is not worth a draft
GUESSED = 8  # tokens of a draft that are compared when it is not verified
ROLLBACK_MAX = 7  # tokens a recurrent state is kept for: each costs the memory of a whole state
READ_MAX = 8192  # tokens an index takes in at once: 1 ms; what came out of a cache is read over some steps


@plugin(
    name="spec",
    summary="drafts tokens the context already contains and verifies them in the same step",
    helps="code that is rewritten, quotes, lists: text that repeats what was read or said",
    hurts="nothing by more than --spec-max-loss; memory of the logits of drafted rows",
    guard=Guard.same_tokens(),
    toggle="step",
    effect="tokens accepted",
)
class Spec:
    """All drafts of a step are chosen together, in `spec_limit`; `draft` hands them out."""

    def __init__(self, **options: Any) -> None:
        declared = Options("spec")
        declare(declared)
        values = {**declared.values({}), **options}
        self.kinds: tuple[Kind, ...] = kinds(str(values["type"]), values)
        self.n_max, self.n_min = int(values["draft_n_max"]), int(values["draft_n_min"])
        self.max_users, self.min_accept = int(values["max_users"]), float(values["min_accept"])
        self.max_loss, self.shared = float(values["max_loss"]) / 100, bool(values["shared"])
        self.always = bool(values["always"])
        self.rollback = int(values["rollback"])
        self.effect = 0
        self.totals = Totals()
        self.times = StepTimes()
        self._readers: dict[int, Reader] = {}  # slot id
        self._accounts: dict[int, Account] = {}  # request id
        self._found: dict[int, Found] = {}  # request id -> draft of this step
        self._guesses: dict[int, Guess] = {}  # request id
        self._n_after: dict[int, int] = {}  # context -> steps that the last draft is still booked with
        self._began: dict[int, float] = {}  # context -> when its step began; seconds, perf_counter clock

    @hookimpl
    def register_options(self, options: Options) -> None:
        """Names and defaults are llama-server's where it has them."""
        declare(options)

    @hookimpl
    def configure(self, config: Config, devices: Seq[Any]) -> Config:
        """Room for the logits of drafted rows, and for recurrent states to go back to."""
        if not self.kinds:
            raise Unavailable(f"no kind of speculation was chosen: add --spec-type with one of {', '.join(NAMES)}")
        if not has_lookup():
            raise RuntimeError("this native build has no lookup index: run `llamamg build`")  # it was asked for
        n_max = width_below(min(self.n_max, max(kind.n_max for kind in self.kinds)))
        if why := self._drafts_nothing(n_max):
            raise Unavailable(f"nothing would ever be drafted: {why}")
        self.n_max = n_max
        n_draft_max, types = max(config.context.n_draft_max, n_max), tuple(kind.name for kind in self.kinds)
        context = replace(config.context, n_draft_max=n_draft_max, draft_types=types)
        config = replace(config, context=context)
        if keeps_state(config) and context.n_rs_seq == 0:
            n_back = self._rollback(config, devices)
            config = replace(config, context=replace(context, n_rs_seq=n_back))
        return config

    def _drafts_nothing(self, n_max: int) -> str:
        """Which option is why; "" where drafts are possible."""
        if self.n_max == 0:
            return "--spec-draft-n-max is 0"
        if n_max == 0:
            return f"the largest draft of --spec-type {self.kinds[0].name} is 0"
        if self.n_min > n_max:
            return f"--spec-draft-n-min {self.n_min} is more than the longest draft, {n_max}"
        if all(kind.rule.n_min > kind.n_max for kind in self.kinds):
            return "--spec-ngram-mod-n-min is more than --spec-ngram-mod-n-max"
        return ""

    def _rollback(self, config: Config, devices: Seq[Any]) -> int:
        """States kept of each sequence. Drafts beyond them need a copy of the state, which takes as much as one more."""
        in_ubatch = max(0, min(config.context.n_ubatch, config.context.n_batch) - 2)  # libllama keeps no more
        wanted = min(self.rollback, self.n_max, ROLLBACK_MAX, in_ubatch)
        with_copy = wanted + (self.n_max > wanted)
        fit = affordable_rollback(config, devices, with_copy)
        if fit == 0:
            raise RuntimeError("there is no memory for a second state of each sequence: lower --ctx-size or --parallel")
        return wanted if fit == with_copy else fit - 1

    # ---- what is read

    @hookimpl
    def batch_submitted(self, batch: Batch) -> None:
        """A prompt goes into the index piece by piece, while the device computes it."""
        for row in batch.rows:
            if row.is_prompt:
                self._read(row.sequence, row.pos0 + len(row.tokens))

    def _read(self, sequence: Sequence, n: int | None = None) -> Reader:
        slot = sequence.slot
        reader = self._readers.get(slot.id)
        if reader is None:
            made = [DraftIndex(kind.orders, min(kind.n_max, max(self.n_max, kind.rule.n_min))) for kind in self.kinds]
            reader = self._readers[slot.id] = Reader(made)
        tokens = slot.tokens.view() if n is None else slot.tokens.view()[:n]
        is_next = reader.request != sequence.request.id
        n_new = max(index.follow(tokens, whole=is_next, n_most=READ_MAX) for index in reader.indexes)
        reader.is_behind = n_new >= READ_MAX
        if is_next:
            self._forget(reader.request)  # it may have ended while the plugin was off
            before, reader.request, reader.account = reader.account, sequence.request.id, None
            if before is not None and 2 * (len(reader.indexes[0]) - n_new) >= len(tokens):
                reader.account = self._accounts[reader.request] = before.heir()
        return reader

    # ---- what is drafted

    @hookimpl
    def spec_limit(self, state: StepState) -> int:
        """Look up a draft for every sequence, and choose together which are worth verifying."""
        began = time.perf_counter()
        self.times.step += 1
        decoding = state.decoding  # those of one context; others may be in flight, with drafts of their own
        self._began[decoding[0].slot.context] = began
        found = [self._look_up(sequence) for sequence in decoding]
        for sequence, each in zip(decoding, found, strict=True):
            if each is None:
                self._found.pop(sequence.request.id, None)
            else:
                self._found[sequence.request.id] = each
        self.totals.n_lookups += len(decoding)
        self.totals.lookup_s += time.perf_counter() - began
        return self._choose(state, found) if any(found) else 0

    def _look_up(self, sequence: Sequence) -> Found | None:
        self._compare(sequence)
        reader = self._read(sequence)
        if reader.is_behind:
            self.totals.why_not["still reading"] += 1
            return None
        sampling = sequence.request.sampling
        if sampling.n_probs and sampling.post_sampling_probs:
            self.totals.why_not["probabilities after sampling"] += 1  # the engine gives them for one token at a time
            return None
        for i, (kind, index) in enumerate(zip(self.kinds, reader.indexes, strict=True)):
            n = min(kind.n_max, max(self.n_max, kind.rule.n_min))
            draft = index.draft(sequence.last_token, kind.rule, n)
            if not draft.tokens and self.shared:
                draft = self._elsewhere(sequence, index, i, n)
            if draft.tokens and min(len(draft.tokens), sequence.n_remaining - 1) >= max(1, self.n_min):
                return Found(draft, i)
        self.totals.why_not["nothing found"] += 1
        return None

    def _elsewhere(self, sequence: Sequence, index: DraftIndex, i: int, n: int) -> Draft:
        draft = Draft([], 0, 0, 0)
        for slot_id, reader in self._readers.items():
            if slot_id != sequence.slot.id and not draft.tokens:
                draft = index.draft(sequence.last_token, self.kinds[i].rule, n, reader.indexes[i])
        return draft

    def _choose(self, state: StepState, found: Seq[Found | None]) -> int:
        decoding = state.decoding
        offers = [self._offer(s, each, len(decoding)) for s, each in zip(decoding, found, strict=True)]
        why = self._obstacle(state) or ("" if any(o.length for o in offers) else "too few accepted")
        if why:
            widths = [0] * len(offers)
        elif self.always:
            widths = [width_below(min(offer.length, self.n_max)) for offer in offers]
        else:
            widths, why = choose(offers, self.times, self.n_max, MARGIN, self.n_min)
        if why:
            self.totals.why_not[why] += sum(each is not None for each in found)
        for sequence, each, width in zip(decoding, found, widths, strict=True):
            if each is None:
                continue
            each.width = width
            if width == 0 and sequence.request.id not in self._guesses:
                guess = Guess(each.draft.tokens[:GUESSED], each.draft, sequence.n_decoded)
                self._guesses[sequence.request.id] = guess
        return max(widths)

    def _offer(self, sequence: Sequence, found: Found | None, n_users: int) -> Offer:
        account = self._account(sequence)
        if found is None or (account.rounds and account.accepted_ema < self.min_accept * n_users):
            return Offer(account)
        n_useful = min(len(found.draft.tokens), sequence.n_remaining - 1)
        return Offer(account, n_useful if width_below(n_useful) >= self.n_min else 0, found.draft.n_matched)

    def _obstacle(self, state: StepState) -> str:
        if self.max_users and _n_generating(state) > self.max_users:
            return "too many users"
        n_users = len(state.decoding)
        if not self.always and (self.times.plain_s(n_users) == 0.0 or self.times.age(n_users) > PLAIN_EVERY):
            return "measuring a step without"
        return ""

    @hookimpl
    def draft(self, sequence: Sequence, limit: int) -> list[int] | None:
        """The draft that was chosen for this sequence."""
        found = self._found.get(sequence.request.id)
        if found is None:
            return None
        width = width_below(min(found.width, limit))
        found.width = width if width >= self.n_min else 0
        return found.draft.tokens[: found.width] or None

    # ---- what became of it

    @hookimpl
    def draft_verified(self, sequence: Sequence, proposed: int, accepted: int) -> None:
        """Count, and learn how often this sequence's drafts are right."""
        self.totals.verified(proposed, accepted)
        self.effect += accepted
        account = self._account(sequence)
        account.book(float(accepted))
        self._guesses.pop(sequence.request.id, None)
        found, reader = self._found.get(sequence.request.id), self._readers.get(sequence.slot.id)
        if found is None or reader is None:
            return  # another plugin's draft
        account.learn(found.draft.n_matched, proposed, accepted)
        if self.kinds[found.kind].rule.adaptive:
            reader.indexes[found.kind].judge(found.draft, proposed, accepted)

    def _compare(self, sequence: Sequence) -> None:
        guess = self._guesses.get(sequence.request.id)
        if guess is None:
            return
        n_came = sequence.n_decoded - guess.n_decoded - guess.n_right
        if n_came > 1:  # tokens that nobody showed: a step without drafts at all, or the plugin was off
            del self._guesses[sequence.request.id]
        if n_came != 1:
            return
        account, n_matched = self._account(sequence), guess.draft.n_matched
        if guess.n_right == 0:
            account.begin_guess(n_matched)
        is_right = sequence.last_token == guess.tokens[guess.n_right]
        account.guess(n_matched, is_right)
        guess.n_right += is_right
        if is_right and guess.n_right < len(guess.tokens):
            return
        account.count_round(len(guess.draft.tokens) if is_right else guess.n_right)
        del self._guesses[sequence.request.id]

    @hookimpl
    def batch_done(self, batch: Batch, elapsed_s: float) -> None:
        """Learn what steps take, and book it to everybody who was in this one."""
        rows = batch.rows
        if began := self._began.pop(batch.group, 0.0):  # looking up, copying states and sampling belong to the step too
            elapsed_s = max(elapsed_s, time.perf_counter() - began)
        if any(row.is_prompt for row in rows):
            return
        n_users, n_draft = len(rows), sum(row.n_logits - 1 for row in rows)
        n_again = sum(len(row.tokens) for row in rows) - n_users - n_draft  # after a snapshot came back
        self.totals.n_again += n_again
        if n_again == 0:
            self.times.observe(n_users, n_draft, elapsed_s)
        plain_s = self.times.plain_s(n_users)
        if plain_s == 0.0:
            return
        lost = 0.0
        self._n_after[batch.group] = AFTER if n_draft or n_again else max(0, self._n_after.get(batch.group, 0) - 1)
        if self._n_after[batch.group] and not (n_draft or n_again):
            lost = min(elapsed_s / plain_s, 2 * BUSY) - 1.0
        if n_draft or n_again:
            self.totals.verify_s += max(0.0, elapsed_s - plain_s)
            # Not much more than such a step takes usually: nobody is in debt because the machine was busy.
            usual = self.times.ratio(n_users, n_draft) if n_again == 0 else 1.0 + n_again
            lost = min(elapsed_s / plain_s, BUSY * usual) - 1.0
        for row in rows:
            if (account := self._accounts.get(row.sequence.request.id)) is not None:
                account.book(self.max_loss - max(0.0, lost))

    def _account(self, sequence: Sequence) -> Account:
        account = self._accounts.get(sequence.request.id)
        if account is None:
            account = self._accounts[sequence.request.id] = Account()
            reader = self._readers.get(sequence.slot.id)
            if reader is not None and reader.request == sequence.request.id:
                reader.account = account
        return account

    @hookimpl
    def request_finished(self, request: Request, timings: Timings) -> None:
        """Forget a request; the index stays with its slot, for the next one that continues it."""
        self._forget(request.id)

    def _forget(self, request_id: int) -> None:
        self._accounts.pop(request_id, None)
        self._guesses.pop(request_id, None)
        self._found.pop(request_id, None)

    # ---- what is told

    @property
    def report(self) -> dict[str, Any]:
        """For GET /plugins."""
        return self.totals.report(self.times, list(self._readers.values()), self.n_max)


def _n_generating(state: StepState) -> int:
    """Sequences that generate, in all contexts."""
    running = (slot.sequence for slot in state.slots)  # a slot can be busy without one: it is being filled or moved
    return sum(sequence is not None and sequence.state is SequenceState.DECODE for sequence in running)
