"""Answers with calls in them, whole and in pieces: what is a call, what stays text, and that no text is lost."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from tool_texts import TOOLS, json_call, tagged_call

from llamamg.server.tool_body import Arguments, Begin, End
from llamamg.server.tool_format import Syntax, ToolCalls, functions_of
from llamamg.server.tool_parser import Broken, Event, ParsedAnswer, Text, ToolParser, parse_answer

CALL = {"json": json_call, "tagged": tagged_call}
SYNTAXES: tuple[Syntax, ...] = ("json", "tagged")
PARIS = {"city": "Paris"}


def tools_of(syntax: Syntax, **more: Any) -> ToolCalls:
    return ToolCalls(syntax, functions_of(TOOLS), **more)


def said(answer: ParsedAnswer) -> tuple[str, list[tuple[str, Any]]]:
    return answer.content, [(call.name, json.loads(call.arguments)) for call in answer.calls]


def pieces_of(text: str, rng: random.Random, n_max: int) -> list[str]:
    out = []
    while text:
        n = rng.randint(1, n_max)
        out.append(text[:n])
        text = text[n:]
    return out


def told(tools: ToolCalls, pieces: list[str]) -> list[Event]:
    parser = ToolParser(tools)
    return [event for piece in pieces for event in parser.feed(piece)] + parser.finish()


def joined(events: list[Event]) -> list[Event]:
    """Texts and arguments that follow each other as one."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, Text) and isinstance(last, Text):
            out[-1] = Text(last.text + event.text)
        elif isinstance(event, Arguments) and isinstance(last, Arguments):
            out[-1] = Arguments(last.text + event.text)
        else:
            out.append(event)
    return out


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_calls_among_text(syntax: Syntax) -> None:
    call, tools = CALL[syntax], tools_of(syntax)
    assert said(parse_answer(tools, call("weather", PARIS))) == ("", [("weather", PARIS)])
    assert said(parse_answer(tools, "Let me see.\n\n" + call("weather", PARIS) + "\n")) == (
        "Let me see.",
        [("weather", PARIS)],
    )
    two = "A " + call("weather", PARIS) + "\n" + call("write", {"path": "a.py", "mode": 3}) + "\n\nDone. \n"
    assert said(parse_answer(tools, two)) == (
        "A Done. \n",
        [("weather", PARIS), ("write", {"path": "a.py", "mode": 3})],
    )
    assert said(parse_answer(tools, call("weather", {}))) == ("", [("weather", {})])


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_text_without_calls_is_what_it_was(syntax: Syntax) -> None:
    for text in ("", " \n", "a <b> <tool", "x\n<tool_call>", "a<tool_call>\n", "<think>", "\n\nhi \n", "</tool_call>"):
        assert said(parse_answer(tools_of(syntax), text)) == (text, [])


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name":"weather","arguments":{"city":"Paris"}}</tool_call>',
        '<tool_call>\n\n {"name" : "weather" ,\n "arguments" : {"city": "Paris"} }\n</tool_call>\n',
        '<tool_call>\n{"arguments": {"city": "Paris"}, "name": "weather"}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}, "id": 3}\n</tool_call>',
        '<tool_call>\n{"type": "function", "name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}\n</tool_call>',
        '<tool_call>\n{"name": "we\\u0061ther", "arguments": {"city": "Paris"}}',
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_c',
    ],
)
def test_json_in_other_shapes(text: str) -> None:
    assert said(parse_answer(tools_of("json"), text)) == ("", [("weather", PARIS)])


