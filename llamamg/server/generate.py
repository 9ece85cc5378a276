"""The endpoints that generate text, and those that only tokenize: one handler for all of them."""

from __future__ import annotations

import asyncio

from llamamg.request import Request
from llamamg.server.answer import Part
from llamamg.server.contract import EngineLike
from llamamg.server.dialects import DIALECTS
from llamamg.server.exchange import Exchange, parts_of
from llamamg.server.http import Call
from llamamg.server.prepare import Kind
from llamamg.server.service import Service
from llamamg.server.tool_dialect import OpenAiToolChat
from llamamg.server.writer import Writer

# The sampler takes in the whole prompt when a request is submitted: a long one must not hold up the event loop.
SUBMIT_INLINE_TOKENS = 4096


async def post(service: Service, call: Call, kind: Kind) -> None:
    """Answer a POST of `kind`. Raises ApiError for what fails before anything was sent."""
    chunks = await call.body(service.config.server.timeout_s)
    prepared = await service.prepare(kind, chunks)
    del chunks
    if prepared.answer:
        await call.answer(prepared.answer)
        return
    engine = service.ready()
    dialect_type = DIALECTS[kind] if prepared.tools is None else OpenAiToolChat
    dialect = dialect_type(
        prepared, service.model_name, service.fingerprint, service.texts, service.speculative_types()
    )
    writer = Writer(call.send, lambda: exchange.abandon())
    exchange = Exchange(dialect, parts_of(prepared), writer, call.headers)
    watch = asyncio.ensure_future(call.disconnected())
    try:
        # One turn of the loop: a client that left while its long prompt was parsed is noticed before anything is queued.
        await asyncio.sleep(0)
        if watch.done():
            return
        watch.add_done_callback(lambda _: exchange.abandon())
        exchange.done.add_done_callback(lambda _: service.exchanges.remove(exchange, engine))
        for part in exchange.parts:
            await _submit(service, engine, exchange, part)
        error = await exchange.done
        if not exchange.started and not watch.done():
            if error is not None:
                raise error
            await call.answer(dialect.whole(exchange.parts))
        await writer.drained(service.config.server.timeout_s)
    finally:
        watch.cancel()
        if not exchange.done.done():
            exchange.abandon()


async def _submit(service: Service, engine: EngineLike, exchange: Exchange, part: Part) -> None:
    prepared = exchange.dialect.prepared
    limits = dict(prepared.limits)
    if part.index and prepared.n_cmpl > 1 and part.index % prepared.n_cmpl:
        limits["id_slot"] = -1  # further completions of a prompt cannot share its slot
    request = Request(
        prompt=part.prompt.array(),
        sampling=part.sampling,
        stream=prepared.stream,
        user_starts=part.prompt.user_starts,
        echo_settings=exchange.dialect.settings(part, brief=True),
        **limits,
    )
    service.exchanges.add(exchange, part, request)
    if len(request.prompt) <= SUBMIT_INLINE_TOKENS:
        engine.submit(request)
    else:
        await service.in_thread(engine.submit, request)
        if exchange.done.done():
            engine.cancel(request.id)
