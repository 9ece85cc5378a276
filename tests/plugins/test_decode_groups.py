"""decode-groups: which slot a request gets, when sequences move, and that batches overlap."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from llamamg import Slot, StepState
from llamamg.options import OptionError, resolve
from llamamg.options.declared import declared_options
from llamamg.options.table import Table
from llamamg.plugins import discover
from llamamg.plugins.testing import config as config_of
from llamamg.plugins.testing import unconfigured
from llamamg.request import Finished
from llamamg.sequence import SequenceState
from llamamg.testing import ask, fake_engine, run
from llamamg_plugins.decode_groups import DecodeGroups
from llamamg_plugins.seq_compact import SeqCompact


def slots_of(*groups: str) -> list[Slot]:
    """ "xx.", "..": two groups; x is busy."""
    slots: list[Slot] = []
    for group, marks in enumerate(groups):
        for mark in marks:
            slot = Slot(len(slots), len(slots), context=group)
            if mark == "x":
                slot.sequence = Running()  # type: ignore[assignment]
            slots.append(slot)
    return slots


@dataclass
class Running:
    state: SequenceState = SequenceState.DECODE
    n_remaining: int = 100


def selected(*groups: str) -> int | None:
    slot = DecodeGroups().select_slot(ask("hello"), slots_of(*groups))
    return None if slot is None else slot.id


def test_a_request_goes_to_the_emptiest_group_beside_a_busy_slot() -> None:
    assert selected("xx.", "..") == 3
    assert selected("x..", "x.") == 1  # of equals the first, next to the busy one
    assert selected("xxx", "x.") == 4
    assert selected("xxx", ".x.", "x") == 3
    assert selected("xxxx.") is None  # one group: the engine's own choice


def test_a_cached_prefix_is_worth_more() -> None:
    slots = slots_of("x..", "..")
    slots[1].tokens.extend(ask("hello there").prompt)
    assert DecodeGroups().select_slot(ask("hello there, you"), slots) is None
    assert DecodeGroups().select_slot(ask("hello there, you", cache_prompt=False), slots) is not None


def moved(slots: list[Slot]) -> list[tuple[int, int]] | None:
    return DecodeGroups().balance_groups(StepState(64, 16, slots=slots))


def test_groups_are_levelled() -> None:
    assert moved(slots_of("xxx", "..")) == [(0, 3)]
    assert moved(slots_of("xxx", "x.")) == [(0, 4)]
    assert moved(slots_of("xx.", "x.")) is None
    assert moved(slots_of("x..", "..")) is None
    slots = slots_of("xxx", "..")
    slots[0].tokens.extend(ask("long long").prompt)
    slots[3].tokens.extend(ask("cached").prompt)
    assert moved(slots) == [(1, 4)]  # the shortest one, to where nothing is lost


def test_what_cannot_or_should_not_move_stays() -> None:
    slots = slots_of("xx", "..")
    slots[0].moving = True
    slots[1].sequence.n_remaining = 3  # type: ignore[misc,union-attr]
    assert moved(slots) is None
    slots[1].sequence = Running(SequenceState.PREFILL)  # type: ignore[assignment]
    assert moved(slots) is None
    slots[1].sequence = Running()  # type: ignore[assignment]
    assert moved(slots) == [(1, 2)]
    slots[2].stays = True
    assert moved(slots) == [(1, 3)]
    slots[3].stays = True
    assert moved(slots) is None


def engine_with(n_slots: int, *classes: type[Any], groups: str, prefill: str) -> Any:
    options = {"decode-groups": {"groups": groups, "prefill-slots": prefill, "local-prompt": "4"}}
    plugins = unconfigured(DecodeGroups, *classes, enable=("decode-groups",), options=options)
    config = plugins.configure(config_of(n_slots), [])
    made = fake_engine(
        n_slots,
        plugins=plugins,
        config=config,
        n_groups=config.context.n_groups,
        n_prefill_slots=config.context.n_prefill_slots,
    )
    return *made, plugins


def effect_of(plugins: Any) -> int:
    return next(int(view.effect) for view in plugins.views() if view.name == "decode-groups")


def texts(events: list[Any], requests: list[Any]) -> list[str]:
    by_id = {id_: event.text for id_, event in events if isinstance(event, Finished)}
    return [by_id[request.id] for request in requests]


def test_batches_overlap_and_the_texts_are_those_of_one_context() -> None:
    def four() -> list[Any]:
        return [ask([40 + i] * 30, n_predict=20) for i in range(4)]

    plain, _, plain_events = fake_engine(4)
    engine, runner, events, plugins = engine_with(4, groups="2", prefill="1")
    asked, again = four(), four()
    for one, other in zip(asked, again, strict=True):
        plain.submit(one)
        engine.submit(other)
    run(plain)
    run(engine)
    assert texts(events, again) == texts(plain_events, asked)
    assert runner.n_most == 3
    assert effect_of(plugins) > 20
    # each prompt was computed at id 4, and went home from there
    assert sorted(source for source, _ in runner.kv.transfers) == [4] * 4
    assert all(batch[0][0] == 4 for batch in runner.batches if batch[0][2] > 1)
    decodes = [len(batch) for batch in runner.batches if batch[0][2] == 1]
    assert max(decodes) == 2


def test_off_means_turns_and_on_again_works() -> None:
    engine, runner, events, plugins = engine_with(4, groups="2", prefill="1")
    engine.plugins.toggle("decode-groups", False)
    first = [ask([40 + i] * 30, n_predict=20) for i in range(4)]
    for request in first:
        engine.submit(request)
    run(engine)
    assert runner.n_most == 1
    assert effect_of(plugins) == 0
    engine.plugins.toggle("decode-groups", True)
    second = [ask([40 + i] * 30, n_predict=20) for i in range(4)]
    for request in second:
        engine.submit(request)
    run(engine)
    assert runner.n_most > 1
    assert texts(events, first) == texts(events, second)


def test_a_group_left_alone_is_levelled_and_gaps_are_closed() -> None:
    engine, runner, events, _ = engine_with(6, SeqCompact, groups="2", prefill="0")
    engine.plugins.toggle("seq-compact", True)
    lengths = (5, 5, 60, 60, 60, 60)  # ids 0 and 2 … of group 0 end early
    requests = [ask([40 + i] * 3, n_predict=lengths[i], id_slot=i) for i in range(6)]
    for request in requests:
        engine.submit(request)
    run(engine)
    assert len(texts(events, requests)) == 6
    assert runner.kv.transfers == [(3, 0)] or runner.kv.transfers == [(3, 1)]
    last = [batch for batch in runner.batches if len(batch) == 2][-2:]
    for batch in last:
        assert batch[1][0] - batch[0][0] == 1


def test_a_short_rest_of_a_prompt_stays_in_its_group() -> None:
    engine, runner, events, _ = engine_with(2, groups="1", prefill="1")
    first = ask([50] * 30, n_predict=3)
    engine.submit(first)
    run(engine)
    n = len(runner.kv.transfers)
    held = engine.slots[0].tokens.view().tolist() or engine.slots[1].tokens.view().tolist()
    near = ask([*held, 60, 61], n_predict=3)
    engine.submit(near)
    run(engine)
    assert len(runner.kv.transfers) == n == 1
    far = ask([*held, *range(60, 70)], n_predict=3)
    engine.submit(far)
    run(engine)
    assert len(runner.kv.transfers) == n + 2  # there and back
    assert len(texts(events, [first, near, far])) == 3


def test_batches_in_flight_are_set_over_http() -> None:
    plugin = DecodeGroups(groups=3, prefill_slots=1)
    plugin.configure(config_of(), [])
    transport = httpx.ASGITransport(app=Starlette(routes=plugin.register_routes()))

    def send(method: str, **body: Any) -> httpx.Response:
        async def exchange() -> httpx.Response:
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, "/in-flight", **body)

        return asyncio.run(exchange())

    assert send("GET").json() == {"in_flight": 4, "contexts": 4}
    assert send("POST", json={"in_flight": 2}).json() == {"in_flight": 2, "contexts": 4}
    assert plugin.batches_in_flight() == 2
    for wrong in ({"in_flight": 0}, {"in_flight": 5}, {"in_flight": "many"}, {}, []):
        answer = send("POST", json=wrong)
        assert answer.status_code == 400
        assert "from 1 to 4" in answer.json()["error"]["message"]
    assert send("POST", content=b"x").status_code == 400
    assert plugin.batches_in_flight() == 2


def test_the_part_of_a_device_for_prompts_is_an_option_and_set_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(declared_options(discover()))
    for flag in ("--prefill-sms", "--decode-groups-prefill-sms"):
        config = resolve.parse(["-m", "x", flag, "96"], {}, table, discover()).config
        assert config is not None
        assert config.plugins.options["decode-groups"]["prefill-sms"] == "96"
    with pytest.raises(OptionError, match="at least 0"):
        resolve.parse(["-m", "x", "--prefill-sms", "-1"], {}, table, discover())
    assert DecodeGroups().native_switches() == {"wait-once": 1}  # an older library may lack prefill-sms
    plugin = DecodeGroups(groups=2, prefill_slots=1, prefill_sms=96)
    assert plugin.native_switches() == {"wait-once": 1, "prefill-sms": 96}
    with monkeypatch.context() as older:
        older.setattr("llamamg_plugins.decode_groups.has_switch", lambda name: False)
        assert DecodeGroups().native_switches() == {}
    turned: list[Any] = []
    monkeypatch.setattr(
        "llamamg_plugins.decode_groups.set_switch", lambda name, n: turned.append((name, n)) or n != 1000
    )
    transport = httpx.ASGITransport(app=Starlette(routes=plugin.register_routes()))

    def send(method: str, **body: Any) -> httpx.Response:
        async def exchange() -> httpx.Response:
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, "/prefill-sms", **body)

        return asyncio.run(exchange())

    assert send("GET").json() == {"prefill_sms": 96}
    assert send("POST", json={"prefill_sms": 64}).json() == {"prefill_sms": 64}
    for wrong in ({"prefill_sms": -1}, {"prefill_sms": 1025}, {"prefill_sms": "half"}, {}, []):
        assert send("POST", json=wrong).status_code == 400
    assert turned == [("prefill-sms", 64)]
    answer = send("POST", json={"prefill_sms": 1000})  # what a library without the switch says
    assert "llamamg build" in answer.json()["error"]["message"]
    assert plugin.native_switches() == {"wait-once": 1, "prefill-sms": 64}
    assert send("POST", json={"prefill_sms": 0}).json() == {"prefill_sms": 0}
    assert plugin.native_switches() == {"wait-once": 1}