def test_json_without_arguments_has_none() -> None:
    assert said(parse_answer(tools_of("json"), '<tool_call>{"name": "weather"}</tool_call>')) == ("", [("weather", {})])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("\nParis\n", "Paris"),
        ("Paris", "Paris"),
        ("\n\n  two\n\nlines \n\n", "\n  two\n\nlines \n"),
        ("\n", ""),
        ("", ""),
        ("\n\n", ""),
        ('\nsay "hi" \\ \t<b></parameter\n', 'say "hi" \\ \t<b></parameter'),
        ("\n42\n", "42"),
        ("\nnull\n", "null"),
        ("\n<tool_call>\n</function>\n</tool_call>\n", "<tool_call>\n</function>\n</tool_call>"),
        ("\nüñ😀\n", "üñ😀"),
    ],
)
def test_texts_in_tags_are_as_they_stand(value: str, expected: str) -> None:
    text = f"<tool_call>\n<function=weather>\n<parameter=city>{value}</parameter>\n</function>\n</tool_call>"
    assert said(parse_answer(tools_of("tagged"), text)) == ("", [("weather", {"city": expected})])


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("mode", " 42\n", 42),
        ("mode", "-1.5e3", -1500.0),
        ("mode", "True", True),
        ("mode", "None", None),
        ("mode", "null", None),
        ("mode", "much", "much"),
        ("mode", "NaN", "NaN"),
        ("mode", "", ""),
        ("tags", '["a",\n "b"]', ["a", "b"]),
        ("any", '{"a": [1]}', {"a": [1]}),
        ("any", "null", None),
        ("any", "True", "True"),
        ("any", "plain text", "plain text"),
        ("unknown", "7", 7),
        ("unknown", "x y", "x y"),
    ],
)
def test_other_values_in_tags_are_json(key: str, value: str, expected: Any) -> None:
    text = f"<tool_call>\n<function=write>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"
    assert said(parse_answer(tools_of("tagged"), text)) == ("", [("write", {key: expected})])


@pytest.mark.parametrize(
    "text", ["<tool_call><function=weather></function></tool_call>", "<tool_call> <function=weather>\n\n</function>"]
)
def test_tags_without_parameters(text: str) -> None:
    assert parse_answer(tools_of("tagged"), text).calls[0].arguments == "{}"


def test_tags_that_are_not_opened() -> None:
    tools, text = (
        tools_of("tagged"),
        "<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
    )
    assert said(parse_answer(tools, text)) == ("", [("weather", PARIS)])
    assert said(parse_answer(tools, "Well:\n" + text + "\n" + text)) == ("Well:", [("weather", PARIS)] * 2)
    for spoken in ("Well: " + text, "<function=nobody>\n</function>", "\n<function=", "a\n<function=wea"):
        assert said(parse_answer(tools, spoken)) == (spoken, [])
    assert said(parse_answer(tools_of("json"), text)) == (text, [])


BROKEN = {
    "json": [
        '<tool_call>\n{"name": "nobody", "arguments": {"a": 1}}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {"a": 1,}}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {"a": 1]}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {"a": \'b\'}}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {"a": "two\nlines"}}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {"a": "b"} oops\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {"a": "b',
        '<tool_call>\n{"name": "weather", "arguments": {"a": "b"}',
        '<tool_call>\n{"name": "weather", "arguments": {"a": "b"}, "why": "c"}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {"a": "b"}, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "parameters": {"a": "b"}}\n</tool_call>',
        '<tool_call>\n{"name": ["weather"], "arguments": {"a": "b"}}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": "x"}\n</tool_call>',
        '<tool_call>\n{"name": "wea',
        '<tool_call>\nweather(1)\n</tool_call>',
        '<tool_call>\n[{"name": "weather"}]\n</tool_call>',
        '<tool_call>\n{"arguments": {"a": "' + "x" * 9000 + '"}, "name": "weather"}\n</tool_call>',
        "<tool_call>\n" + '{"a":' * 2000 + "1" + "}" * 2000,
    ],
    "tagged": [
        "<tool_call>\n<function=nobody>\n</function>\n</tool_call>",
        "<tool_call>\n<function=weather\n>\n</function>\n</tool_call>",
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "<tool_call>\n<function=weather>\nParis\n</function>\n</tool_call>",
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis",
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</param",
        "<tool_call>\n<function=weather>\n<parameter=days>\n3",
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</tool_call>",
        "<tool_call>\n<function=weather>\n<parameter=" + "x" * 2000 + ">\n</parameter>\n</function>",
        "<tool_call>\n<function=wea",
        "<function=weather>\n<parameter=city>\nParis\n</parameter>\noops</function>\n</tool_call>",
        '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>',
    ],
}  # fmt: skip


@pytest.mark.parametrize(("syntax", "text"), [(syntax, text) for syntax in SYNTAXES for text in BROKEN[syntax]])
def test_what_is_no_call_stays_text_and_a_later_call_is_one(syntax: Syntax, text: str) -> None:
    tools = tools_of(syntax)
    assert said(parse_answer(tools, "Well.\n" + text)) == ("Well.\n" + text, [])
    answer = parse_answer(tools, text + "\n" + CALL[syntax]("weather", PARIS))
    if "</tool_call>" in text:  # else the second one may stand in the value of the first
        assert said(answer) == (text, [("weather", PARIS)])


