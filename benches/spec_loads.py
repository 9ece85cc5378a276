"""Texts that sessions continue: some that repeat themselves, some that do not, and scripts that say what is sampled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamamg.request import Tokens
from llamamg.sampler import RowSampler
from llamamg.vocab import Vocabulary

RIVER = (
    "The river rises in the hills north of the town. It flows past the old mill, under the stone bridge, and through the "
    "market square before it turns west towards the sea. In winter the water is high and brown; in summer children cross "
    "it on foot. "
)
READ = RIVER * 3 + "The river rises in the hills"
BAKER = (
    "Every morning the baker opens the door at five. He lights the oven, weighs the flour, and sets the dough to rest near "
    "the warm wall. By seven the first loaves are on the shelf, and the whole street knows it. "
)
BAKED = BAKER * 3 + "Every morning the baker opens"
LINES = "".join(
    f"2024-01-0{day} INFO server started on port 8080 and is ready to accept connections\n" for day in range(1, 8)
).rstrip()


@dataclass(frozen=True, slots=True)
class Cell:
    """Sessions that generate together. `scripted`: what is sampled is replaced, so that a random model can be measured."""

    name: str
    help: str
    texts: tuple[str, ...]
    n_drafting: int  # the first ones; the others are measured as their neighbours
    scripted: str = ""  # "right": drafts are always right, "wrong": never


CELLS = {
    cell.name: cell
    for cell in (
        Cell("repeat", "one session writes out a paragraph that it has read three times", (READ,), 1),
        Cell("list", "one session continues a log whose lines differ in their date", (LINES,), 1),
        Cell("prose", "one session tells a story", ("Once upon a time, in a small village by the sea,",), 1),
        Cell(
            "four",
            "two sessions repeat a paragraph beside two that tell stories",
            (READ, BAKED, "Once upon a time, in a small village by the sea,", "The history of the castle begins in"),
            2,
        ),
        Cell("forced", "a scripted text that repeats what was read: every draft is right", ("",), 1, "right"),
        Cell("never", "a scripted text that repeats what was read until it is drafted: every draft is wrong", ("",), 1, "wrong"),
    )
}  # fmt: skip
N_SCRIPT = 200  # tokens of a scripted paragraph


def prompt_of(vocab: Vocabulary, cell: Cell, session: int, depth: int) -> Tokens:
    """The session's prompt: random tokens up to `depth`, then its text, or a scripted paragraph twice.

    The random tokens are other ones in each cell, so that none continues the text of another and inherits what was learned there.
    """
    random = np.random.default_rng([500 + session, list(CELLS).index(cell.name)])
    if cell.scripted:
        text = np.concatenate([script_of(vocab), script_of(vocab)])
    else:
        text = vocab.tokenize(cell.texts[session], True, False)
    before = random.integers(0, vocab.n_vocab, max(0, depth - len(text))).astype(np.int32)
    before = np.array([t for t in before.tolist() if not vocab.is_eog(t)], np.int32)
    return np.concatenate([before, text]).astype(np.int32)


def script_of(vocab: Vocabulary) -> Tokens:
    """A paragraph of random tokens."""
    tokens = np.random.default_rng(9).integers(0, vocab.n_vocab, 2 * N_SCRIPT).tolist()
    return np.array([t for t in tokens if not vocab.is_eog(t)][:N_SCRIPT], np.int32)


@contextmanager
def scripted(kind: str, script: Sequence[int]) -> Iterator[None]:
    """Sample as ever and throw it away: each request says the script. "wrong": something else where a draft is right."""
    sample, sample_run = RowSampler.sample, RowSampler.sample_run
    said: dict[int, tuple[Any, int]] = {}  # id of a sampler -> it, and how many tokens it has said

    def say(sampler: Any, drafted: int | None) -> int:
        _, n = said.get(id(sampler), (sampler, 0))
        said[id(sampler)] = (sampler, n + 1)
        token = int(script[n % len(script)])
        return (token + 1) % (max(script) + 1) if kind == "wrong" and token == drafted else token

    def rows(self: RowSampler, samplers: list[Any], index: list[int]) -> list[int]:
        sample(self, samplers, index)
        return [say(sampler, None) for sampler in samplers]

    def run(self: RowSampler, sampler: Any, index: int, draft: list[int]) -> list[int]:
        out: list[int] = []
        for drafted in [*draft, None]:
            sample(self, [sampler], [index + len(out)])
            out.append(say(sampler, drafted))
            if out[-1] != drafted:
                break
        return out

    RowSampler.sample, RowSampler.sample_run = rows, run  # type: ignore[method-assign]
    try:
        yield
    finally:
        RowSampler.sample, RowSampler.sample_run = sample, sample_run  # type: ignore[method-assign]
