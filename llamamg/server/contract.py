"""What this package needs of the engine and its vocabulary; the tests' fakes have the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from llamamg.request import Event, Request, Tokens

T = TypeVar("T")
Pairs = Sequence[tuple[int, Event]]


class VocabularyLike(Protocol):
    """Text to tokens and back, thread-safe; `llamamg.vocab.Vocabulary`."""

    n_vocab: int
    bos: int
    add_bos: bool
    bos_piece: str
    eos_piece: str
    chat_template: str | None

    def tokenize(self, text: str | bytes, add_special: bool, parse_special: bool) -> Tokens:
        """int32 [n]."""
        ...

    def piece(self, token: int, special: bool = True) -> bytes:
        """One token's bytes, special ones rendered."""
        ...

    def detokenize(self, tokens: Any) -> str:
        """Their text, special ones rendered, invalid UTF-8 replaced."""
        ...


class EngineLike(Protocol):
    """The engine as the server sees it, thread-safe; `llamamg.engine.Engine`."""

    deliver: Callable[[list[tuple[int, Event]]], None]

    @property
    def vocab(self) -> VocabularyLike: ...
    @property
    def model(self) -> Any: ...
    @property
    def stats(self) -> Any: ...
    @property
    def plugins(self) -> Any: ...
    @property
    def n_ctx_slot(self) -> int: ...
    @property
    def n_slots(self) -> int: ...
    @property
    def alive(self) -> bool: ...

    def submit(self, request: Request) -> None:
        """Queue a request; its events come through `deliver`."""
        ...

    def cancel(self, request_id: int) -> None:
        """Forget a request, queued or running; no event follows."""
        ...

    def call(self, fn: Callable[[Any], T]) -> Future[T]:
        """Run `fn(engine)` on the engine thread between two steps."""
        ...

    def slot_views(self) -> Sequence[Any]:
        """A snapshot for /slots."""
        ...
