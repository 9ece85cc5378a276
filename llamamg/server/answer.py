"""The bytes of generation answers, in three dialects: native /completion, OpenAI text and OpenAI chat.

Whatever is constant for a request is rendered once; a streamed token costs one JSON string and one join.
"""

from __future__ import annotations

import codecs
import secrets
import string
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from llamamg.request import Delta, Finished, FinishReason, Progress, SamplingParams, TokenProb
from llamamg.server.contract import VocabularyLike
from llamamg.server.prepare import Prepared, Prompt
from llamamg.server.sampling import settings_json

DONE = b"data: [DONE]\n\n"
LOWEST = -3.4028234663852886e38  # JSON has no -inf
_ALPHABET = string.ascii_letters + string.digits


def completion_id() -> str:
    """A fresh id as OpenAI clients expect it."""
    return "chatcmpl-" + random_id()


def random_id() -> str:
    """32 characters; what a tool call is known by."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(32))


@dataclass(slots=True)
class Part:
    """One generation of an answer: one prompt, one of its n completions."""

    index: int
    prompt: Prompt
    sampling: SamplingParams
    request_id: int = -1
    ended: bool = False  # the engine has said its last word about it
    finished: Finished | None = None
    head: bytes = b""  # begins each of its chunks
    role_sent: bool = False

    @property
    def n_prompt(self) -> int:
        """Prompt tokens."""
        return len(self.prompt.tokens) // 4


@dataclass(slots=True)
class TokenTexts:
    """`"id","token","bytes"` of tokens as JSON, made once per token of the vocabulary."""

    vocab: VocabularyLike
    _known: dict[int, bytes] = field(default_factory=dict)

    def json(self, token: int) -> bytes:
        """The three fields without braces."""
        found = self._known.get(token)
        if found is None:
            data = self.vocab.piece(token)
            text = codecs.utf_8_decode(data, "replace", False)[
                0
            ]  # without the beginning of a character, as llama-server
            found = orjson.dumps({"id": token, "token": text, "bytes": list(data)})[1:-1]
            self._known[token] = found
        return found

    def probs(self, probs: Sequence[TokenProb], post_sampling: bool) -> bytes:
        """`completion_probabilities`: a list with one object per token."""
        name, tops = (b"prob", b"top_probs") if post_sampling else (b"logprob", b"top_logprobs")
        out = []
        for p in probs:
            top = b",".join(self._one(token, prob, name) + b"}" for token, prob in p.top)
            out.append(self._one(p.id, p.prob, name) + b',"' + tops + b'":[' + top + b"]}")
        return b"[" + b",".join(out) + b"]"

    def _one(self, token: int, prob: float, name: bytes) -> bytes:
        return b"{" + self.json(token) + b',"' + name + b'":' + orjson.dumps(max(prob, LOWEST))


class Dialect(ABC):
    """Renders the events of one HTTP request. `delta`, `progress`, `last` and `end` are SSE bytes, `whole` is a JSON body."""

    def __init__(
        self, prepared: Prepared, model: str, fingerprint: str, texts: TokenTexts, speculative_types: str = "none"
    ) -> None:
        self.prepared, self.model, self.fingerprint, self.texts = prepared, model, fingerprint, texts
        self.speculative_types = speculative_types
        self.id, self.created = completion_id(), int(time.time())

    @abstractmethod
    def delta(self, part: Part, event: Delta) -> bytes:
        """New text; may be b"" if there is nothing to tell."""

    @abstractmethod
    def progress(self, part: Part, event: Progress) -> bytes:
        """How far the prompt is."""

    @abstractmethod
    def last(self, part: Part, event: Finished) -> bytes:
        """The end of one part, text held back included."""

    @abstractmethod
    def end(self, parts: Sequence[Part]) -> bytes:
        """What follows when all parts have ended."""

    @abstractmethod
    def whole(self, parts: Sequence[Part]) -> bytes:
        """The answer when nothing is streamed."""

    def settings(self, part: Part, brief: bool = False) -> dict[str, Any]:
        """`generation_settings`, or `params` of /slots."""
        more = {
            **self.prepared.limits,
            "stream": self.prepared.stream,
            "speculative_types": self.speculative_types,
        }
        return settings_json(part.sampling, more, brief)

    def tail(self, part: Part, event: Finished) -> bytes:
        """The text that no Delta has brought yet."""
        if not event.tail:
            return b""
        return self.delta(part, Delta(event.tail, (), event.n_decoded))

    def native(self, part: Part, event: Finished) -> dict[str, Any]:
        """llama-server's own final object."""
        streamed = self.prepared.stream
        out: dict[str, Any] = {
            "index": part.index,
            "content": "" if streamed else event.text,
            "tokens": list(event.tokens) if self.prepared.limits["return_tokens"] and not streamed else [],
            "id_slot": event.id_slot,
            "stop": True,
            "model": self.model,
            "tokens_predicted": event.n_decoded,
            "tokens_evaluated": event.n_prompt,
            "generation_settings": self.settings(part),
            "prompt": orjson.Fragment(part.prompt.echo or b'""'),
            "has_new_line": event.has_new_line,
            "truncated": event.truncated,
            "stop_type": event.reason.value if event.reason in _STOP_TYPES else "none",
            "stopping_word": event.stopping_word,
            "tokens_cached": event.n_cached_slot,
            "timings": event.timings.json(),
        }
        if event.probs and not streamed:
            probs = self.texts.probs(event.probs, part.sampling.post_sampling_probs)
            out["completion_probabilities"] = orjson.Fragment(probs)
        return out


_STOP_TYPES = (FinishReason.EOS, FinishReason.LIMIT, FinishReason.WORD)


def usage(parts: Sequence[Part]) -> dict[str, Any]:
    """OpenAI's `usage` over all parts; a prompt that was completed n times counts once."""
    finished = [part.finished for part in parts if part.finished is not None]
    n_completion = sum(event.n_decoded for event in finished)
    n_prompt = sum({id(part.prompt): part.n_prompt for part in parts}.values())
    n_cached = sum({id(p.prompt): p.finished.timings.cache_n for p in reversed(parts) if p.finished}.values())
    return {
        "completion_tokens": n_completion,
        "prompt_tokens": n_prompt,
        "total_tokens": n_completion + n_prompt,
        "prompt_tokens_details": {"cached_tokens": n_cached},
    }


def finish_reason(event: Finished) -> str:
    """OpenAI's word for why a generation ended."""
    return "stop" if event.reason in (FinishReason.EOS, FinishReason.WORD) else "length"


def nested(names: Sequence[str], value: dict[str, Any]) -> dict[str, Any]:
    """`response_fields`: the named fields; "a/b" takes b out of a. Missing ones are left out."""
    out: dict[str, Any] = {}
    for name in names:
        found: Any = value
        for step in name.split("/"):
            found = found.get(step) if isinstance(found, dict) else None
        if found is not None:
            out[name] = found
    return out
