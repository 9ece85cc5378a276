"""When a draft pays: widths by acceptance and step time, and that nobody loses more than the credit it has."""

from __future__ import annotations

import pytest

from llamamg_plugins.spec_cost import (
    FIRST_WIDTH,
    PROVE,
    PROVE_MAX,
    WIDTHS,
    Account,
    Beside,
    Offer,
    StepTimes,
    choose,
    width_below,
)

LONG = 32  # tokens matched


def times(n_users: int = 1, plain_s: float = 0.01, **seconds: float) -> StepTimes:
    """Measured step times: `times(1, w7=0.02)` for seven drafted tokens."""
    out = StepTimes()
    for _ in range(3):
        out.observe(n_users, 0, plain_s)
        for name, value in seconds.items():
            out.observe(n_users, int(name[1:]), value)
    return out


def sure(credit: float = 0.0) -> Account:
    account = Account(credit=credit)
    for _ in range(50):
        account.learn(LONG, 15, 15)
    return account


def unsure(credit: float = 0.0) -> Account:
    account = Account(credit=credit)
    for _ in range(50):
        account.learn(LONG, 15, 0)
    return account


def widths(offers: list[Offer], known: StepTimes, n_max: int = 31) -> list[int]:
    return choose(offers, known, n_max, 0.03)[0]


def test_widths_are_a_few_fixed_ones() -> None:
    assert [width_below(n) for n in (-1, 0, 1, 2, 3, 6, 7, 14, 15, 31, 62, 64)] == [
        0,
        0,
        1,
        1,
        3,
        3,
        7,
        7,
        15,
        31,
        31,
        63,
    ]


def test_the_width_with_the_most_tokens_per_time() -> None:
    flat = times(w1=0.01, w3=0.01, w7=0.01, w15=0.0101, w31=0.0102)
    assert widths([Offer(sure(), 40, LONG)], flat) == [31]
    assert widths([Offer(sure(), 40, LONG)], flat, n_max=15) == [15]
    assert widths([Offer(sure(), 10, LONG)], flat) == [7]
    steep = times(w1=0.012, w3=0.016, w7=0.05, w15=0.1, w31=0.3)
    assert widths([Offer(sure(), 40, LONG)], steep) == [3]


def test_drafts_that_miss_are_not_verified() -> None:
    assert choose([Offer(unsure(), 40, LONG)], times(w1=0.015), 31, 0.03) == ([0], "would not pay")
    assert choose([Offer(Account(), 0, 0)], times(), 31, 0.03)[0] == [0]


def test_a_cost_as_high_as_the_gain_is_not_paid() -> None:
    assert widths([Offer(sure(), 40, LONG)], times(w1=0.02, w3=0.04, w7=0.08, w15=0.16, w31=0.32)) == [0]


def test_who_is_in_debt_waits() -> None:
    flat = times(w1=0.011, w3=0.012, w7=0.013, w15=0.02, w31=0.04)
    assert choose([Offer(sure(credit=-1.0), 40, LONG)], flat, 31, 0.03) == ([0], "too risky")


def test_a_new_sequence_begins_with_short_drafts() -> None:
    known = times(w1=0.02, w3=0.025, w7=0.045, w15=0.09, w31=0.18)
    new = Account()
    assert widths([Offer(new, 40, LONG)], known) == [3]
    for _ in range(10):
        new.learn(LONG, 7, 7)
    assert widths([Offer(new, 40, LONG)], known) == [3]  # it looks good, and has not gained anything yet
    new.book(2.0)
    assert widths([Offer(new, 40, LONG)], known)[0] > 3


