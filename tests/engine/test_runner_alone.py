"""A short batch with no other one in flight: computed on the engine's thread where devices are asynchronous."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from llamamg.batch import Batch, Row
from llamamg.errors import BatchError
from llamamg.runner import Done
from llamamg.runner_pool import N_TOKENS_ALONE, ContextPool

from .gated import Gated, batch_of


class Launched(Gated):
    """As on a GPU: the call returns at once, and whoever reads the result waits."""

    def submit(self, batch: Any) -> None:
        self._batch, self.begun_on = batch, threading.current_thread()
        if self.error is not None:
            raise self.error

    def collect(self) -> Any:
        assert self.gate.wait(20)
        return Done(self._batch, [], 0.1)

    @property
    def is_here(self) -> bool:
        """Whether its last batch was begun on this thread."""
        return self.begun_on is threading.current_thread()


@pytest.fixture
def async_pool() -> Iterator[Any]:
    runners = [Launched(i) for i in range(3)]
    for runner in runners:
        runner.device.set()
    one = ContextPool(runners, 20.0, is_async=True)  # type: ignore[arg-type]
    yield one, runners
    for runner in runners:
        runner.gate.set()
    one.close()


def tokens_for(group: int, n: int, waits: bool = False) -> Batch:
    return Batch([Row(None, [1] * n, 0, 0, is_prompt=True, waits=waits)], group)  # type: ignore[arg-type]


@pytest.mark.parametrize("starts", [True, False])
def test_a_short_batch_that_is_alone_needs_no_thread(async_pool: Any, starts: bool) -> None:
    one, runners = async_pool
    batch = tokens_for(1, N_TOKENS_ALONE, waits=True)
    one.submit(batch)
    assert (one.n_in_flight, one.is_free(1)) == (1, False)
    assert runners[1].begun_on is None, "more may come"
    if starts:
        one.start()
        assert runners[1].is_here
    one.wake()
    runners[1].gate.set()
    assert one.collect().batch is batch
    assert runners[1].waited_on is threading.current_thread()
    assert (one.n_in_flight, one.is_free(1), one.n_alone) == (0, True, 1)
    one.submit(batch)
    assert one.collect().batch is batch, "a wake of before is not taken for a result"


def test_what_is_not_alone_or_long_has_a_thread(async_pool: Any) -> None:
    one, runners = async_pool
    first, second = batch_of(0), batch_of(1)
    one.submit(first)
    one.submit(second)
    one.start()
    runners[1].gate.set()
    assert one.collect().batch is second
    third = batch_of(2)
    one.submit(third)
    one.start()
    runners[2].gate.set()
    assert one.collect().batch is third, "it was not alone"
    runners[0].gate.set()
    assert one.collect().batch is first
    long = tokens_for(0, N_TOKENS_ALONE + 1)
    one.submit(long)
    one.start()
    assert one.collect().batch is long
    assert not any(runner.is_here for runner in runners)
    assert one.n_alone == 0


def test_a_job_beside_it_does_not_wait_for_it(async_pool: Any) -> None:
    one, runners = async_pool
    ended: list[Any] = []
    one.submit(batch_of(0))
    one.run((1, 2), lambda: 7, lambda *result: ended.append(result))
    assert one.collect() is None
    assert ended == [(7, None)]
    runners[0].gate.set()
    assert one.collect() is not None
    assert not runners[0].is_here


def test_settling_waits_for_what_is_alone(async_pool: Any) -> None:
    one, runners = async_pool
    one.submit(batch_of(0))
    threading.Timer(0.1, runners[0].gate.set).start()
    one.settle_one(1)
    assert runners[0].begun_on is None, "nothing is waited for in another context"
    one.settle_one(0)
    assert runners[0].gate.is_set(), "not begun: it ends before anything of its context is changed"
    assert not one.is_free(0)
    assert one.collect() is not None
    one.submit(batch_of(0))
    one.start()
    one.settle()
    assert runners[0].waited_on is threading.current_thread(), "begun: its device is waited for"
    assert one.collect() is not None


def test_an_error_of_what_is_alone_comes_back_with_it(async_pool: Any) -> None:
    one, runners = async_pool
    runners[0].error = BatchError(-3, "Compute error.")
    batch = batch_of(0)
    one.submit(batch)
    one.start()
    done = one.collect()
    assert (done.batch, done.error, one.n_in_flight, one.is_free(0)) == (batch, runners[0].error, 0, True)
    runners[0].error = ZeroDivisionError("a mistake")
    one.submit(batch)
    with pytest.raises(ZeroDivisionError):
        one.collect()
