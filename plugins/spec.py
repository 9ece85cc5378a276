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
    Row,
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
from llamamg_plugins.spec_cost import Account, Beside, Offer, StepTimes, choose, width_below
from llamamg_plugins.spec_kept import Found, Guess, Reader
from llamamg_plugins.spec_options import declare
from llamamg_plugins.spec_report import Totals
from llamamg_plugins.spec_room import drafts_nothing, states_kept
from llamamg_plugins.spec_types import NAMES, Kind, kinds

PLAIN_EVERY = 64  # steps after which one without drafts is taken, to know how long it takes now
BUSY = 1.5  # times its usual length that a step is booked with at most
AFTER = 3  # steps behind a draft that pay for what it left: graphs that it replaced are made anew, and recorded anew on a GPU
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
        self._mixed_s: dict[int, float] = {}  # context -> what its last step with prompts and decoders took
        self._extra: dict[int, float] = {}  # context -> part of its step with prompts that drafts are booked with

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
            if before is not None and 2 * (len(reader.indexes[0]) - n_new) >= len(tokens):
                self._accounts[reader.request] = before.heir()
            reader.account = self._accounts.get(reader.request)
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
        for sequence in state.prefilling:
            self._account(sequence).book(self.max_loss)
        for sequence, each in zip(decoding, found, strict=True):
            if each is not None:
                self._found[sequence.request.id] = each
            elif self._found:
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
        cost, why = self._cost(state, context)
        why = self._obstacle(state) or why or _obstacle_of(offers, found)
        if why:
            widths = [0] * len(offers)
        elif self.always:
            widths = [width_below(min(offer.length, self.n_max)) for offer in offers]
        else:
            prompts = [self._account(sequence) for sequence in state.prefilling]
            widths, why = choose(offers, cost, self.n_max, MARGIN, self.n_min, prompts)
            if prompts:
                self._extra[context] = extra = cost.ratio(len(offers), sum(widths)) - 1.0
                for account in prompts:
                    account.book(-extra)
        if why:
            self.totals.why_not[why] += sum(each is not None for each in found)
        for sequence, each, width in zip(decoding, found, widths, strict=True):
            if each is None:
                continue
            each.width = width
            if width == 0 and sequence.request.id not in self._guesses:
                n = len(each.draft.tokens) if self._accounts[sequence.request.id].waits else GUESSED
                guess = Guess(each.draft.tokens[:n], each.draft, sequence.n_decoded)
                self._guesses[sequence.request.id] = guess
        return max(widths)

    def _offer(self, sequence: Sequence, found: Found | None, n_users: int) -> Offer:
        account = self._account(sequence)
        if found is None or (account.to_prove and not self.always):
            return Offer(account)
        if account.rounds and account.accepted_ema < self.min_accept * n_users:
            return Offer(account)
        n_useful = min(len(found.draft.tokens), sequence.n_remaining - 1)
        return Offer(account, n_useful if width_below(n_useful) >= self.n_min else 0, found.draft.n_matched)

    def _cost(self, state: StepState, context: int) -> tuple[StepTimes | Beside, str]:
        """What drafts take in this step, and why there can be none."""
        if not state.prefilling or self.always:
            return self.times, ""
        plain_s = self.times.plain_s(len(state.decoding))
        part_s = self._mixed_s.get(context, 0.0) - plain_s
        if plain_s == 0.0 or part_s <= 0.0:
            return self.times, "beside a prompt"
        return Beside(self.times, part_s / plain_s), ""

    def _obstacle(self, state: StepState) -> str:
        if self.max_users and _n_generating(state) > self.max_users:
            return "too many users"
        if self.always or state.prefilling:  # beside a prompt there is no step to be measured
            return ""
        n_users = len(state.decoding)
        if self.times.plain_s(n_users) == 0.0 or self.times.age(n_users) > PLAIN_EVERY:
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
        if not self._compare(guess, account, sequence):
            del self._guesses[id_]
            return False
        why = "" if self.always else account.waits
        if why:
            self.totals.why_not[why] += 1
        return bool(why)

    def _compare(self, guess: Guess, account: Account, sequence: Sequence) -> bool:
        """Whether there is more of it to compare."""
        n_came = sequence.n_decoded - guess.n_decoded - guess.n_right
        if n_came != 1:  # more: tokens that nobody showed, in a step without drafts at all, or while it was off
            return n_came == 0
        n_matched = guess.draft.n_matched
        if guess.n_right == 0:
            account.begin_guess(n_matched)
        is_right = sequence.last_token == guess.tokens[guess.n_right]
        account.guess(n_matched, is_right)
        guess.n_right += is_right
        if is_right and guess.n_right < len(guess.tokens):
            return True
        account.count_round(len(guess.draft.tokens) if is_right else guess.n_right)
        return False

    @hookimpl
    def batch_done(self, batch: Batch, elapsed_s: float) -> None:
        """Learn what steps take, and book it to everybody who was in this one."""
        rows, group = batch.rows, batch.group
        if began := self._began.pop(group, 0.0):  # looking up, copying states and sampling belong to the step too
            elapsed_s = max(elapsed_s, time.perf_counter() - began)
        n_users, n_draft, n_again, is_mixed = len(rows), 0, 0, False
        for row in rows:
            n_draft += row.n_logits - 1
            n_again += len(row.tokens) - row.n_logits  # after a snapshot came back
            is_mixed = is_mixed or row.is_prompt
        extra = self._extra.pop(group, 0.0) if self._extra else 0.0
        if is_mixed:
            self._mixed(rows, group, elapsed_s, extra)
            return
        times = self.times
        if n_again == 0:
            times.observe(n_users, n_draft, elapsed_s)
        plain_s = times.plain_s(n_users)
        if plain_s == 0.0:
            return
        lost = 0.0
        if n_draft or n_again:
            self.totals.n_again += n_again
            self.totals.verify_s += max(0.0, elapsed_s - plain_s)
            # Not much more than such a step takes usually: nobody is in debt because the machine was busy.
            usual = times.ratio(n_users, n_draft) if n_again == 0 else 1.0 + n_again
            lost = min(elapsed_s / plain_s, BUSY * usual) - 1.0
            self._n_after[group] = AFTER
        elif n_after := self._n_after.get(group, 0):
            lost = min(elapsed_s / plain_s, 2 * BUSY) - 1.0
            self._n_after[group] = n_after - 1
        change = self.max_loss - max(0.0, lost)
        for row in rows:
            if (account := self._accounts.get(row.sequence.request.id)) is not None:
                account.book(change)

    def _mixed(self, rows: list[Row], group: int, elapsed_s: float, extra: float) -> None:
        """A step with prompts: its length says nothing of drafts, so decoders are booked with what they were expected to take."""
        if all(row.is_prompt for row in rows):
            return
        self._mixed_s[group] = elapsed_s
        for row in rows:
            if not row.is_prompt and (account := self._accounts.get(row.sequence.request.id)) is not None:
                account.book(self.max_loss - extra)

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


def _obstacle_of(offers: Seq[Offer], found: Seq[Found | None]) -> str:
    """Why none of the drafts that were found may be verified; "" where one may be."""
    if any(offer.length for offer in offers):
        return ""
    waiting = any(offer.account.to_prove for offer, each in zip(offers, found, strict=True) if each is not None)
    return "refused before" if waiting else "too few accepted"
