"""Short ways for tests of moves: a plugin that answers in turn, prompts, and the text of each without any move."""

from __future__ import annotations

from typing import Any

from llamamg import hookimpl
from llamamg.guard import Guard
from llamamg.plugins import plugin
from llamamg.request import Finished
from llamamg.testing import ask, fake_engine, run

DECLARE: dict[str, Any] = {"summary": "", "helps": "", "hurts": "", "guard": Guard.same_tokens()}
PROMPT = list(range(40, 120))


def moving(*plans: list[tuple[int, int]] | None) -> type[Any]:
    left = list(plans)

    @plugin(name="mover", **DECLARE)
    class Mover:
        @hookimpl
        def arrange_slots(self, state: Any) -> Any:
            return left.pop(0) if left else None

    return Mover


def flights(limit: list[int], moves: list[tuple[int, int]]) -> type[Any]:
    """As many batches in flight as `limit` says at the time, and one set of moves, made when there is one."""

    @plugin(name="flights", **DECLARE)
    class Flights:
        @hookimpl
        def batches_in_flight(self) -> int:
            return limit[0]

        @hookimpl
        def arrange_slots(self, state: Any) -> Any:
            wanted = moves[:] if state.slots[0].context == 1 else []
            if wanted:
                moves.clear()
            return wanted

    return Flights


def texts(events: list[Any]) -> dict[int, str]:
    return {id_: event.text for id_, event in events if isinstance(event, Finished)}


def prompt(i: int) -> list[int]:
    return PROMPT[7 * i : 7 * i + 12]


def alone(i: int, n_predict: int) -> str:
    engine, _, events = fake_engine(1)
    request = ask(prompt(i), n_predict=n_predict)
    engine.submit(request)
    run(engine)
    return texts(events)[request.id]
