"""The threads of a pool of contexts: what ends first comes first, errors stay with their batch, and nothing hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llamamg import hookimpl
from llamamg.batch import Batch, Row
from llamamg.config import Config, ContextConfig, ModelConfig, PluginsConfig
from llamamg.errors import BatchError
from llamamg.guard import Guard
from llamamg.layout import Layout, layout_of, one_context
from llamamg.loading import assemble
from llamamg.plugins import PluginSet, plugin
from llamamg.plugins.discovery import Found
from llamamg.request import Failed, Finished
from llamamg.runner import Done, Output
from llamamg.runner_pool import ContextPool, Stalled
from llamamg.testing import FakeKV, FakeSampler, FakeVocabulary, ask, model_info

from .gated import Gated, batch_of


@pytest.fixture
def pool() -> Iterator[Callable[..., Any]]:
    made: list[tuple[ContextPool, list[Gated]]] = []

    def make(n: int = 3, stall_s: float = 20.0) -> Any:
        runners = [Gated(i) for i in range(n)]
        made.append((ContextPool(runners, stall_s), runners))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one, runners in made:
        for runner in runners:
            runner.gate.set()
        one.close()


def test_what_ends_first_is_collected_first(pool: Callable[..., Any]) -> None:
    one, runners = pool()
    batches = [batch_of(i) for i in range(3)]
    for batch in batches:
        one.submit(batch)
    assert one.n_in_flight == 3
    for i in (2, 0, 1):
        assert not one.is_free(i)
        runners[i].gate.set()
        done = one.collect()
        assert done.batch is batches[i]
        assert one.is_free(i)
    assert one.n_in_flight == 0
    assert one.collect() is None


def test_a_device_is_waited_for_where_nobody_else_waits(pool: Callable[..., Any]) -> None:
    """A batch before a checkpoint is done when its device is; the engine's thread collects others meanwhile."""
    one, runners = pool(2)
    prompt = Batch([Row(None, [1, 2], 0, 0, is_prompt=True, waits=True)], 0)  # type: ignore[arg-type]
    decode = batch_of(1)
    for runner in runners:
        runner.gate.set()
    one.submit(prompt)
    one.submit(decode)
    assert one.collect().batch is decode
    assert not one.is_free(0)
    runners[0].device.set()
    assert one.collect().batch is prompt
    assert runners[0].waited_on not in (None, threading.current_thread())
    assert runners[1].waited_on is None, "nothing of it is read"


def test_halves_are_waited_for_where_the_whole_was() -> None:
    head, tail = Batch([Row(None, [1, 2, 3, 4], 0, 0, is_prompt=True, waits=True)]).halves()  # type: ignore[arg-type]
    assert (head.waits, tail.waits) == (False, True)


def test_a_context_takes_one_batch(pool: Callable[..., Any]) -> None:
    one, _ = pool()
    one.submit(batch_of(1))
    with pytest.raises(RuntimeError, match="context 1 is busy"):
        one.submit(batch_of(1))
    with pytest.raises(RuntimeError, match="context 1 is busy"):
        one.run((0, 1), lambda: None, lambda *_: None)
    assert one.is_free(0)


def test_an_error_comes_back_with_its_batch(pool: Callable[..., Any]) -> None:
    one, runners = pool()
    runners[0].error = BatchError(-3, "Compute error.")
    first, second = batch_of(0), batch_of(1)
    one.submit(first)
    one.submit(second)
    runners[0].gate.set()
    done = one.collect()
    assert (done.batch, done.error) == (first, runners[0].error)
    runners[1].gate.set()
    done = one.collect()
    assert (done.batch, done.error) == (second, None)


def test_a_mistake_in_the_thread_reaches_the_engine(pool: Callable[..., Any]) -> None:
    one, runners = pool()
    runners[0].error = ZeroDivisionError("a mistake")  # type: ignore[assignment]
    one.submit(batch_of(0))
    runners[0].gate.set()
    with pytest.raises(ZeroDivisionError):
        one.collect()


def test_waking_ends_the_wait_and_nothing_else(pool: Callable[..., Any]) -> None:
    one, runners = pool()
    one.submit(batch_of(0))
    threading.Timer(0.05, lambda: [one.wake() for _ in range(5)]).start()
    assert one.collect() is None
    assert one.n_in_flight == 1
    runners[0].gate.set()
    assert one.collect() is not None


def test_a_job_takes_its_contexts_and_tells_how_it_ended(pool: Callable[..., Any]) -> None:
    one, _ = pool()
    ended: list[Any] = []
    threads: list[Any] = []

    def job() -> int:
        threads.append(threading.current_thread())
        return 7

    one.run((0, 2), job, lambda *result: ended.append(result))
    assert (one.is_free(0), one.is_free(1), one.is_free(2)) == (False, True, False)
    assert one.collect() is None
    assert ended == [(7, None)]
    assert threads[0] is not threading.current_thread()
    assert one.is_free(0)
    assert one.is_free(2)

    def fails() -> None:
        raise ValueError("no")

    one.run((0, 2), fails, lambda *result: ended.append(result))
    one.collect()
    assert isinstance(ended[1][1], ValueError)


def test_settling_waits_for_the_thread_that_uses_a_context(pool: Callable[..., Any]) -> None:
    one, runners = pool()
    gate = threading.Event()
    one.submit(batch_of(1))
    one.run((0, 2), lambda: gate.wait(20), lambda *_: None)
    threading.Timer(0.1, gate.set).start()
    began = time.monotonic()
    one.settle_one(0)  # the job runs on the thread of context 2
    assert gate.is_set()
    assert time.monotonic() - began > 0.05
    assert not one.is_free(0)  # it is not collected yet
    threading.Timer(0.1, runners[1].gate.set).start()
    one.settle()
    assert runners[1].gate.is_set()


