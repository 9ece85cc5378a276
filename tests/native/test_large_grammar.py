"""Grammars on which llama.cpp's parser would end the process are refused before it sees them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from llamamg.json_schema import schema_to_grammar
from llamamg.library import Library
from llamamg.request import SamplingParams
from llamamg.sampler import N_NESTED_MAX, N_RULES_MAX, Sampler, SamplerError
from llamamg.vocab import Vocabulary


@pytest.fixture(scope="module")
def vocab(library: Library, micro_model: Path) -> Iterator[Vocabulary]:
    vocab = Vocabulary.open(micro_model)
    yield vocab
    vocab.close()


def build(library: Library, vocab: Vocabulary, grammar: str) -> None:
    Sampler(library.llama, library.mg, vocab, SamplingParams(grammar=grammar), np.zeros(1, np.int32), 64).close()


def nested(n: int, before: str = "") -> str:
    return "root ::= " + (before + "(") * n + '"a"' + ")" * n


def chain(n: int) -> str:
    return "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(n)) + f'r{n} ::= "a"'


@pytest.mark.parametrize(
    "grammar",
    [
        nested(N_NESTED_MAX + 1),
        nested(200_000),
        nested(20_000, before='")" '),
        nested(20_000, before="[)] "),
        nested(20_000, before="#)\r"),
        chain(120_000),
        chain(N_RULES_MAX - 1),
    ],
    ids=["just too deep", "deep", "text", "class", "comment", "chain", "just too many"],
)
def test_what_would_end_the_process_is_an_error(library: Library, vocab: Vocabulary, grammar: str) -> None:
    with pytest.raises(SamplerError, match="the grammar is too large"):
        build(library, vocab, grammar)


@pytest.mark.parametrize(
    "grammar",
    [
        nested(N_NESTED_MAX),
        chain(N_RULES_MAX - 2),
        'root ::= "' + "(" * 5000 + '" [(' + "(" * 5000 + "]",
        schema_to_grammar({"properties": {f"m{i}": {"type": "string"} for i in range(6000)}}),
    ],
    ids=["deep", "chain", "brackets that are text", "schema"],
)
def test_what_is_large_otherwise_is_read(library: Library, vocab: Vocabulary, grammar: str) -> None:
    build(library, vocab, grammar)


@pytest.mark.parametrize("text", ['root ::= "((', "root ::= [((", 'root ::= "\\', "root ::= <(", "root ::= (("])
def test_what_has_no_end_is_no_grammar(library: Library, vocab: Vocabulary, text: str) -> None:
    with pytest.raises(SamplerError, match="failed to parse grammar"):
        build(library, vocab, text)
