"""The three dialects of a generation answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from llamamg.request import Delta, Finished, Progress, Timings
from llamamg.server.answer import DONE, Dialect, Part, TokenTexts, finish_reason, nested, usage
from llamamg.server.prepare import Prepared


def sse(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def timings_member(timings: Timings | None) -> bytes:
    """`timings` behind other members; nothing where there are none."""
    return b"" if timings is None else b',"timings":' + orjson.dumps(timings.json())


def _prompt_progress(event: Progress) -> bytes:
    progress = {
        "total": event.total,
        "cache": event.cache,
        "processed": event.processed,
        "time_ms": int(event.time_ms),
    }
    return b',"prompt_progress":' + orjson.dumps(progress) + timings_member(event.timings)


_NATIVE_CHUNK = (
    b'data: {"index":%d,"content":%b,"tokens":%b,"stop":false,"id_slot":-1,'
    b'"tokens_predicted":%d,"tokens_evaluated":%d%b}\n\n'
)


class Native(Dialect):
    """/completion: every event is a JSON object, the last one is the whole answer's; no [DONE]."""

    def delta(self, part: Part, event: Delta) -> bytes:
        """A chunk with its text and tokens."""
        if not event.text and not event.tokens:
            return b""
        extra = timings_member(event.timings)
        if event.probs:
            probs = self.texts.probs(event.probs, part.sampling.post_sampling_probs)
            extra += b',"completion_probabilities":' + probs
        return self._chunk(part, event.text, event.tokens, event.n_decoded, extra)

    def progress(self, part: Part, event: Progress) -> bytes:
        """A chunk without text."""
        return self._chunk(part, "", (), 0, _prompt_progress(event))

    def _chunk(self, part: Part, text: str, tokens: tuple[int, ...], n_decoded: int, extra: bytes) -> bytes:
        values = (part.index, orjson.dumps(text), orjson.dumps(tokens), n_decoded, part.n_prompt, extra)
        return _NATIVE_CHUNK % values

    def last(self, part: Part, event: Finished) -> bytes:
        """Text held back, then the final object."""
        return self.tail(part, event) + sse(self._final(part, event))

    def end(self, parts: Sequence[Part]) -> bytes:
        """Nothing."""
        return b""

    def whole(self, parts: Sequence[Part]) -> bytes:
        """One object, or a list when there were several prompts or completions."""
        results = [self._final(part, part.finished) for part in parts if part.finished is not None]
        return orjson.dumps(results[0] if len(parts) == 1 else results)

    def _final(self, part: Part, event: Finished) -> dict[str, Any]:
        native = self.native(part, event)
        return nested(self.prepared.response_fields, native) if self.prepared.response_fields else native


class OpenAi(Dialect):
    """What /v1/completions and /v1/chat/completions share."""

    object_whole: str
    object_chunk: str

    def __init__(
        self, prepared: Prepared, model: str, fingerprint: str, texts: TokenTexts, speculative_types: str = "none"
    ) -> None:
        super().__init__(prepared, model, fingerprint, texts, speculative_types)
        self._close = b'],"created":%d,"id":%b,"model":%b,"system_fingerprint":%b,"object":%b' % (
            self.created,
            orjson.dumps(self.id),
            orjson.dumps(model),
            orjson.dumps(fingerprint),
            orjson.dumps(self.object_chunk),
        )
        self._close_plain = self._close + b"}\n\n"

    def event(self, choice: bytes, extra: bytes = b"") -> bytes:
        """A chunk with one choice (b"": none); `extra` are further members, each after a comma."""
        return b'data: {"choices":[' + choice + self._close + extra + b"}\n\n"

    def logprobs(self, part: Part, event: Delta) -> bytes:
        """The `logprobs` value of a chunk."""
        return b'{"content":' + self.texts.probs(event.probs, part.sampling.post_sampling_probs) + b"}"

    def verbose(self, part: Part, event: Finished) -> bytes:
        """`__verbose`, for requests that ask for it."""
        return b',"__verbose":' + orjson.dumps(self.native(part, event)) if self.prepared.verbose else b""

    def choice(self, part: Part, event: Finished, logprobs: Any) -> dict[str, Any]:
        """A choice of the unstreamed answer."""
        raise NotImplementedError

    def whole(self, parts: Sequence[Part]) -> bytes:
        """One object with all choices."""
        choices = []
        for part in parts:
            event = part.finished
            if event is not None:
                probs = self.texts.probs(event.probs, part.sampling.post_sampling_probs) if event.probs else b""
                choices.append(self.choice(part, event, {"content": orjson.Fragment(probs)} if probs else None))
        out: dict[str, Any] = {
            "choices": choices,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "object": self.object_whole,
            "usage": usage(parts),
            "id": self.id,
        }
        first = parts[0].finished
        if first is not None:
            out["timings"] = first.timings.json()
            if self.prepared.verbose:
                out["__verbose"] = self.native(parts[0], first)
        return orjson.dumps(out)


