"""Slots and runs for tests of seq-compact: five sessions of which two end, and a machine's times of a pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llamamg import Request, Slot
from llamamg.config import PluginsConfig
from llamamg.plugins import PluginSet
from llamamg.plugins.testing import config as full_config
from llamamg.request import Failed, Finished
from llamamg.testing import ask, fake_engine, run
from llamamg_plugins.pass_times import runs_of


def slots_of(busy: str, used: tuple[float, ...] | None = None) -> list[Slot]:
    """ "x.x": busy, idle, busy."""
    slots = [Slot(i, i, t_last_used=used[i] if used else -1.0) for i in range(len(busy))]
    for slot, mark in zip(slots, busy, strict=True):
        slot.sequence = object() if mark == "x" else None  # type: ignore[assignment]
    return slots


def asked(text: str, **fields: Any) -> Request:
    return ask(text, **fields)


def n_ubatches(seq_ids: list[int]) -> int:
    """Passes libllama makes for one token of each: it starts anew where the next id is not the last one plus one."""
    return sum(i == 0 or id_ != seq_ids[i - 1] + 1 for i, id_ in enumerate(seq_ids))


def off() -> PluginSet:
    plugins = PluginSet.discover(PluginsConfig(none=True))
    plugins.configure(full_config())
    return plugins


ALWAYS = {"options": {"seq-compact": {"always": "true"}}}


def seconds(joint: float) -> Callable[[Any], float]:
    """A machine on which a pass of one takes 10 ms, and each more in the same pass `joint` times that."""

    def of(batch: Any) -> float:
        runs = runs_of(row.sequence.slot.seq_id for row in batch.rows)
        return sum(0.01 * (1 + joint * (n - 1)) for n in runs)

    return of


def two_of_five_end(
    plugins: PluginSet, elapsed_s: Callable[[Any], float] | None = None, **options: Any
) -> tuple[list[int], list[str], list[int]]:
    """Passes per step once the sequences in slots 1 and 3 are over; all texts; the slots that clients saw."""
    engine, runner, events = fake_engine(5, plugins=plugins, n_batch=64, **options)
    if elapsed_s is not None:
        runner.elapsed_s = elapsed_s
    requests = [ask(f"prompt {i}", n_predict=6 if i in (1, 3) else 30, id_slot=i) for i in range(5)]
    for request in requests:
        engine.submit(request)
    while sum(isinstance(event, Finished) for _, event in events) < 2:
        engine.step()
    begin = len(runner.batches)
    for _ in range(10):
        engine.step()
    passes = [n_ubatches([row[0] for row in batch]) for batch in runner.batches[begin:]]
    run(engine)
    assert not any(isinstance(event, Failed) for _, event in events)
    finished = {id_: event for id_, event in events if isinstance(event, Finished)}
    return passes, [finished[r.id].text for r in requests], [finished[r.id].id_slot for r in requests]
