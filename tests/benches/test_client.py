"""The streaming client against a server that answers byte by byte as told."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from benches.client import Answer, EventCutter, Post, ServerError, together

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = [
    b'data: {"content":"a\\n\\nb","stop":false}\n\n',
    b":\n\n",
    b'data: {"content":"c"}\n\n',
    b'data: {"stop":true,"n":2}\n\n',
]


def chunked(parts: Sequence[bytes]) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_cut_wherever_the_packets_end(size: int) -> None:
    wire, cutter, found = chunked(EVENTS), EventCutter(), []
    for at in range(0, len(wire), size):
        found += cutter.feed(wire[at : at + size])
    assert found == [b'{"content":"a\\n\\nb","stop":false}', b'{"content":"c"}', b'{"stop":true,"n":2}']
    assert cutter.last == b'{"stop":true,"n":2}'


async def serve_once(answers: Sequence[bytes], pause_s: float = 0.0) -> list[Answer]:
    """Each connection gets one of `answers`, in two packets with a pause between; the client's view of it."""
    left = list(answers)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        n_body = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        await reader.readexactly(n_body)
        data = left.pop(0)
        half = len(HEAD) + (len(data) - len(HEAD)) // 2
        writer.write(data[:half])
        await writer.drain()
        await asyncio.sleep(pause_s)
        writer.write(data[half:])
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        return await together([Post(f"http://127.0.0.1:{port}", "/completion", {"prompt": "x"}) for _ in answers])


def test_a_stream_is_stamped_and_its_last_event_parsed() -> None:
    answers = asyncio.run(serve_once([HEAD + chunked(EVENTS)] * 2, pause_s=0.02))
    for answer in answers:
        assert len(answer.stamps) == 2
        assert answer.final == {"stop": True, "n": 2}
        assert answer.t_sent < answer.stamps[0] <= answer.stamps[-1] <= answer.t_end
        assert answer.ttft_s > 0
        assert len(answer.gaps_s) == 1


def test_an_openai_stream_ends_with_done() -> None:
    (answer,) = asyncio.run(serve_once([HEAD + chunked([*EVENTS, b"data: [DONE]\n\n"])]))
    assert len(answer.stamps) == 3
    assert answer.final == {}


@pytest.mark.parametrize(
    ("wire", "said"),
    [
        (
            b"HTTP/1.1 503 Unavailable\r\nContent-Type: application/json\r\n\r\n{'error': 'Loading model'}",
            "Loading model",
        ),
        (HEAD + chunked([b'data: {"error":{"message":"broken"}}\n\n']), "broken"),
        (HEAD, "no event stream"),
    ],
)
def test_anything_else_is_an_error_that_shows_the_answer(wire: bytes, said: str) -> None:
    with pytest.raises(ServerError, match=said):
        asyncio.run(serve_once([wire]))
