"""Text that may go out: whole characters, nothing of a stop string, nothing lost."""

from __future__ import annotations

import random

import pytest

from llamamg.output import TextStream


def feed(stream: TextStream, pieces: list[bytes]) -> list[str]:
    sent = []
    for piece in pieces:
        sent.append(stream.push(piece))
        if stream.stopped:
            return sent
    sent.append(stream.flush())
    return sent


def test_stop_string_over_token_borders() -> None:
    stream = TextStream(("own fox",))
    sent = feed(stream, [b"The quick br", b"own", b" f", b"ox jumps"])
    assert "".join(sent) == stream.text == "The quick br"
    assert stream.stopping_word == "own fox"


def test_text_held_back_is_flushed_when_no_stop_follows() -> None:
    stream = TextStream(("own fox",))
    assert [stream.push(piece) for piece in (b"The br", b"own f")] == ["The br", ""]
    assert stream.flush() == "own f"
    assert stream.text == "The br" + "own f"
    assert not stream.stopped


def test_false_start_is_released_as_soon_as_it_is_one() -> None:
    stream = TextStream(("own fox",))
    assert [stream.push(piece) for piece in (b"own", b" f", b"rog", b"!")] == ["", "", "own frog", "!"]


def test_the_first_of_several_stops_wins_and_of_two_there_the_longer() -> None:
    stream = TextStream(("later", "so", "soon"))
    assert stream.push(b"it is soon, later") == "it is "
    assert stream.stopping_word == "soon"


def test_stop_that_overlaps_itself() -> None:
    stream = TextStream(("aab",))
    assert [stream.push(piece) for piece in (b"a", b"a", b"a")] == ["", "", "a"]
    assert stream.push(b"b") == ""
    assert (stream.text, stream.stopping_word) == ("a", "aab")


def test_empty_stop_strings_stop_nothing() -> None:
    stream = TextStream(("", "x"))
    assert feed(stream, [b"ab", b"c"]) == ["ab", "c", ""]


def test_new_line_is_noticed_only_in_text_that_was_sent() -> None:
    stream = TextStream(("\nUser:",))
    stream.push(b"one\n")
    assert not stream.has_new_line
    stream.push(b"two")
    assert stream.has_new_line


@pytest.mark.parametrize("text", ["🙂", "é", "漢字", "👩‍👩‍👧", "a🙂b"])
def test_characters_of_several_tokens_come_whole(text: str) -> None:
    stream = TextStream()
    sent = feed(stream, [bytes([byte]) for byte in text.encode()])
    assert not any("�" in part for part in sent)
    assert "".join(sent) == text
    assert all(part == "" or len(part) == 1 for part in sent)


def test_unfinished_character_at_the_end_is_dropped() -> None:
    stream = TextStream()
    assert feed(stream, [b"ok", "🙂".encode()[:3]]) == ["ok", "", ""]


def test_bytes_that_are_no_text_become_one_replacement_and_the_rest_goes_on() -> None:
    stream = TextStream()
    assert "".join(feed(stream, [b"a\xff", b"b"])) == "a\ufffdb"


# -- any text, any stops, any splits

LETTERS = "ab\né漢🙂"


def oracle(pieces: list[bytes], stops: list[str]) -> tuple[str, str]:
    """What may have been sent after `pieces`, and the stop word found, from the definition: looks at all text each time."""
    data = b""
    for piece in pieces:
        data += piece
        text = data.decode("utf-8", "ignore")  # an unfinished character at the end is no text yet
        hits = [(text.find(stop), -len(stop), stop) for stop in stops if stop in text]
        if hits:
            at, _, stop = min(hits)
            return text[:at], stop
    text = data.decode("utf-8", "ignore")
    for n in range(len(text), 0, -1):
        if any(stop.startswith(text[-n:]) for stop in stops):
            return text[:-n], ""
    return text, ""


@pytest.mark.parametrize("seed", range(300))
def test_any_split_of_any_text_sends_what_the_definition_says(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice(LETTERS) for _ in range(rng.randrange(1, 40)))
    stops = ["".join(rng.choice(LETTERS) for _ in range(rng.randrange(1, 6))) for _ in range(rng.randrange(0, 4))]
    data, pieces = text.encode(), []
    while data:
        n = rng.choice((0, 1, 1, 2, 3, 7))
        pieces.append(data[:n])
        data = data[n:]
    stream = TextStream(tuple(stops))
    sent = ""
    for i, piece in enumerate(pieces):
        part = stream.push(piece)
        sent += part
        assert "\ufffd" not in part
        assert (sent, stream.stopping_word) == oracle(pieces[: i + 1], stops)
        assert stream.text == sent
        if stream.stopped:
            return
    assert sent + stream.flush() == text == stream.text
