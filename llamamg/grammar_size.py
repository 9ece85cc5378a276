"""What a grammar takes once llama.cpp's parser has written its repetitions out: a few letters can ask for gigabytes.

Rules of that: S{m,n} becomes m times S and n - m rules of S each, S* and S+ one more rule of S. The parser itself refuses more
than 2000 in one repetition, but counts neither how long S is nor how many repetitions there are.
"""

from __future__ import annotations

import re
from itertools import accumulate

from llamamg.grammar_search import Search

# The parser goes deeper with each bracket in a bracket, and its search for left recursion with each rule or bracket that
# begins with another one: too many end the process.
N_NESTED_MAX, N_RULES_MAX = 1000, 50_000
N_BYTES_MAX = 256 << 20
N_REPEAT_MAX = 2000  # above, the parser refuses the least number and forgets the greatest one
ELEMENT_BYTES, RULE_BYTES = 18, 220  # of a letter, class or reference, and of a rule besides; as measured

_TEXT = r'"(?:\\.|[^"\\])*\\?(?:"|\Z)|\[(?:\\.|[^\]\\])*\\?(?:\]|\Z)'
_SPACE = r"(?:\s|#[^\r\n]*(?:[\r\n]|\Z))*"
_TEXTS = re.compile(_TEXT + r"|<[^>]*|#[^\r\n]*", re.DOTALL)
_PARTS = re.compile(
    rf"(?P<text>{_TEXT})|(?P<skip>\s+|#[^\r\n]*)|(?P<rule>[\w-]+)\s*::=|(?P<one>!?<[^>]*>?|[\w-]+|\.)"
    rf"|(?P<times>[*+?]|\{{{_SPACE}(?P<least>[0-9]+){_SPACE}(?P<upto>,{_SPACE}(?P<most>[0-9]*))?{_SPACE}\}})|(?P<other>.)",
    re.DOTALL,
)
_ESCAPES = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)


def complaint(grammar: str) -> str | None:
    """Why a grammar is not given to the parser, as a sentence; None if it is. What is no grammar at all is left to the parser."""
    bare = _TEXTS.sub(" ", grammar)
    steps = (1 if char == "(" else -1 for char in bare if char in "()")
    if max(accumulate(steps), default=0) > N_NESTED_MAX or bare.count("(") + bare.count("::=") > N_RULES_MAX:
        return f"the grammar is too large: it may have {N_NESTED_MAX} brackets in each other, and {N_RULES_MAX} brackets and rules"
    search = Search()
    act = {"(": search.open, ")": search.close, "|": search.choice}
    n_bytes = item = 0  # item: elements of what the next repetition repeats
    rule_bytes = RULE_BYTES
    for part in _PARTS.finditer(grammar):
        match part.lastgroup:
            case "text":
                text = part["text"]
                item = max(1, len(_ESCAPES.sub("x", text) if "\\" in text else text) - 2)
                n_bytes += ELEMENT_BYTES * item
                if text in ('""', "[]", "[^]"):
                    search.nothing()
                else:
                    search.letter()
            case "one":
                item = 1
                n_bytes += ELEMENT_BYTES
                if part["one"][0] in "<!.":
                    search.letter()
                else:
                    search.reference(part["one"])
            case "rule":
                item, rule_bytes = 0, RULE_BYTES + len(part["rule"])  # names of what it is written out to begin with it
                n_bytes += rule_bytes
                search.begin(part["rule"])
            case "times":
                least, most = _times(part)
                if most is not None and most < least:
                    return (
                        f"the grammar repeats something at least {least} times and at most {most}: swap the two numbers"
                    )
                least = min(least, N_REPEAT_MAX)
                n_rules = 1 if most is None or most > N_REPEAT_MAX else most - least
                n_bytes += n_rules * (rule_bytes + ELEMENT_BYTES * (item + 3)) + ELEMENT_BYTES * least * item
                item = least * item + min(n_rules, 1)
                search.repeat(least, least + n_rules, most is not None)
            case "other":
                item = 1  # an outer bracket is over: one reference to what is in it
                n_bytes += rule_bytes if part["other"] == "(" else ELEMENT_BYTES
                if part["other"] in act:
                    act[part["other"]]()
        if n_bytes > N_BYTES_MAX:
            return (
                f"the grammar is too large: written out it takes more than {N_BYTES_MAX >> 20} MiB, so use fewer or smaller "
                "repetitions, or shorter texts in them"
            )
    return search.complaint()


def _times(part: re.Match[str]) -> tuple[int, int | None]:
    """Least and greatest number of a repetition; the latter None where there is no bound."""
    if (sign := part["times"]) in "*+?":
        return int(sign == "+"), 1 if sign == "?" else None
    least = int(part["least"][:20])
    if part["upto"] is None:
        return least, least
    return least, int(part["most"][:20]) if part["most"] else None
