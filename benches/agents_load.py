"""Agents: conversations whose turns append to what the server computed before, with pauses in which a tool would run."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .client import ServerError
from .grid_prompts import Prompts
from .soak_client import ask


@dataclass(frozen=True, slots=True)
class Step:
    """One turn: tokens that are new since the last answer, length of the answer, seconds until the next turn."""

    n_new: int
    n_predict: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is drawn: tokens of the first prompt, mean tokens of a tool's output, longest answer, mean pause."""

    n_prompt: int
    n_tool: int
    n_predict: int
    pause_s: float

    def draw(self, seed: int, agent: int, n_turns: int) -> list[Step]:
        """An agent's turns. First prompts are between half and all of `n_prompt`; pauses and outputs are exponential."""
        random = np.random.default_rng([seed, agent])
        first = int(random.integers(max(1, self.n_prompt // 2), self.n_prompt + 1))
        news = [first, *(1 + int(n) for n in np.minimum(random.exponential(self.n_tool, n_turns - 1), 4 * self.n_tool))]
        lengths = random.integers(max(1, self.n_predict // 4), self.n_predict + 1, n_turns)
        pauses = random.exponential(self.pause_s, n_turns)
        return [Step(n, int(m), float(s)) for n, m, s in zip(news, lengths, pauses, strict=True)]


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn took. `n_again`: tokens of the prompt that were computed in an earlier turn and once more in this one.
    `ttft_ms`: all of its time but what the server spent on the tokens after the first. `itl_ms`: a token's share of that."""

    ttft_ms: float
    itl_ms: float
    n_prompt: int
    n_cached: int
    n_again: int
    n_predicted: int


@dataclass(slots=True)
class Agent:
    """A conversation. `tokens` is all of it, of which the server has seen `n_known` in earlier turns."""

    number: int
    steps: list[Step]
    ids: Prompts
    tokens: list[int] = field(default_factory=list)
    n_known: int = 0
    turns: list[Turn] = field(default_factory=list)

    async def live(self, url: str, told: Callable[[Turn], None]) -> None:
        """All turns, one after another. Raises ServerError for an answer that is too short or not whole."""
        for which, step in enumerate(self.steps):
            new = self.ids.make(self.number, step.n_new, which)
            assert isinstance(new, list)
            self.tokens += new
            begin = time.perf_counter()
            answer = await ask(url, body(self.tokens, step.n_predict))
            turn = self._turn(answer or {}, 1e3 * (time.perf_counter() - begin), step)
            self.turns.append(turn)
            told(turn)
            if which + 1 < len(self.steps):
                await asyncio.sleep(step.pause_s)

    def _turn(self, answer: dict[str, Any], wall_ms: float, step: Step) -> Turn:
        timings, tokens = answer.get("timings") or {}, answer.get("tokens") or []
        if len(tokens) != step.n_predict or not {"cache_n", "predicted_ms"} <= set(timings):
            raise ServerError(
                f"agent {self.number} got {len(tokens)} of {step.n_predict} tokens and the timings {sorted(timings)}: "
                "it takes /completion with `tokens`, `cache_n` and `predicted_ms`, as llama-server answers"
            )
        n_prompt, n_cached, rest_ms = len(self.tokens), int(timings["cache_n"]), float(timings["predicted_ms"])
        n_again = max(0, self.n_known - n_cached)
        self.tokens += tokens
        self.n_known = len(self.tokens) - 1  # the last token was chosen and not computed
        return Turn(wall_ms - rest_ms, rest_ms / max(1, len(tokens) - 1), n_prompt, n_cached, n_again, len(tokens))


def body(prompt: list[int], n_predict: int) -> dict[str, Any]:
    """A greedy turn that ends by its length alone; the server chooses the slot. Not streamed: llama-server's stream leaves out
    tokens whose text is half a character."""
    return {
        "prompt": prompt, "n_predict": n_predict, "temperature": 0, "ignore_eos": True,
        "return_tokens": True, "cache_prompt": True,
    }  # fmt: skip


def longest(agents: list[Agent]) -> int:
    """Tokens of the longest conversation at its end."""
    return max(sum(step.n_new + step.n_predict for step in agent.steps) for agent in agents)


async def together(url: str, agents: list[Agent], told: Callable[[Turn], None]) -> None:
    """All agents at once. The first error ends the others."""
    tasks = [asyncio.ensure_future(agent.live(url, told)) for agent in agents]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def figures(agents: list[Agent], wall_s: float) -> dict[str, Any]:
    """One run as numbers. `ttft_ms` is of turns that come back, `first_ttft_ms` of first prompts."""
    turns = list(itertools.chain.from_iterable(agent.turns for agent in agents))
    returns = [turn for agent in agents for turn in agent.turns[1:]]
    return {
        "wall_s": wall_s,
        "n_turns": len(turns),
        "n_predicted": sum(turn.n_predicted for turn in turns),
        "n_new": sum(turn.n_prompt - turn.n_cached - turn.n_again for turn in turns),
        "n_again": sum(turn.n_again for turn in turns),
        "n_lost": sum(turn.n_again > 0 for turn in turns),
        "ttft_ms": _spread([turn.ttft_ms for turn in returns]),
        "first_ttft_ms": _spread([agent.turns[0].ttft_ms for agent in agents if agent.turns]),
        "itl_ms": _spread([turn.itl_ms for turn in turns]),
    }


def _spread(values_ms: list[float]) -> dict[str, float]:
    if not values_ms:
        return {}
    p50, p95 = np.percentile(values_ms, (50, 95))
    return {"p50": float(p50), "p95": float(p95), "max": max(values_ms)}
