"""The policy under test: options of prefill-gate, switched in the running engine by a plugin that also stamps every batch."""

from __future__ import annotations

import time
from dataclasses import dataclass

from llamamg import Batch, Guard, Sequence, StepState, hookimpl, plugin, set_switch
from llamamg.plugins.options import Options
from llamamg_plugins.prefill_gate import PrefillGate

from .errors import BenchError

SMS = "prefill-sms"  # native switch, and its name in a policy


@dataclass(frozen=True, slots=True)
class Policy:
    """Options of prefill-gate, or none of it; for how long at most, if not as long as the others; SMs of prompts, 0: all."""

    text: str
    options: dict[str, str] | None
    seconds: float = 0.0
    n_sms: int = 0

    @classmethod
    def parse(cls, given: str) -> Policy:
        """`off`, or NAME=VALUE pairs with commas, `prefill-sms=N` among either; then `@SECONDS` or not. Raises BenchError."""
        text, at, limit = given.partition("@")
        try:
            seconds = float(limit) if at else 0.0
        except ValueError:
            seconds = -1.0
        if at and seconds <= 0:
            raise BenchError(f"--policy {given}: behind the @ belongs a number of seconds")
        parts, n_sms = [part for part in text.split(",") if part], 0
        for part in [part for part in parts if part.startswith(f"{SMS}=")]:
            parts.remove(part)
            number = part.removeprefix(f"{SMS}=")
            if not number.isdigit():
                raise BenchError(f"--policy {given}: {SMS} is a number of SMs, 0 for all")
            n_sms = int(number)
        if parts == ["off"]:
            return cls(text, None, seconds, n_sms)
        pairs = [part.partition("=") for part in parts]
        known = _declared()
        for name, equals, _ in pairs:
            if not equals or name not in known.declared:
                raise BenchError(f"--policy {text}: {name!r} is not one of {', '.join(known.declared)} (or use: off)")
        return cls(text, {name: value for name, _, value in pairs}, seconds, n_sms)

    def gate(self) -> PrefillGate | None:
        """A new instance with these options."""
        if self.options is None:
            return None
        declared = _declared().declared
        values = {name.replace("-", "_"): declared[name].parse(value) for name, value in self.options.items()}
        return PrefillGate(**values)


def bound_prompts(n_sms: int) -> None:
    """Prompts of a context of their own compute on so many SMs from now on, 0: on all. Raises BenchError."""
    if not set_switch(SMS, n_sms) and n_sms:
        raise BenchError(f"the library has no switch {SMS}: leave it out of the policies, or run `llamamg build`")


def _declared() -> Options:
    options = Options("prefill-gate")
    PrefillGate().register_options(options)
    return options


@dataclass(frozen=True, slots=True)
class Stamp:
    """A batch that ended: when (perf_counter), how many decode rows and prompt tokens it had."""

    at: float
    n_rows: int
    n_prompt: int


@plugin(name="bench-gate", summary="the policy under test", helps="-", hurts="-", guard=Guard.same_tokens())
class Switched:
    """Forwards to the gate of the moment, and stamps every batch."""

    gate: PrefillGate | None = None
    stamps: list[Stamp] = []  # noqa: RUF012  one bench a process

    @hookimpl
    def order_prefills(self, state: StepState, waiting: list[Sequence]) -> list[Sequence] | None:
        """The gate's, if there is one."""
        return self.gate.order_prefills(state, waiting) if self.gate else None

    @hookimpl
    def prefill_budget(self, state: StepState) -> int | None:
        """The gate's, if there is one."""
        return self.gate.prefill_budget(state) if self.gate else None

    @hookimpl
    def batch_submitted(self, batch: Batch) -> None:
        """The gate looks at what is computed together."""
        if self.gate:
            self.gate.batch_submitted(batch)

    @hookimpl
    def batch_done(self, batch: Batch, elapsed_s: float) -> None:
        """Stamp the batch; the gate learns from it too."""
        n_prompt = sum(len(row) for row in batch.rows if row.is_prompt)
        self.stamps.append(Stamp(time.perf_counter(), sum(not row.is_prompt for row in batch.rows), n_prompt))
        if self.gate:
            self.gate.batch_done(batch, elapsed_s)

    @hookimpl
    def batch_failed(self, batch: Batch) -> None:
        """The gate forgets it."""
        if self.gate:
            self.gate.batch_failed(batch)
