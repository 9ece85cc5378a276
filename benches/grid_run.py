"""One run of the grid: which side computes which cell, in an order that turns, and what came of it so far."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import grid_sides
from .client import ServerError
from .grid_cells import Budget, Cell
from .grid_measure import measure
from .grid_prompts import Prompts, n_vocab, single_words
from .grid_sides import Checks, Side
from .grid_watch import Nvml, Watch
from .sides import Server, SideError

WARM_UP = 2**31  # a repeat that no cell has


@dataclass(slots=True)
class Run:
    """What is measured, and what came of it so far."""

    model: Path
    flags: list[str]
    n_predict: int
    seed: int
    words: bool
    checks: Checks
    budget: Budget
    nvml: Nvml
    bar: Any
    slot_files: Path | None = None  # where the servers save slots, each in a folder of its own
    copy_from: int | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)
    logs: dict[str, str] = field(default_factory=dict)
    loads: list[dict[str, Any]] = field(default_factory=list)
    n_failed: int = 0

    @contextlib.contextmanager
    def started(self, sides: Sequence[Side], flags: Sequence[str]) -> Iterator[list[tuple[Side, Server]]]:
        """All these sides, ready and checked; their logs are kept."""
        with contextlib.ExitStack() as stack:
            servers = []
            for side in sides:
                self.bar.set_postfix_str(f"starting {side.name}")
                before, begin = self._device_memory(), time.monotonic()
                server = stack.enter_context(side.server(self.model, [*flags, *self._slot_flags(side)]))
                after = self._device_memory()
                self.loads.append({
                    "side": side.name, "ubatch": grid_sides.ubatch_of(flags), "ready_s": round(time.monotonic() - begin, 2),
                    "device_memory_mib": [round(b - a, 1) for a, b in zip(before, after, strict=True)],
                })  # fmt: skip
                servers.append((side, server))
            for _, server in servers:
                self.checks.check(server)
            yield servers
            for side, server in servers:
                if server.process is not None:
                    self.logs[f"{side.name}-ub{grid_sides.ubatch_of(flags)}"] = server.process.log_tail(4 << 20)

    def _slot_flags(self, side: Side) -> list[str]:
        if self.slot_files is None:
            return []
        folder = self.slot_files / side.name
        folder.mkdir(exist_ok=True)
        return ["--slot-save-path", str(folder)]

    def _device_memory(self) -> list[float]:
        return [self.nvml.sample(i, set()).get("memory_mib", 0.0) for i in range(len(self.nvml))]

    def prompts(self, server: Server) -> Prompts:
        """Prompts that this server takes."""
        if self.words:
            return Prompts(self.seed, None, single_words(server))
        return Prompts(self.seed, n_vocab(server))

    def measure(
        self, side: Side, server: Server, prompts: Prompts, cell: Cell, flags: Sequence[str], kind: str
    ) -> dict[str, Any] | None:
        """One cell on one side: a row more; None when it failed."""
        self.bar.set_postfix_str(f"{cell.label}, {side.name}")
        watch = Watch(server.process.pid if server.process else -1, self.nvml)
        row = {
            "side": side.name, "n_sessions": cell.n_sessions, "depth": cell.depth, "repeat": cell.repeat,
            "ubatch": grid_sides.ubatch_of(flags), "kind": kind,
        }  # fmt: skip
        if cell.is_copied:
            row["is_copied"] = True
            mine = [row for row in self.rows if row["side"] == side.name and row["n_sessions"] == 1]
            if not any((row["depth"], row["repeat"]) == (cell.depth, cell.repeat) for row in mine):
                self.leave_out(cell, "the session that it copies was not measured", side.name)
                return None
        keep = self.copy_from is not None and cell.depth >= self.copy_from
        try:
            self.rows.append({**row, **measure(server, cell, prompts, self.n_predict, watch, keep)})
        except (SideError, ServerError, OSError) as error:
            if not self.rows:
                raise
            # What was measured before is worth keeping: the cell is left out, and the exit status says that something failed.
            self.n_failed += 1
            ended = "" if server.process is None or server.process.alive() else "; its process has ended"
            self.leave_out(cell, f"failed: {error}{ended}", side.name)
            return None
        self.bar.update(1)
        return self.rows[-1]

    def leave_out(self, cell: Cell, why: str, side: str = "", n: int = 1) -> None:
        """A cell that was not measured, and why."""
        self.left_out.append(
            {"n_sessions": cell.n_sessions, "depth": cell.depth, "repeat": cell.repeat, "side": side, "reason": why}
        )
        self.bar.update(n)

    def leave_out_rest(self, sides: Sequence[Side], every: Sequence[Cell], why: str) -> None:
        """Every cell that was neither measured nor left out."""
        known = {(row["n_sessions"], row["depth"], row["repeat"], row["side"]) for row in (*self.rows, *self.left_out)}
        for cell in every:
            for side in sides:
                place = (cell.n_sessions, cell.depth, cell.repeat)
                if not known & {(*place, side.name), (*place, "")}:
                    self.leave_out(cell, why, side.name)


def together(run: Run, sides: Sequence[Side], every: Sequence[Cell]) -> None:
    """All sides loaded; the order of the sides is turned round with every cell of a kind and every repeat."""
    with run.started(sides, run.flags) as servers:
        prompts = run.prompts(servers[0][1])
        warm_up(servers, prompts)
        kinds = list(dict.fromkeys((cell.n_sessions, cell.depth) for cell in every))
        for cell in every:
            turn = kinds.index((cell.n_sessions, cell.depth)) + cell.repeat
            why = run.budget.refuses(cell)
            if why:
                run.leave_out(cell, why, n=len(servers))
                continue
            begin = time.monotonic()
            for side, server in servers if turn % 2 == 0 else servers[::-1]:
                run.measure(side, server, prompts, cell, run.flags, "same flags")
            run.budget.took(cell, time.monotonic() - begin)


def one_by_one(run: Run, sides: Sequence[Side], every: Sequence[Cell], minutes: float | None, n_repeats: int) -> None:
    """One side at a time, in turned order with every repeat: A B C, C B A, …"""
    blocks = [(r, s) for r in range(n_repeats) for s in (sides if r % 2 == 0 else sides[::-1])]
    dropped: set[Cell] = set()
    budgets = {side.name: Budget(None) for side in sides}  # a side's own speed; the time left is the run's
    for i, (repeat, side) in enumerate(blocks):
        mine = [cell for cell in every if cell.repeat == repeat]
        share = Budget(None if minutes is None else run.budget.left_s() / (len(blocks) - i) / 60)
        share.learn(budgets[side.name])
        if all(cell in dropped for cell in mine):
            continue
        with run.started([side], run.flags) as [(_, server)]:
            prompts = run.prompts(server)
            warm_up([(side, server)], prompts)
            for cell in mine:
                why = None if cell not in dropped else "another side had no time for it"
                why = why or share.refuses(cell)
                if why:
                    dropped.add(cell)
                    run.leave_out(cell, why, side.name)
                    continue
                begin = time.monotonic()
                run.measure(side, server, prompts, cell, run.flags, "same flags")
                share.took(cell, time.monotonic() - begin)
        budgets[side.name].learn(share)


def warm_up(servers: Sequence[tuple[Side, Server]], prompts: Prompts) -> None:
    """One short unmeasured request to each: pages, graphs, first allocations."""
    for _, server in servers:
        server.post("/completion", {"prompt": prompts.make(0, 16, WARM_UP), "n_predict": 8, "cache_prompt": False})


def best_ubatch(run: Run, sides: Sequence[Side], sizes: Sequence[int], every: Sequence[Cell]) -> dict[str, Any]:
    """Each side's fastest -ub on the shallowest single prompt, then its cells once more with it."""
    probe, chosen = Cell(every[0].n_sessions, every[0].depth), {}
    for side in sides:
        if side.url is not None:
            continue
        rates: dict[int, float] = {}
        for size in sizes:
            flags = grid_sides.with_ubatch(run.flags, size)
            with run.started([side], flags) as [(_, server)]:
                prompts = run.prompts(server)
                warm_up([(side, server)], prompts)
                if (row := run.measure(side, server, prompts, probe, flags, "ub probe")) is not None:
                    rates[size] = row["prefill"]["tps"]
        if not rates:
            continue
        best = max(rates, key=lambda size: rates[size])
        chosen[side.name] = {"best": best, "prefill_tps": {str(size): rate for size, rate in rates.items()}}
        flags = grid_sides.with_ubatch(run.flags, best)
        with run.started([side], flags) as [(_, server)]:
            prompts = run.prompts(server)
            warm_up([(side, server)], prompts)
            for cell in (cell for cell in every if cell.repeat == 0):
                why = run.budget.refuses(cell)
                if why:
                    run.leave_out(cell, f"with the best -ub {best}: {why}", side.name)
                else:
                    run.measure(side, server, prompts, cell, flags, "best ub")
    return chosen