class OpenAiText(OpenAi):
    """/v1/completions."""

    object_whole = object_chunk = "text_completion"

    def delta(self, part: Part, event: Delta) -> bytes:
        """A chunk with its text."""
        if not event.text and not event.probs:
            return b""
        logprobs = self.logprobs(part, event) if event.probs else b"null"
        choice = b'{"text":%b,"index":%d,"logprobs":%b,"finish_reason":null}' % (
            orjson.dumps(event.text),
            part.index,
            logprobs,
        )
        return self.event(choice, timings_member(event.timings))

    def progress(self, part: Part, event: Progress) -> bytes:
        """A chunk without text."""
        choice = b'{"text":"","index":%d,"logprobs":null,"finish_reason":null}' % part.index
        return self.event(choice, _prompt_progress(event))

    def last(self, part: Part, event: Finished) -> bytes:
        """Text held back, then the reason, always with usage and timings."""
        choice = b'{"text":"","index":%d,"logprobs":null,"finish_reason":"%b"}' % (
            part.index,
            finish_reason(event).encode(),
        )
        extra = b',"usage":' + orjson.dumps(usage([part])) + timings_member(event.timings) + self.verbose(part, event)
        return self.tail(part, event) + self.event(choice, extra)

    def end(self, parts: Sequence[Part]) -> bytes:
        """[DONE]."""
        return DONE

    def choice(self, part: Part, event: Finished, logprobs: Any) -> dict[str, Any]:
        """A choice of the unstreamed answer."""
        return {
            "text": event.text,
            "index": part.index,
            "logprobs": logprobs,
            "finish_reason": finish_reason(event),
        }


class OpenAiChat(OpenAi):
    """/v1/chat/completions. The first chunk of a part names the role, as OpenAI's does."""

    object_whole = "chat.completion"
    object_chunk = "chat.completion.chunk"

    def delta(self, part: Part, event: Delta) -> bytes:
        """A chunk with its text, the role before the first."""
        role = b""
        if not part.role_sent:
            part.role_sent = True
            part.head = b'data: {"choices":[{"finish_reason":null,"index":%d,"delta":{"content":' % part.index
            role = self._role(part)
        if event.probs or event.timings is not None:
            logprobs = b',"logprobs":' + self.logprobs(part, event) if event.probs else b""
            choice = b'{"finish_reason":null,"index":%d,"delta":{"content":%b}%b}' % (
                part.index,
                orjson.dumps(event.text),
                logprobs,
            )
            return role + self.event(choice, timings_member(event.timings))
        if not event.text:
            return role
        return role + part.head + orjson.dumps(event.text) + b"}}" + self._close_plain

    def _role(self, part: Part, extra: bytes = b"") -> bytes:
        choice = b'{"finish_reason":null,"index":%d,"delta":{"role":"assistant","content":null}}' % part.index
        return self.event(choice, extra)

    def progress(self, part: Part, event: Progress) -> bytes:
        """A chunk with the role and no text."""
        return self._role(part, _prompt_progress(event))

    def last(self, part: Part, event: Finished) -> bytes:
        """Text held back, then the reason; timings ride on the very last chunk, which may be the usage's."""
        before = self.tail(part, event)
        if not part.role_sent:
            before = self._role(part)
        choice = b'{"finish_reason":"%b","index":%d,"delta":{}}' % (self.reason(part, event).encode(), part.index)
        extra = b"" if self.prepared.include_usage else timings_member(event.timings)
        return before + self.event(choice, extra + self.verbose(part, event))

    def reason(self, part: Part, event: Finished) -> str:
        """Why a streamed generation ended."""
        return finish_reason(event)

    def end(self, parts: Sequence[Part]) -> bytes:
        """The usage chunk if asked for, and [DONE]."""
        if not self.prepared.include_usage:
            return DONE
        final = parts[-1].finished
        extra = b',"usage":' + orjson.dumps(usage(parts)) + timings_member(final.timings if final else None)
        return self.event(b"", extra) + DONE

    def choice(self, part: Part, event: Finished, logprobs: Any) -> dict[str, Any]:
        """A choice of the unstreamed answer."""
        message = {"role": "assistant", "content": event.text}
        out: dict[str, Any] = {"finish_reason": finish_reason(event), "index": part.index, "message": message}
        if logprobs is not None:
            out["logprobs"] = logprobs
        return out


DIALECTS: dict[str, type[Dialect]] = {"completion": Native, "oai_completion": OpenAiText, "chat": OpenAiChat}