@pytest.mark.parametrize(("syntax", "text"), [(syntax, text) for syntax in SYNTAXES for text in BROKEN[syntax]])
@pytest.mark.parametrize("n_max", [1, 7])
def test_stream_of_a_broken_call_has_all_of_its_text_once(syntax: Syntax, text: str, n_max: int) -> None:
    tools, rng = tools_of(syntax), random.Random(len(text) + n_max)
    whole = joined(told(tools, [text]))
    assert joined(told(tools, pieces_of(text, rng, n_max))) == whole
    name = next((e.name for e in whole if isinstance(e, Begin)), None)
    if name is None:
        assert whole == [Text(text)]
        return
    arguments = "".join(e.text for e in whole if isinstance(e, Arguments))
    broken = next(e for e in whole if isinstance(e, Broken))
    after = "".join(e.text for e in whole if isinstance(e, Text))
    assert broken.raw + after == text
    assert broken.raw.endswith(broken.unsent)
    if syntax == "json":
        header = broken.raw[: broken.raw.index('"arguments": ') + len('"arguments": ')]
        assert header + arguments + broken.unsent + after == text
    else:
        for word in ("Paris", "3", "x" * 2000):
            assert (word in text) == (word in arguments + broken.unsent + after)


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_nothing_in_an_open_thought_is_a_call(syntax: Syntax) -> None:
    call = CALL[syntax]("weather", PARIS)
    opened, tools = tools_of(syntax, in_thought=True), tools_of(syntax)
    thought = f"I could {call} but\n</think>"
    assert said(parse_answer(opened, thought + "\n\n" + call)) == (thought, [("weather", PARIS)])
    assert said(parse_answer(opened, "I could " + call)) == ("I could " + call, [])
    assert said(parse_answer(tools, "\n<think>" + thought + "\n" + call)) == (
        "\n<think>" + thought,
        [("weather", PARIS)],
    )
    spoken = "The tag <think> is odd. "
    assert said(parse_answer(tools, spoken + call)) == (spoken.rstrip(), [("weather", PARIS)])
    again = call + f"\n<think>{call}</think>\n" + call
    assert said(parse_answer(tools, again)) == (f"<think>{call}</think>", [("weather", PARIS)] * 2)


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_second_call_is_text_where_one_is_wanted(syntax: Syntax) -> None:
    call, one = CALL[syntax]("weather", PARIS), tools_of(syntax, parallel=False)
    assert said(parse_answer(one, call + "\n" + call)) == (call, [("weather", PARIS)])
    broken = "<tool_call> no " + call
    assert said(parse_answer(one, broken)) == ("<tool_call> no", [("weather", PARIS)])


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_pieces_are_told_as_soon_as_they_are_sure(syntax: Syntax) -> None:
    parser = ToolParser(tools_of(syntax))
    assert parser.feed("Well, <b") == [Text("Well,"), Text(" <b")] or joined(parser.feed("")) == []
    head, tail = ('\n{"name": "write", "arguments": {"text": "a', 'b') if syntax == "json" else (
        "\n<function=write>\n<parameter=text>\na", "b")  # fmt: skip
    assert parser.feed("> <tool") == [Text(">")]
    events = parser.feed("_call>" + head)
    assert events[0] == Begin("write")
    text = "".join(e.text for e in events if isinstance(e, Arguments))
    assert text.replace(" ", "") == '{"text":"a'
    assert parser.feed(tail) == [Arguments("b")]


def random_value(rng: random.Random, n_deep: int = 0) -> Any:
    kind = rng.randrange(7 if n_deep < 3 else 5)
    if kind < 2:
        return "".join(rng.choice('ab "\\\n\t{}[]<>/é😀tool_call') for _ in range(rng.randrange(12)))
    if kind < 5:
        return (rng.randrange(-1000, 1000), rng.random(), rng.choice([True, False, None]))[kind - 2]
    if kind == 5:
        return [random_value(rng, n_deep + 1) for _ in range(rng.randrange(4))]
    return {random_key(rng): random_value(rng, n_deep + 1) for _ in range(rng.randrange(4))}


def random_key(rng: random.Random) -> str:
    return "".join(rng.choice("abc_é-") for _ in range(rng.randint(1, 4)))


