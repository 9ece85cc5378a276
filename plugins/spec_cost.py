"""What a draft costs and what it brings: step times by size, acceptance of each sequence, and who pays for whom."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

WIDTHS = (1, 3, 7, 15, 31, 63)  # drafted tokens; with the sampled one these make 2, 4, 8, … rows, so graphs are reused
DECAY = 0.9  # weight of what is past, per round
BLEND = 0.2  # weight of a new step time
OUTLIER = 3.0  # a step that takes more than so many times the usual counts as so many times
FIRST_SLOPE = 0.5  # of a step's time, for each row more, before anything is known
FORGET_STEPS = 1000  # a size that was not tried for so long counts as half as costly: it is tried again now and then
RISK = 0.5  # steps that a draft may be expected to lose by being wrong from the first token on, without credit
FIRST_WIDTH = 7  # drafted tokens at most, until a sequence has shown that what is found for it comes true
COME_TRUE = 3.0  # accepted tokens of a draft, on average, that are enough for that: fewer are often chance
STAKE = 2.0  # steps that one draft may cost at most, without credit
NEIGHBOUR_MAX = 1.0  # steps that a sequence that does not draft waits longer at most, whatever its credit
SURE = 10.0  # tokens that what is known of an earlier request counts as
SAVED_MAX = 16.0  # steps' worth of credit a sequence can save up
REFUSED = 2  # drafts in a row of which nothing was right, after which a sequence has to prove itself again
PROVE, PROVE_MAX = 128, 512  # tokens that must come true undrafted first; twice as many after each further one


def width_below(n: int) -> int:
    """The largest width that is not above `n`; 0 when there is none."""
    return max((width for width in WIDTHS if width <= n), default=0)


@dataclass(slots=True)
class Average:
    """A step time in seconds (or a ratio of two), and the step in which it was last seen."""

    value: float = 0.0
    n: int = 0
    seen: int = 0

    def add(self, value: float, step: int) -> None:
        """The first two are compared and the smaller one is kept: a new shape costs more the first time."""
        if self.n == 0:
            self.value = value
        elif self.n == 1:
            self.value = min(self.value, value)
        else:
            self.value += BLEND * (min(value, OUTLIER * self.value) - self.value)
        self.n, self.seen = self.n + 1, step


@dataclass(slots=True)
class StepTimes:
    """Time of a decode step by users and drafted tokens, as a multiple of the step of the same users without drafts."""

    step: int = 0
    _plain: dict[int, Average] = field(default_factory=dict)  # users -> seconds
    _ratio: dict[int, dict[int, Average]] = field(default_factory=dict)  # users -> drafted tokens -> ratio
    _behind: dict[int, Average] = field(default_factory=dict)  # users -> ratio of steps just behind a draft

    def observe(self, n_users: int, n_draft: int, elapsed_s: float) -> None:
        """A step without prompts took `elapsed_s`; `n_draft` tokens were drafted over all its sequences."""
        if n_draft == 0:
            plain = self._plain.get(n_users)
            if plain is None:
                plain = self._plain[n_users] = Average()
            plain.add(elapsed_s, self.step)
        elif (plain := self._plain.get(n_users)) is not None:
            ratios = self._ratio.setdefault(n_users, {})
            ratios.setdefault(n_draft, Average()).add(elapsed_s / plain.value, self.step)

    def behind(self, n_users: int, ratio: float) -> float:
        """A step just behind a draft took `ratio` of one without; what those before it took, 1 at least."""
        average = self._behind.setdefault(n_users, Average())
        usual = average.value if average.n else ratio
        average.add(ratio, self.step)
        return max(1.0, usual)

    def plain_s(self, n_users: int) -> float:
        """Seconds of a step without drafts; 0.0 while two have not been seen."""
        plain = self._plain.get(n_users)
        return plain.value if plain is not None and plain.n >= 2 else 0.0

    def age(self, n_users: int) -> int:
        """Steps since a step without drafts was seen."""
        plain = self._plain.get(n_users)
        return self.step - plain.seen if plain is not None else 1 << 30

    def ratio(self, n_users: int, n_draft: int) -> float:
        """Time of a step with `n_draft` drafted tokens over one without: as measured, else along a line through the nearest."""
        if n_draft == 0:
            return 1.0
        known = self._ratio.get(n_users)
        if not known:
            return _guessed(n_users, n_draft)
        if n_draft in known:
            return self._known(n_users, n_draft)
        sizes = sorted([0, *known])
        below = max((n for n in sizes if n < n_draft), default=0)
        above = min((n for n in sizes if n > n_draft), default=None)
        if above is None:  # beyond what was tried: as steep as the last piece
            above, below = below, max(n for n in sizes if n < below)
        low, high = self._known(n_users, below), self._known(n_users, above)
        return max(1.0, low + (high - low) * (n_draft - below) / (above - below))

    def _known(self, n_users: int, n_draft: int) -> float:
        """A measured ratio: not believed to be as bad as it looks when it was seen only once, or long ago."""
        if n_draft == 0:
            return 1.0
        average = self._ratio[n_users][n_draft]
        ratio = max(1.0, average.value)
        if average.n < 2:
            ratio = min(ratio, _guessed(n_users, n_draft))
        return 1.0 + (ratio - 1.0) * 0.5 ** ((self.step - average.seen) / FORGET_STEPS)

    def table(self) -> dict[str, dict[str, float]]:
        """users -> drafted tokens -> ratio, for people; "0" has the milliseconds of a step without drafts."""
        out = {}
        for n_users, plain in sorted(self._plain.items()):
            ratios = {str(n): round(r.value, 2) for n, r in sorted(self._ratio.get(n_users, {}).items())}
            out[str(n_users)] = {"0": round(1e3 * plain.value, 3), **ratios}
        return out


def _guessed(n_users: int, n_draft: int) -> float:
    return 1.0 + FIRST_SLOPE * n_draft / n_users


@dataclass(slots=True)
class Rate:
    """How often drafted tokens are right, in decayed counts; the first values are what is assumed before any was seen."""

    right: float
    wrong: float = 1.0

    @property
    def p(self) -> float:
        """Probability that the next drafted token is right, given that those before it were."""
        return self.right / (self.right + self.wrong)


@dataclass(slots=True)
class Account:
    """One sequence: how often its drafts are right, and whether drafts have paid for it so far, in plain steps.

    Matches of fewer than 8, of fewer than 16 and of more tokens are counted apart: short ones are often chance.
    """

    rates: tuple[Rate, Rate, Rate] = field(default_factory=lambda: (Rate(1.0), Rate(3.0), Rate(4.0)))
    credit: float = 0.0
    rounds: int = 0
    accepted_ema: float = 0.0  # accepted tokens of a round
    n_drafts: int = 0
    verified_ema: float = 0.0  # accepted tokens of a draft that was verified
    n_refused: int = 0  # verified drafts in a row of which no token was right
    to_prove: int = 0  # tokens that must come true undrafted before the next draft is verified

    @property
    def waits(self) -> str:
        """Why nothing of it is verified, whatever it would cost; "" where something may be."""
        if self.credit < 0:
            return "too risky"
        return "refused before" if self.to_prove else ""

    @property
    def width_max(self) -> int:
        """Wide drafts are for those whose drafts came true; text that would have come true undrafted proves nothing."""
        return WIDTHS[-1] if self.verified_ema >= COME_TRUE else FIRST_WIDTH

    def rate(self, n_matched: int) -> Rate:
        """The counts of matches of this length."""
        return self.rates[(n_matched >= 8) + (n_matched >= 16)]

    def learn(self, n_matched: int, n_draft: int, n_accepted: int) -> None:
        """A draft of `n_draft` tokens was verified."""
        self.begin_guess(n_matched)
        rate = self.rate(n_matched)
        rate.right += n_accepted
        rate.wrong += n_accepted < n_draft
        self.n_drafts += 1
        self.verified_ema += max(1 - DECAY, 1 / self.n_drafts) * (n_accepted - self.verified_ema)
        self.n_refused = 0 if n_accepted else self.n_refused + 1
        self.to_prove = min(PROVE << (self.n_refused - REFUSED), PROVE_MAX) if self.n_refused >= REFUSED else 0
        self.count_round(n_accepted)

    def begin_guess(self, n_matched: int) -> None:
        """A draft is going to be compared with what comes, token by token: what was before counts less."""
        rate = self.rate(n_matched)
        rate.right, rate.wrong = DECAY * rate.right, DECAY * rate.wrong

    def guess(self, n_matched: int, right: bool) -> None:
        """The next token of such a draft came, or another one."""
        rate = self.rate(n_matched)
        rate.right, rate.wrong = rate.right + right, rate.wrong + (not right)
        if right and self.to_prove:
            self.to_prove -= 1

    def count_round(self, n_accepted: int) -> None:
        """A round brought so many tokens, or would have."""
        self.rounds += 1
        weight = max(1 - DECAY, 1 / self.rounds)
        self.accepted_ema += weight * (n_accepted - self.accepted_ema)

    def heir(self) -> Account:
        """The account of a request that continues this one's text: the same rates, less sure; debts, and credit for one draft."""
        first, second, third = (
            Rate(r.right * k, r.wrong * k) for r in self.rates for k in [min(1.0, SURE / (r.right + r.wrong))]
        )
        return Account(
            rates=(first, second, third),
            credit=min(self.credit, STAKE if self.verified_ema >= COME_TRUE else 0.0),
            n_drafts=min(self.n_drafts, 1),
            verified_ema=self.verified_ema,
            n_refused=self.n_refused,
            to_prove=self.to_prove,
        )

    def expected(self, n_matched: int, width: int) -> float:
        """Tokens that a draft of this width is expected to bring: p + p² + … + p^width."""
        p = min(self.rate(n_matched).p, 0.999)
        return p * (1 - p**width) / (1 - p)

    def risks(self, n_matched: int, extra: float) -> bool:
        """Whether a draft that makes the step `extra` longer stakes more than this sequence has."""
        likely = (1 - self.rate(n_matched).p) * extra
        return self.credit < 0 or extra > STAKE + self.credit or likely > RISK + self.credit / 8

    def book(self, change: float) -> None:
        """Add to the credit, within its bound."""
        self.credit = min(SAVED_MAX, self.credit + change)


