"""Grammars on which llama.cpp's parser would end the process are refused before it sees them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from llamamg.grammar_size import N_NESTED_MAX, N_RULES_MAX, complaint
from llamamg.json_schema import schema_to_grammar
from llamamg.library import Library
from llamamg.request import SamplingParams
from llamamg.sampler import Sampler, SamplerError
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
        'root ::= "' + "a" * 10_000 + '"{2000}',
        'root ::= "' + "a" * 10_000 + '"{0,2000}',
        'root ::= "' + "a" * 10_000 + '"{ #}\n1 #\r, 2000 }',
        'root ::= "' + r"\x61" * 10_000 + '"{2000}',
        "root ::= [" + "a-z" * 5000 + "]{2000}",
        'root ::= "a"' + "+" * 10_000,
        "root ::= " + '"a"{0,2000} ' * 1000,
        "root ::= " + "(root2 [)]){0,1000} " * 1000 + '\nroot2 ::= "a"',
        'root ::= a\na ::= "b"\n' + "r" * 500_000 + ' ::= "b"{0,600}',
        "root ::= " + "<[5]>{1,2000}" * 1000,
    ],
)
def test_what_is_large_when_it_is_written_out_is_an_error(library: Library, vocab: Vocabulary, grammar: str) -> None:
    """Each of them would take gigabytes, and seconds in which nobody else is answered."""
    with pytest.raises(SamplerError, match="written out it takes more than 256 MiB"):
        build(library, vocab, grammar)


@pytest.mark.parametrize("times", ["{5,3}", "{1,0}", "{ 9 , 8 }", "{99999999999999999999999,1}"])
def test_a_repetition_that_ends_before_it_begins_is_an_error(library: Library, vocab: Vocabulary, times: str) -> None:
    """The parser counts from one number to the other, and never gets there."""
    with pytest.raises(SamplerError, match="swap the two numbers"):
        build(library, vocab, f'root ::= "a"{times}')


def doubling(n: int, alternatives: str) -> str:
    rules = "".join(f"r{i} ::= {alternatives.replace('r', f'r{i + 1}')}\n" for i in range(n))
    return f'root ::= r0\n{rules}r{n} ::= "a" | ""'


@pytest.mark.parametrize(
    "grammar",
    [
        doubling(60, "r | r"),
        doubling(60, "r r"),
        doubling(60, "r (r)?"),
        doubling(60, "(r | r){0,3}"),
        doubling(60, '"x" r | r r'),
        'root ::= r0\nr0 ::= (r1?){0,600}\nr1 ::= (r2?){0,600}\nr2 ::= "a"',
        'root ::= "x" r0\nr0 ::= "y" (r1?){0,600}\nr1 ::= (r2?){0,600}\nr2 ::= "a"',
    ],
)
def test_what_is_searched_without_end_is_an_error(library: Library, vocab: Vocabulary, grammar: str) -> None:
    """Each would take minutes at least, most of them for ever."""
    with pytest.raises(SamplerError, match="the grammar is too ambiguous"):
        build(library, vocab, grammar)


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= root "a" | "b"',
        'root ::= x root "a" | "b"\nx ::= y\ny ::= "" | "c"',
        'root ::= ("b"? root "c")* "d"',
        'root ::= "x" r\nr ::= s{0,3} "a"\ns ::= t t\nt ::= "b"? r? "c"?',
    ],
)
def test_a_rule_that_begins_with_itself_is_an_error(library: Library, vocab: Vocabulary, grammar: str) -> None:
    """With a rule before it that is nothing in a roundabout way the parser does not notice, and fills the memory."""
    with pytest.raises(SamplerError, match="a rule that begins with itself"):
        build(library, vocab, grammar)


@pytest.mark.parametrize(
    "times", ["{1,1000000}", "{2001,}", "{1000000}", "{1000}{1000}", "{0,}{0,}{1,2000}", "{0}", "{0,0}"]
)
def test_other_repetitions_are_left_to_the_parser(times: str) -> None:
    """It forgets a greatest number above 2000, and refuses a least number above that, and a product."""
    assert complaint(f'root ::= "a"{times}') is None


@pytest.mark.parametrize(
    "grammar",
    [
        nested(N_NESTED_MAX),
        chain(N_RULES_MAX - 2),
        'root ::= "' + "(" * 5000 + '" [(' + "(" * 5000 + "]",
        schema_to_grammar({"properties": {f"m{i}": {"type": "string"} for i in range(6000)}}),
        schema_to_grammar({"properties": {f"m{i}": {"type": "string", "maxLength": 2000} for i in range(300)}}),
        'root ::= "' + "+{9}" * 50_000 + '" "a" | [{9,1}+]{2} # {9,1}',
        'root ::= "' + "a" * 1000 + '"{2000} "a"{0,2000} ("b" | "c"{3}){2,500}+',
        "root ::= " + " | ".join(f'"word{i}"' for i in range(10_000)),
        "root ::= p0\n"
        + "".join(f'p{i} ::= p{i + 1} | p{i + 1} "+" p{i} | p{i + 1} "-" p{i}\n' for i in range(8))
        + 'p8 ::= [0-9]+ | "(" p0 ")"',
        'root ::= list\nlist ::= "" | space item list\nspace ::= [ ]*\nitem ::= ("a" item)? "b"',
        'root ::= ("a"?)* (" "? | "b")* ""',
    ],
    ids=[
        "deep",
        "chain",
        "brackets that are text",
        "schema",
        "lengths",
        "repetitions that are text",
        "repetitions",
        "words",
        "arithmetic",
        "lists",
        "nothing",
    ],
)
def test_what_is_large_otherwise_is_read(library: Library, vocab: Vocabulary, grammar: str) -> None:
    build(library, vocab, grammar)


@pytest.mark.parametrize("text", ['root ::= "((', "root ::= [((", 'root ::= "\\', "root ::= <(", "root ::= (("])
def test_what_has_no_end_is_no_grammar(library: Library, vocab: Vocabulary, text: str) -> None:
    with pytest.raises(SamplerError, match="failed to parse grammar"):
        build(library, vocab, text)