def random_arguments(rng: random.Random) -> tuple[str, dict[str, Any]]:
    text = "".join(rng.choice('ab\n "\\<>/=é😀') for _ in range(rng.randrange(20)))
    whole = {"path": text, "mode": rng.randrange(99), "tags": ["x", text], "any": random_value(rng)}
    if isinstance(whole["any"], str):
        del whole["any"]  # a text that happens to be JSON would be read as such
    keys = rng.sample(sorted(whole), rng.randint(0, len(whole)))
    return "write", {key: whole[key] for key in keys}


@pytest.mark.parametrize("syntax", SYNTAXES)
@pytest.mark.parametrize("seed", range(60))
def test_stream_equals_the_whole(syntax: Syntax, seed: int) -> None:
    """Random texts, thoughts and calls, cut at random."""
    rng = random.Random(seed)
    text, content, calls = "", "", []
    for _ in range(rng.randint(1, 5)):
        kind = rng.randrange(3)
        if kind == 0:
            words = " ".join(rng.choice(["see", "<b>", "<tool", "a<", "</think>", "{}"]) for _ in range(3))
            text, content = text + words, content + words
        elif kind == 1:
            thought = f"<think>{CALL[syntax]('weather', PARIS)}</think>"
            text, content = (text + "\n" + thought, content + ("\n" if text and text[-1] != ">" else "") + thought)
        else:
            name, arguments = random_arguments(rng)
            text += "\n" + CALL[syntax](name, arguments) + "\n"
            calls.append((name, arguments))
    tools = tools_of(syntax)
    whole = parse_answer(tools, text)
    assert [(c.name, json.loads(c.arguments)) for c in whole.calls] == calls
    assert "".join(whole.content.split()) == "".join(content.split())
    expected = joined(told(tools, [text]))
    for n_max in (1, 3, 20):
        assert joined(told(tools, pieces_of(text, rng, n_max))) == expected
    assert [e.text for e in expected if isinstance(e, Arguments)] == [c.arguments for c in whole.calls]


ALPHABET = (
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<function=write>", "<function=", "<parameter=path>", "</parameter>",
    "</function>", '{"name": "write", "arguments": ', '{"path": "', '"', "{", "}", "[", "]", ":", ",", "\\", "\n", " ", "a", "1",
    "write", "<", ">", "/",
)  # fmt: skip


def spoiled(syntax: Syntax, rng: random.Random) -> list[str]:
    """A good answer with some of its parts left out, twice there or exchanged."""
    text = "Well. " + "\n".join(CALL[syntax](*random_arguments(rng)) for _ in range(rng.randint(1, 3)))
    parts = pieces_of(text, rng, 12)
    for _ in range(rng.randint(1, 3)):
        i = rng.randrange(len(parts))
        parts[i] = rng.choice(["", parts[i] * 2, rng.choice(ALPHABET), rng.choice(parts)])
    return parts


@pytest.mark.parametrize("syntax", SYNTAXES)
@pytest.mark.parametrize("seed", range(300))
def test_garbage_is_never_lost_and_never_an_error(syntax: Syntax, seed: int) -> None:
    """Parts of calls in any order, or calls that were spoiled, with a marked word between some: each comes out, once."""
    rng = random.Random(seed)
    parts = [rng.choice(ALPHABET) for _ in range(rng.randint(1, 40))] if seed % 2 else spoiled(syntax, rng)
    words = [f"w{i}w" if rng.random() < 0.1 and not part.endswith("\\") else "" for i, part in enumerate(parts)]
    text = "".join(part + word for part, word in zip(parts, words, strict=True))
    tools = tools_of(syntax, parallel=rng.random() < 0.7, in_thought=rng.random() < 0.2)
    whole = parse_answer(tools, text)
    out = whole.content + "".join(f"{c.name} {c.arguments}" for c in whole.calls)
    expected = joined(told(tools, [text]))
    for n_max in (1, 5):
        assert joined(told(tools, pieces_of(text, rng, n_max))) == expected
    streamed = "".join(
        e.unsent if isinstance(e, Broken) else e.name if isinstance(e, Begin) else e.text
        for e in expected
        if not isinstance(e, End)
    )
    for word in filter(None, words):
        assert out.count(word) == text.count(word)
        assert streamed.count(word) == text.count(word)
    if not whole.calls:
        assert whole.content == text
    for call in whole.calls:
        assert isinstance(json.loads(call.arguments), dict)