def test_a_neighbour_waits_only_as_long_as_its_credit_lasts() -> None:
    known = times(2, w7=0.015, w1=0.0145, w3=0.0148, w15=0.05, w31=0.1)
    assert choose([Offer(sure(), 10, LONG), Offer(Account(credit=0.4))], known, 31, 0.03) == (
        [0, 0],
        "would cost others",
    )
    assert widths([Offer(sure(), 10, LONG), Offer(Account(credit=0.6))], known) == [7, 0]
    slow = times(2, w1=0.022, w3=0.024, w7=0.026)
    assert widths([Offer(sure(), 10, LONG), Offer(Account(credit=9.0))], slow) == [0, 0]  # a step too long at once


def test_two_that_gain_draft_together_and_one_that_would_lose_is_left_out() -> None:
    known = times(3, **{f"w{n}": 0.012 for n in (1, 2, 3, 6, 7, 8, 14, 15, 22, 30, 31, 62)})
    offers = [Offer(sure(1.0), 9, LONG), Offer(unsure(1.0), 9, LONG), Offer(sure(1.0), 40, LONG)]
    chosen = widths(offers, known)
    assert chosen[1] == 0
    assert chosen[0] == 7
    assert chosen[2] >= 15


def test_long_and_short_matches_are_learned_apart() -> None:
    account = Account()
    for _ in range(20):
        account.learn(4, 8, 0)
        account.learn(LONG, 8, 8)
    assert account.rate(5).p < 0.1 < 0.9 < account.rate(20).p


def test_the_expected_tokens_are_a_geometric_sum() -> None:
    account = Account()
    p = account.rate(LONG).p
    assert account.expected(LONG, 3) == pytest.approx(p + p**2 + p**3)
    assert sure().expected(LONG, 31) <= 31


def test_times_between_sizes_lie_on_a_line_and_beyond_them_go_on_as_steep() -> None:
    known = times(w1=0.012, w3=0.016)
    assert known.ratio(1, 0) == 1.0
    assert known.ratio(1, 2) == pytest.approx(1.4)
    assert known.ratio(1, 7) == pytest.approx(1.6 + 4 * 0.2)
    assert times(2).ratio(2, 4) == pytest.approx(2.0)  # nothing known: half a step for each row more than users
    assert times(w15=0.012).ratio(1, 31) == pytest.approx(1 + 0.2 * 31 / 15)


def test_one_slow_step_does_not_count_for_ever() -> None:
    known = times(w7=0.02)
    known.observe(1, 7, 9.0)
    for _ in range(20):
        known.observe(1, 7, 0.02)
    assert known.ratio(1, 7) == pytest.approx(2.0, rel=0.05)


def test_the_first_time_of_a_new_shape_is_not_believed() -> None:
    known = times()
    known.observe(1, 7, 0.5)
    assert known.ratio(1, 7) == pytest.approx(4.5)  # what is guessed for a size that was never seen
    assert known.ratio(1, 15) == pytest.approx(8.5)
    known.observe(1, 7, 0.02)
    assert known.ratio(1, 7) == pytest.approx(2.0)


def test_a_size_that_was_too_slow_is_tried_again_some_day() -> None:
    known = times(w1=0.02, w3=0.04, w7=0.08, w15=0.16, w31=0.32)
    offer = Offer(sure(), 40, LONG)
    assert widths([offer], known) == [0]
    known.step += 10_000
    assert widths([offer], known) != [0]


def test_credit_is_bounded_above() -> None:
    account = Account()
    for _ in range(1000):
        account.book(1.0)
    assert account.credit == 16.0
    account.book(-17.0)
    assert account.credit == -1.0
    assert WIDTHS[0] == 1


def test_what_continues_a_text_begins_with_what_was_learned_of_it() -> None:
    heir = sure(credit=5.0).heir()
    assert heir.rate(LONG).p > 0.95
    assert heir.rate(LONG).right + heir.rate(LONG).wrong == pytest.approx(10.0)
    assert (heir.credit, heir.rounds) == (2.0, 0)
    assert unsure(credit=5.0).heir().credit == 0.0, "only where drafts came true"
    assert sure(credit=-3.0).heir().credit == -3.0, "a debt stays with the text"
    assert Account().heir() == Account()


