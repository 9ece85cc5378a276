"""The child's end of a bench's processes: answers, errors as answers, Ctrl-C in silence."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

CHILD = """
import sys
from benches.json_side import asked, say, serve

def main(order):
    say({"order": order})
    for ask in asked():
        if ask["do"] == "fail":
            raise ValueError(ask["with"])
        if ask["do"] == "interrupt":
            raise KeyboardInterrupt
        say({"done": ask["do"]})

serve(main)
"""


def child(*orders: dict[str, str]) -> tuple[int, list[dict[str, object]], str]:
    """Exit status, answers and stderr of a child that is asked these."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, '{"name": "x"}'],
        input="".join(json.dumps(order) + "\n" for order in orders),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.mark.parametrize(
    ("order", "status", "answers"),
    [
        ({"do": "this"}, 0, [{"done": "this"}]),
        ({"do": "fail", "with": "no memory"}, 1, [{"error": "no memory"}]),
        ({"do": "fail", "with": ""}, 1, [{"error": "ValueError"}]),
        ({"do": "interrupt"}, 130, []),
    ],
)
def test_what_the_parent_reads(order: dict[str, str], status: int, answers: list[dict[str, object]]) -> None:
    assert child(order) == (status, [{"order": {"name": "x"}}, *answers], "")