class Cost(Protocol):
    """What a step takes with so many drafted tokens, over one without."""

    def ratio(self, n_users: int, n_draft: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Beside:
    """Cost beside prompts: what a draft takes longer without them, over the `part` of the step that is theirs.

    `part` is in steps without prompts. A draft hardly takes longer beside a prompt than alone, and where the time of a step is
    limited, all of it goes off the prompt's part.
    """

    times: StepTimes
    part: float

    def ratio(self, n_users: int, n_draft: int) -> float:
        """As of StepTimes."""
        return 1.0 + (self.times.ratio(n_users, n_draft) - 1.0) / self.part


@dataclass(frozen=True, slots=True)
class Offer:
    """A draft that was found for a sequence: how long it is, and how many tokens before it matched."""

    account: Account
    length: int = 0
    n_matched: int = 0


def choose(
    offers: Seq[Offer], times: Cost, n_max: int, margin: float, n_min: int = 0, prompts: Seq[Account] = ()
) -> tuple[list[int], str]:
    """Widths for this step, one per sequence, and why there are none: the most tokens per time nobody loses by.

    A sequence that drafts must gain more than the step loses, and must not be in debt or stake more than it has; one that
    does not must have the credit to wait that long, and so must the `prompts` that are computed beside them. `margin` is the
    gain below which nothing is done; nobody drafts fewer than `n_min` tokens.
    """
    n_users = len(offers)
    # What is asked for at least goes before caution.
    narrowest = min((width for width in WIDTHS if width >= n_min), default=n_min)
    best, best_rate, why = [0] * n_users, 1.0 + margin, "would not pay"
    for cap in (width for width in WIDTHS if n_min <= width <= n_max):
        widths = [width_below(min(offer.length, cap, max(offer.account.width_max, narrowest))) for offer in offers]
        if max(widths) < cap:
            break  # no draft is that long
        gains, extra, reason = _who_gains(offers, widths, times)
        why = reason or why
        if not any(widths):
            continue
        waiting = [*prompts, *(offer.account for offer, w in zip(offers, widths, strict=True) if not w)]
        if any(min(account.credit, NEIGHBOUR_MAX) < extra for account in waiting):
            why = "would cost others"
            continue
        rate = (n_users + sum(gains)) / n_users / (1.0 + extra)
        if rate > best_rate:
            best, best_rate = widths, rate
    return best, "" if any(best) else why


def _who_gains(offers: Seq[Offer], widths: list[int], times: Cost) -> tuple[list[float], float, str]:
    """Take those out of `widths` who would lose; what each gains and what the step takes longer, in plain steps."""
    reason = ""
    while True:
        extra = times.ratio(len(offers), sum(widths)) - 1.0
        gains = [o.account.expected(o.n_matched, w) if w else 0.0 for o, w in zip(offers, widths, strict=True)]
        losers = [
            i
            for i, (offer, w) in enumerate(zip(offers, widths, strict=True))
            if w and (gains[i] <= extra or offer.account.risks(offer.n_matched, extra))
        ]
        if not losers:
            return gains, extra, reason
        worst = min(losers, key=lambda i: gains[i])
        reason = "would not pay" if gains[worst] <= extra else "too risky"
        widths[worst] = 0
