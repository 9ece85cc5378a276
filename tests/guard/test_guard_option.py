"""--guard-replay 1/N."""

from __future__ import annotations

import pytest

from llamamg.options.option import OptionError
from llamamg.options.resolve import parse
from llamamg.options.table import Table


def every(*words: str) -> int:
    parsed = parse(["-m", "model.gguf", *words], {}, Table())
    assert parsed.config is not None
    return parsed.config.plugins.guard_replay


def test_values() -> None:
    assert every() == every("--guard-replay", "off") == every("--guard-replay", "0") == 0
    assert (every("--guard-replay", "1/100"), every("--guard-replay", "1/1")) == (100, 1)


@pytest.mark.parametrize("value", ["2/3", "1/0", "100", "1/x", "1/-2", ""])
def test_other_values_are_refused_with_an_example(value: str) -> None:
    with pytest.raises(OptionError, match="1/100"):
        every("--guard-replay", value)
