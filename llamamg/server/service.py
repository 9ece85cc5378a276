"""What the endpoints share: the engine once it is there, the running exchanges, and the ways to prepare a request."""

from __future__ import annotations

import asyncio
import functools
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from llamamg.config import Config
from llamamg.server.answer import TokenTexts
from llamamg.server.chat_format import ChatFormat
from llamamg.server.contract import EngineLike
from llamamg.server.errors import ApiError
from llamamg.server.exchange import Exchanges
from llamamg.server.parse_process import MakeContext, ParseProcess
from llamamg.server.prepare import Kind, PrepareContext, Prepared, prepare

# Up to here parsing takes less than handing it to a thread; llama_tokenize releases the interpreter lock, so above it a
# thread keeps the event loop free for the streams of others.
ON_LOOP_BYTES = 4096
PING_TICK_S = 0.5
T = TypeVar("T")


def fingerprint(build_info: Mapping[str, Any]) -> str:
    """llama-server's `b<number>-<commit>` from the native build's information."""
    number = next(
        (flag.rpartition("=")[2] for flag in build_info.get("flags", ()) if "LLAMA_BUILD_NUMBER=" in flag), "0"
    )
    return f"b{number}-{str(build_info.get('llama.cpp', 'unknown'))[:7]}"


def context_of(config: Config, vocab: Any, n_ctx_slot: int, n_slots: int) -> PrepareContext:
    """A PrepareContext around a vocabulary."""
    template = config.generation.chat_template or vocab.chat_template
    chat = ChatFormat(template, vocab.bos_piece, vocab.eos_piece)
    return PrepareContext(vocab, chat, config.generation, n_ctx_slot, n_slots, config.server.sse_ping_interval_s)


def load_context(config: Config, n_ctx_slot: int, n_slots: int) -> PrepareContext:
    """The same in a process that has no model: loads the library and the vocabulary alone."""
    from llamamg import library
    from llamamg.vocab import Vocabulary

    library.load(config.build)
    return context_of(config, Vocabulary.open(config.model.path), n_ctx_slot, n_slots)


class Service:
    """The server's state. Lives on the event loop; `engine` is None while the model loads."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.engine: EngineLike | None = None
        self.stopping = False
        self.fingerprint = "b0-unknown"
        self.exchanges: Exchanges
        self.context: PrepareContext
        self.texts: TokenTexts
        self._parser: ParseProcess | None = None
        self._parser_thread = ThreadPoolExecutor(1, "llamamg-parse-process")
        self._threads = ThreadPoolExecutor(2, "llamamg-prepare")
        self._ping: asyncio.TimerHandle | None = None

    @property
    def model_name(self) -> str:
        """What answers call the model: the alias, else the file's name."""
        alias = self.config.server.alias
        return alias[0] if alias else self.config.model.path.name

    def attach(
        self,
        engine: EngineLike,
        build_info: Mapping[str, Any],
        make_context: MakeContext | None = None,
        context: PrepareContext | None = None,
    ) -> None:
        """Take a loaded engine, not started yet, and answer from now on. Call it on the event loop.

        `context` is made here when it is not given; `make_context` is what the parse process calls to get its own.
        """
        loop = asyncio.get_running_loop()
        self.config = getattr(engine, "config", self.config)  # plugins may have changed it
        self.exchanges = Exchanges(loop)
        engine.deliver = self.exchanges.deliver
        self.fingerprint = fingerprint(build_info)
        self.context = context or context_of(self.config, engine.vocab, engine.n_ctx_slot, engine.n_slots)
        self.texts = TokenTexts(engine.vocab)
        make = make_context or functools.partial(load_context, self.config, engine.n_ctx_slot, engine.n_slots)
        self._parser = ParseProcess(make)
        self._tick()
        self.engine = engine

    def warm_parser(self) -> None:
        """Start the parse process now, so that the first long request need not wait for it."""
        if self._parser is not None:
            self._parser_thread.submit(self._parser.start)

    def ready(self) -> EngineLike:
        """The engine, or 503."""
        if self.stopping:
            raise ApiError(503, "The server is shutting down")
        if self.engine is None:
            raise ApiError(503, "Loading model")
        if not self.engine.alive:
            raise ApiError(503, "The engine has stopped after an error; see the server's log and restart it")
        return self.engine

    def speculative_types(self) -> str:
        """`speculative.types`: what drafts are made of now. llama-server lists its kinds behind its default, which is none."""
        if self.engine is None or not self.engine.plugins.hooks.draft:
            return "none"
        return ",".join(("none", *(self.config.context.draft_types or ("unknown",))))

    async def prepare(self, kind: Kind, chunks: Sequence[bytes]) -> Prepared:
        """Parse, check and tokenize a body, wherever its size says. Raises ApiError."""
        size = sum(len(chunk) for chunk in chunks)
        loop = asyncio.get_running_loop()
        if size > self.config.server.parse_inline_bytes:
            assert self._parser is not None
            return await loop.run_in_executor(self._parser_thread, self._parser.run, kind, chunks)
        body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        try:
            if size <= ON_LOOP_BYTES:
                return prepare(kind, body, self.context)
            return await loop.run_in_executor(self._threads, prepare, kind, body, self.context)
        except ApiError:
            raise
        except Exception:
            traceback.print_exc()
            raise ApiError(500, "The server failed to read this request; its log has the details.") from None

    async def in_thread(self, function: Callable[[T], None], argument: T) -> None:
        """Run something that takes long, but releases the interpreter lock, beside the event loop."""
        await asyncio.get_running_loop().run_in_executor(self._threads, function, argument)

    def cut(self) -> None:
        """End every running answer with an error; used when the server stops."""
        if self.engine is not None:
            for exchange in self.exchanges.each():
                exchange.fail(ApiError(503, "The server is shutting down"))

    def close(self) -> None:
        """Stop timers, threads and the parse process."""
        if self._ping is not None:
            self._ping.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._parser_thread.shutdown(wait=False, cancel_futures=True)
        if self._parser is not None:
            self._parser.stop()

    def _tick(self) -> None:
        if self.engine is not None:
            self.exchanges.ping()
        self._ping = asyncio.get_running_loop().call_later(PING_TICK_S, self._tick)
