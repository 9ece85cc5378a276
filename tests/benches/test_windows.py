"""What is counted: rates while all streams run, the largest wait in a window, steps of the engine with the library faked."""

from __future__ import annotations

import numpy as np
import pytest

from benches.big_prompt import Neighbour
from benches.fake_decode import TimedDecode, timed_engine
from benches.serve_rate import rate
from benches.sides import SideError
from llamamg.config import PluginsConfig
from llamamg.request import Delta, Finished
from llamamg.testing import ask, run


def test_the_rate_counts_only_what_arrived_while_all_streams_ran() -> None:
    slow, fast = np.arange(0.0, 10.5, 1.0), np.arange(2.0, 8.1, 0.5)
    assert rate([slow, fast]) == pytest.approx((6 + 12) / 6)
    assert rate([slow]) == pytest.approx(1.0)


def test_streams_that_never_overlap_are_refused() -> None:
    with pytest.raises(SideError, match="overlap"):
        rate([[0.0, 1.0], [2.0, 3.0]])


def test_a_wait_counts_as_far_as_it_lies_in_the_window() -> None:
    neighbour = Neighbour("http://127.0.0.1:1")
    neighbour.stamps = [0.0, 0.010, 0.020, 0.050, 0.060, 0.160]
    assert neighbour.largest_gap_ms(0.005, 0.055) == pytest.approx(30)
    assert neighbour.largest_gap_ms(0.001, 0.021) == pytest.approx(10)
    assert neighbour.largest_gap_ms(0.055, 0.100) == pytest.approx(40)
    assert neighbour.largest_gap_ms(0.030, 0.045) == pytest.approx(15)


def test_the_timed_engine_runs_the_real_loop() -> None:
    decode = TimedDecode(0.0, 100)
    engine = timed_engine(decode, 3, 64, PluginsConfig(none=True))
    events = []
    engine.deliver = events.extend
    requests = [ask([65] * 4, n_predict=5, stream=True) for _ in range(3)]
    for request in requests:
        engine.submit(request)
    run(engine)
    assert decode.n_tokens[: decode.n].tolist() == [12, 3, 3, 3, 3]
    texts = []
    for request in requests:
        mine = [event for id, event in events if id == request.id]
        texts.append("".join(event.text for event in mine if isinstance(event, Delta)))
        assert isinstance(mine[-1], Finished)
    assert sorted(texts) == ["aaaaa", "bbbbb", "ccccc"]
