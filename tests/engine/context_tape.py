"""What disturbs an engine with several contexts, and a tape of all that happens to them, which one thread can play again."""

from __future__ import annotations

import random
import threading
import zlib
from collections.abc import Iterator
from typing import Any

from llamamg import hookimpl
from llamamg import library as native_library
from llamamg.guard import Guard
from llamamg.plugins import plugin
from llamamg.replay import decode, read_logits
from llamamg.testing import ask

MEMORY_CALLS = ("remove", "copy", "shift", "clear")


def restless(rng: random.Random) -> type[Any]:
    """A plugin that keeps every context busy and moves sequences between groups for no reason."""

    @plugin(name="restless", summary="", helps="", hurts="", guard=Guard.same_tokens())
    class Restless:
        def __init__(self) -> None:
            self.effect = 0

        @hookimpl
        def batches_in_flight(self) -> int:
            self.effect += 1
            return 9

        @hookimpl
        def balance_groups(self, state: Any) -> Any:
            busy = [slot for slot in state.slots if slot.sequence is not None]
            idle = [slot for slot in state.slots if slot.sequence is None]
            if not busy or not idle:
                return None
            a, b = rng.choice(busy), rng.choice(idle)
            return [(a.home, b.home)] if a.group != b.group else None

    return Restless


class Tape:
    """Everything that happens to the contexts of an engine, in an order that one thread could have done it in."""

    def __init__(self, engine: Any) -> None:
        self.calls: list[list[Any]] = []
        self.saved: list[Any] = []
        self._inside = threading.local()
        self._lock = threading.Lock()
        pool, kv = engine.runner, engine.scheduler.kv
        self._llama, self._n_vocab = native_library.load().llama, engine.vocab.n_vocab
        for context, (runner, part) in enumerate(zip(pool.runners, kv._parts, strict=True)):
            self._tap_runner(context, runner)
            for name in MEMORY_CALLS:
                self._tap(context, part, name)
        self._tap_states(kv)
        self._tap_transfer(kv)

    def _note(self, call: list[Any]) -> None:
        if not getattr(self._inside, "transfer", False):
            with self._lock:
                self.calls.append(call)

    def _tap(self, context: int, part: Any, name: str) -> None:
        function = getattr(part, name)

        def call(*args: int) -> Any:
            self._note([name, context, *args])
            return function(*args)

        setattr(part, name, call)

    def _tap_states(self, kv: Any) -> None:
        save, restore = kv.save, kv.restore

        def saved(seq_id: int, flags: int = 1) -> Any:
            data = save(seq_id, flags)
            if data is not None:
                self.saved.append(data)
                self._note(["save", seq_id, flags, id(data)])
            return data

        def restored(seq_id: int, data: Any, flags: int = 1) -> bool:
            self._note(["restore", seq_id, flags, id(data)])
            return bool(restore(seq_id, data, flags))

        kv.save, kv.restore = saved, restored

    def _tap_transfer(self, kv: Any) -> None:
        transfer = kv.transfer

        def transferred(source: int, target: int, swap_bytes_max: int = 0) -> bool:
            self._note(["transfer", source, target, swap_bytes_max])
            self._inside.transfer = True
            try:
                return bool(transfer(source, target, swap_bytes_max))
            finally:
                self._inside.transfer = False

        kv.transfer = transferred

    def _tap_runner(self, context: int, runner: Any) -> None:
        submit, collect, last = runner.submit, runner.collect, []

        def submitted(batch: Any) -> None:
            first = runner._first
            rows = [
                [r.sequence.slot.seq_id - first, r.pos0, r.n_logits, [int(t) for t in r.tokens]] for r in batch.rows
            ]
            submit(batch)
            last[:] = [["decode", context, rows, []]]
            self._note(last[0])

        def collected() -> Any:
            rows = last[0][2]
            last[0][3] += [
                zlib.crc32(row.tobytes()) for row in read_logits(self._llama, runner.context, rows, self._n_vocab)
            ]
            return collect()

        runner.submit, runner.collect = submitted, collected

    def play(self, made: Any) -> Iterator[tuple[int, int]]:
        """Repeat it in contexts of the same layout; checksums of each logits row then and now."""
        kv, saved = made.kv, {}
        for name, *args in self.calls:
            if name == "transfer":
                kv.transfer(*args)
            elif name == "save":
                saved[args[2]] = kv.save(*args[:2])
            elif name == "restore":
                kv.restore(args[0], saved[args[2]], args[1])
            elif name == "decode":
                context = made.runner.runners[args[0]].context
                decode(self._llama, context, args[1])
                now = read_logits(self._llama, context, args[1], self._n_vocab)
                yield from zip(args[2], (zlib.crc32(row.tobytes()) for row in now), strict=True)
            else:
                getattr(kv._parts[args[0]], name)(*args[1:])


def random_requests(rng: random.Random, n: int) -> list[Any]:
    stem = [rng.randrange(1000, 5000) for _ in range(200)]
    return [
        ask(
            stem[: rng.choice((0, 40, 120, 180))] + [rng.randrange(1000, 5000) for _ in range(rng.randrange(3, 80))],
            temperature=0.0,
            ignore_eos=True,
            n_predict=rng.choice((1, 6, 20, 40)),
            return_tokens=True,
        )
        for _ in range(n)
    ]