def test_guesses_count_at_once() -> None:
    account, whole = Account(), Account()
    account.begin_guess(LONG)
    for right in (True, True, True, False):
        account.guess(LONG, right)
    whole.learn(LONG, 8, 3)
    assert account.rate(LONG) == whole.rate(LONG)


def test_the_first_drafts_are_narrow_until_one_came_true() -> None:
    flat = times(w1=0.01, w3=0.01, w7=0.01, w15=0.0101, w31=0.0102)
    account = Account(credit=10.0)
    assert widths([Offer(account, 40, LONG)], flat) == [FIRST_WIDTH]
    account.count_round(8)  # compared, not drafted
    account.learn(LONG, 7, 0)
    account.book(10.0)
    assert widths([Offer(account, 40, LONG)], flat) == [FIRST_WIDTH]
    account.learn(LONG, 7, 7)
    assert widths([Offer(account, 40, LONG)], flat) == [31]
    assert widths([Offer(account.heir(), 40, LONG)], flat) == [31], "a request that continues it is known"
    assert Account().heir().width_max == FIRST_WIDTH


def test_a_smallest_width_above_the_first_one_is_drafted_from_the_beginning() -> None:
    flat = times(w1=0.01, w3=0.01, w7=0.01, w15=0.0101, w31=0.0102)
    assert choose([Offer(Account(credit=10.0), 40, LONG)], flat, 31, 0.03, n_min=12)[0] == [15]
    assert choose([Offer(Account(credit=10.0), 14, LONG)], flat, 31, 0.03, n_min=12)[0] == [0], "too short a draft"


def test_who_was_refused_twice_proves_itself_undrafted() -> None:
    account = Account(credit=5.0)
    account.learn(LONG, 7, 0)
    assert account.waits == ""
    account.learn(LONG, 7, 0)
    assert account.waits == "refused before"
    for _ in range(PROVE - 1):
        account.guess(LONG, True)
    account.guess(LONG, False)
    assert account.waits == "refused before", "only what came true counts"
    account.guess(LONG, True)
    assert account.waits == ""


def test_each_further_refusal_takes_twice_as_long_up_to_a_bound() -> None:
    account, taken = Account(credit=50.0), []
    for _ in range(6):
        account.learn(LONG, 7, 0)
        taken.append(account.to_prove)
        for _ in range(account.to_prove):
            account.guess(LONG, True)
    assert taken == [0, PROVE, 2 * PROVE, PROVE_MAX, PROVE_MAX, PROVE_MAX]
    account.learn(LONG, 7, 1)
    account.learn(LONG, 7, 0)
    assert account.to_prove == 0, "one that came true ends it"


def test_what_continues_a_text_still_has_to_prove_itself() -> None:
    account = Account()
    for _ in range(2):
        account.learn(LONG, 7, 0)
    account.guess(LONG, True)
    assert account.heir().to_prove == PROVE - 1
    assert account.heir().n_refused == 2


def test_a_prompt_beside_it_waits_only_as_long_as_its_credit_lasts() -> None:
    known, offer = times(w1=0.011, w3=0.012, w7=0.014, w15=0.05, w31=0.1), Offer(sure(credit=5.0), 10, LONG)
    assert choose([offer], known, 31, 0.03, prompts=[Account(credit=0.3)]) == ([3], "")
    assert choose([offer], known, 31, 0.03, prompts=[Account(credit=0.3), Account()]) == ([0], "would cost others")
    assert choose([offer], known, 31, 0.03, prompts=[Account(credit=0.5)]) == ([7], "")


def test_a_draft_beside_a_prompt_takes_its_time_off_the_prompts_part() -> None:
    known = times(w7=0.014)
    assert Beside(known, 2.0).ratio(1, 7) == pytest.approx(1.2)
    assert Beside(known, 0.5).ratio(1, 7) == pytest.approx(1.8)
    assert Beside(known, 0.5).ratio(1, 0) == 1.0
