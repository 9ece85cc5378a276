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
    has_lookup,
    hookimpl,
    keeps_state,
    plugin,
)
from llamamg_plugins.spec_books import Books
from llamamg_plugins.spec_cost import Account, Offer, choose, width_below
from llamamg_plugins.spec_kept import Found, Guess, Reader
from llamamg_plugins.spec_options import declare
from llamamg_plugins.spec_report import Totals
from llamamg_plugins.spec_room import drafts_nothing, states_kept
from llamamg_plugins.spec_types import NAMES, Kind, kinds

PLAIN_EVERY = 64  # steps after which one without drafts is taken, to know how long it takes now
MARGIN = 0.03  # a gain below this is not worth a draft
GUESSED = 8  # tokens of a draft that are compared when it is not verified
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
        self.shared, self.always = bool(values["shared"]), bool(values["always"])
        self.rollback = int(values["rollback"])
        self.effect = 0
        self.totals = Totals()
        self.books = Books(self.totals, float(values["max_loss"]) / 100)
        self._readers: dict[int, Reader] = {}  # slot id
        self._found: dict[int, Found] = {}  # request id -> draft of this step
        self._guesses: dict[int, Guess] = {}  # request id

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
        if why := drafts_nothing(self.kinds, self.n_max, self.n_min):
            raise Unavailable(f"nothing would ever be drafted: {why}")
        self.n_max = n_max
        n_draft_max, types = max(config.context.n_draft_max, n_max), tuple(kind.name for kind in self.kinds)
        context = replace(config.context, n_draft_max=n_draft_max, draft_types=types)
        config = replace(config, context=context)
        if keeps_state(config) and context.n_rs_seq == 0:
            n_back = states_kept(config, devices, self.rollback, self.n_max)
            config = replace(config, context=replace(context, n_rs_seq=n_back))
        return config

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
            before, reader.request = reader.account, sequence.request.id
            # A beginning that many conversations share does not make a text the same.
            if before is not None and len(reader.indexes[0]) - n_new >= reader.n_prompt:
                self.books.accounts[reader.request] = before.heir()
            reader.account, reader.n_prompt = self.books.accounts.get(reader.request), sequence.n_prompt
        return reader

    # ---- what is drafted

    @hookimpl
    def spec_limit(self, state: StepState) -> int:
        """Look up a draft for every sequence, and choose together which are worth verifying."""
        began = time.perf_counter()
        decoding = state.decoding  # those of one context; others may be in flight, with drafts of their own
        self.books.begin(decoding[0].slot.context, began)
        found = [self._look_up(sequence) for sequence in decoding]
        if state.prefilling:
            self.books.earn(map(self._account, state.prefilling))
        if self._found:
            for sequence in decoding:
                self._found.pop(sequence.request.id, None)
        limit = self._choose(state, found) if any(found) else 0
        self.totals.n_lookups += len(decoding)
        self.totals.lookup_s += time.perf_counter() - began
        return limit

    def _look_up(self, sequence: Sequence) -> Found | None:
        if self._guesses and self._only_compared(sequence):
            return None
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
        decoding, context = state.decoding, state.decoding[0].slot.context
        offers = [self._offer(s, each, len(decoding)) for s, each in zip(decoding, found, strict=True)]
        cost, why = self.books.cost(state, context)
        why = self._obstacle(state) or ("" if self.always else why) or _obstacle_of(offers, found)
        if why:
            widths = [0] * len(offers)
        elif self.always:
            widths = [width_below(min(offer.length, self.n_max)) for offer in offers]
        else:
            prompts = [self._account(sequence) for sequence in state.prefilling]
            widths, why = choose(offers, cost, self.n_max, MARGIN, self.n_min, prompts)
            if prompts:
                self.books.spend(context, prompts, cost.ratio(len(offers), sum(widths)) - 1.0)
        if why:
            self.totals.why_not[why] += sum(each is not None for each in found)
        for sequence, each, width in zip(decoding, found, widths, strict=True):
            if each is None:
                continue
            each.width = width
            self._found[sequence.request.id] = each
            if width == 0 and sequence.request.id not in self._guesses:
                n = len(each.draft.tokens) if self._account(sequence).waits else GUESSED
                guess = Guess(each.draft.tokens[:n], each.draft, sequence.n_decoded)
                self._guesses[sequence.request.id] = guess
        return max(widths)

    def _offer(self, sequence: Sequence, found: Found | None, n_users: int) -> Offer:
        account = self._account(sequence)
        if found is None or (account.waits and not self.always):
            return Offer(account)
        if account.rounds and account.accepted_ema < self.min_accept * n_users:
            return Offer(account)
        n_useful = min(len(found.draft.tokens), sequence.n_remaining - 1)
        return Offer(account, n_useful if width_below(n_useful) >= self.n_min else 0, found.draft.n_matched)

    def _obstacle(self, state: StepState) -> str:
        if self.max_users and _n_generating(state) > self.max_users:
            return "too many users"
        if self.always or state.prefilling:  # beside a prompt there is no step to be measured
            return ""
        n_users = len(state.decoding)
        if self.books.times.plain_s(n_users) == 0.0 or self.books.times.age(n_users) > PLAIN_EVERY:
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

    def _only_compared(self, sequence: Sequence) -> bool:
        """Compare a draft that was not verified with what came; whether that is all that there is to be done in this step."""
        id_ = sequence.request.id
        guess = self._guesses.get(id_)
        if guess is None:
            return False
        account = self._account(sequence)
        if not guess.compare(sequence, account):
            del self._guesses[id_]
            return False
        why = "" if self.always else account.waits
        if why:
            self.totals.why_not[why] += 1
        return bool(why)

    @hookimpl
    def batch_done(self, batch: Batch, elapsed_s: float) -> None:
        """Learn what steps take, and book it to everybody who was in this one."""
        self.books.done(batch, elapsed_s)

    def _account(self, sequence: Sequence) -> Account:
        account = self.books.accounts.get(sequence.request.id)
        if account is None:
            account = self.books.accounts[sequence.request.id] = Account()
            reader = self._readers.get(sequence.slot.id)
            if reader is not None and reader.request == sequence.request.id:
                reader.account = account
        return account

    @hookimpl
    def request_finished(self, request: Request, timings: Timings) -> None:
        """Forget a request; the index stays with its slot, for the next one that continues it."""
        self._forget(request.id)

    def _forget(self, request_id: int) -> None:
        self.books.accounts.pop(request_id, None)
        self._guesses.pop(request_id, None)
        self._found.pop(request_id, None)

    # ---- what is told

    @property
    def report(self) -> dict[str, Any]:
        """For GET /plugins."""
        return self.totals.report(self.books.times, list(self._readers.values()), self.n_max)


def _n_generating(state: StepState) -> int:
    """Sequences that generate, in all contexts."""
    running = (slot.sequence for slot in state.slots)  # a slot can be busy without one: it is being filled or moved
    return sum(sequence is not None and sequence.state is SequenceState.DECODE for sequence in running)


def _obstacle_of(offers: Seq[Offer], found: Seq[Found | None]) -> str:
    """Why none of the drafts that were found may be verified; "" where one may be."""
    if any(offer.length for offer in offers):
        return ""
    waiting = (offer.account.waits for offer, each in zip(offers, found, strict=True) if each is not None)
    return next(filter(None, waiting), "too few accepted")