def test_nothing_for_a_long_time_is_said_and_does_not_hang(pool: Callable[..., Any]) -> None:
    one, runners = pool(stall_s=0.2)
    one.submit(batch_of(1))
    with pytest.raises(Stalled, match=r"nothing ended for 0\.2 s \(context 1: a batch of 0 tokens for"):
        one.collect()
    assert runners[0].aborted  # the flag is the process's
    with pytest.raises(Stalled, match="context 1 still computes"):
        one.settle_one(1)
    one.settle_one(0)
    one.close()
    assert [runner.closed for runner in runners] == [True, False, True]


class Counting(Gated):
    """Computes with a stand-in memory: the next token is the number of tokens so far."""

    def __init__(self, index: int, kv: FakeKV) -> None:
        super().__init__(index)
        self._kv = kv

    def submit(self, batch: Any) -> None:
        super().submit(batch)
        for row in batch.rows:
            self._kv.put(row.sequence.slot.seq_id, row.pos0, [int(t) for t in row.tokens])

    def collect(self) -> Any:
        rows = [row for row in self._batch.rows if row.n_logits]
        return Done(self._batch, [Output(row, [32 + row.pos0 + len(row)]) for row in rows], 0.1)


@pytest.fixture
def served() -> Iterator[Callable[..., Any]]:
    """A running engine over two contexts with two slots each; its runners; the events."""
    made: list[Any] = []

    def make(stall_s: float = 20.0) -> Any:
        config = Config(ModelConfig(Path("fake.gguf")), ContextConfig(n_parallel=4, n_groups=2))
        found = {"both": Found("both", False, "a test", Both, Both.declaration)}
        plugins = PluginSet(PluginsConfig(enable=("both",)), found)
        config = plugins.configure(config, [])
        layout = layout_of(config.context)
        kv = FakeKV(4, layout=layout)
        runners = [Counting(i, kv) for i in range(2)]
        pool = ContextPool(runners, stall_s)  # type: ignore[arg-type]
        engine = assemble(
            config,
            plugins,
            pool,
            kv,
            FakeVocabulary(),
            model_info(),
            n_ctx_slot=128,
            new_sampler=lambda request: FakeSampler(request.sampling),
            layout=layout,
        )
        events: list[Any] = []
        engine.deliver = events.extend
        engine.start()
        made.append((engine, runners))
        return engine, runners, events

    yield make
    for engine, runners in made:
        for runner in runners:
            runner.gate.set()
        engine.stop(0.0)


@plugin(name="both", summary="", helps="", hurts="", guard=Guard.exact())
class Both:
    """Two batches at once."""

    @hookimpl
    def batches_in_flight(self) -> int:
        return 2


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_request_for_an_idle_group_does_not_wait_for_a_batch_of_another_one(served: Callable[..., Any]) -> None:
    engine, runners, events = served()
    first, second = ask([50, 51], n_predict=3, id_slot=0), ask([60, 61, 62], n_predict=3, id_slot=2)
    engine.submit(first)
    until(lambda: engine.runner.n_in_flight == 1)
    runners[1].gate.set()  # the first group computes on and on
    engine.submit(second)
    until(lambda: any(id_ == second.id and isinstance(event, Finished) for id_, event in events))
    assert not any(id_ == first.id and isinstance(event, Finished) for id_, event in events)
    cancelled = ask([70], n_predict=3, id_slot=3)
    engine.cancel(first.id)
    engine.submit(cancelled)
    until(lambda: any(id_ == cancelled.id and isinstance(event, Finished) for id_, event in events))
    runners[0].gate.set()
    until(lambda: engine.runner.n_in_flight == 0)
    assert [event.text for id_, event in events if id_ == second.id and isinstance(event, Finished)] == ["#$%"]
    assert not any(slot.busy for slot in engine.slots)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_requests_fail_rather_than_hang(served: Callable[..., Any]) -> None:
    engine, runners, events = served(stall_s=0.2)
    runners[1].gate.set()
    requests = [ask([50, 51], n_predict=3, id_slot=0), ask([60, 61], n_predict=3, id_slot=2)]
    for request in requests:
        engine.submit(request)
    until(lambda: engine.error is not None)
    ends = {id_: event for id_, event in events if isinstance(event, Finished | Failed)}
    assert isinstance(ends[requests[1].id], Finished)
    failed = ends[requests[0].id]
    assert isinstance(failed, Failed)
    assert "nothing ended for" in failed.message
    assert isinstance(engine.error, Stalled)


def test_layouts() -> None:
    assert one_context(3).groups == (range(3),)
    layout = Layout((range(0, 3), range(3, 5)), range(6, 8), n_spare=1)
    assert [layout.context(i) for i in range(8)] == [0, 0, 0, 1, 1, 0, 2, 2]
    assert [layout.local(i) for i in range(8)] == [0, 1, 2, 0, 1, 3, 0, 1]
    assert [layout.n_seq(i) for i in range(3)] == [4, 2, 2]
    assert layout.n_contexts == 3
    config: Any = SimpleNamespace(n_parallel=7, n_groups=3, n_prefill_slots=1)
    assert layout_of(config, 1).groups == (range(0, 3), range(3, 5), range(5, 7))
    assert layout_of(config, 1).prefill == range(8, 9)
    config = SimpleNamespace(n_parallel=2, n_groups=5, n_prefill_slots=0)
    assert layout_of(config).n_contexts == 2
