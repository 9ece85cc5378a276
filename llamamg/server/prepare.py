"""Everything about a request that needs no engine: parse, check, render, tokenize. Runs in the server or in the parse process.

Deviation from llama-server: a body that is no JSON gets 400 `invalid_request_error` (there: 500 `server_error`), and so
does one that is no UTF-8, because both are the client's mistake. An empty prompt gets 400 too (there: an empty answer).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import orjson

from llamamg.config import GenerationConfig
from llamamg.request import SamplingParams, Tokens
from llamamg.server import fields as f
from llamamg.server.chat import ChatPrompt, chat_prompt
from llamamg.server.chat_format import ChatFormat
from llamamg.server.contract import VocabularyLike
from llamamg.server.errors import bad_field, bad_request, context_exceeded, not_supported
from llamamg.server.sampling import read_sampling
from llamamg.server.tool_format import ToolCalls

Kind = Literal["completion", "oai_completion", "chat", "tokenize", "detokenize", "apply_template"]


@dataclass(slots=True)
class PrepareContext:
    """What `prepare` has to know of the model and the command line."""

    vocab: VocabularyLike
    chat: ChatFormat
    generation: GenerationConfig
    n_ctx_slot: int
    n_slots: int
    sse_ping_interval_s: float


@dataclass(slots=True)
class Prompt:
    """One prompt: its tokens as int32 bytes, the JSON text that shows it (empty: never shown), user message starts."""

    tokens: bytes | bytearray | memoryview
    echo: bytes = b""
    user_starts: tuple[int, ...] = ()

    def array(self) -> Tokens:
        """The tokens as int32 [n], without a copy."""
        return np.frombuffer(self.tokens, np.int32)


@dataclass(slots=True)
class Prepared:
    """A request ready to be submitted or, when `answer` is set, already answered."""

    kind: Kind
    prompts: list[Prompt] = field(default_factory=list)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    limits: dict[str, Any] = field(default_factory=dict)  # further fields of Request
    n_cmpl: int = 1
    stream: bool = False
    include_usage: bool = False
    verbose: bool = False
    response_fields: tuple[str, ...] = ()
    ping_interval_s: float = 30.0
    answer: bytes = b""
    tools: ToolCalls | None = None  # how a chat's tool calls are read; None: they are not


def prepare(kind: Kind, body: bytes | bytearray, context: PrepareContext) -> Prepared:
    """Turn a body into what the engine needs. Pure; raises ApiError and nothing else."""
    data = parse(body)
    if kind == "tokenize":
        return Prepared(kind, answer=_tokenize(data, context.vocab))
    if kind == "detokenize":
        return Prepared(kind, answer=_detokenize(data, context.vocab))
    if kind == "apply_template":
        return Prepared(kind, answer=orjson.dumps({"prompt": _chat(data, context).text}))
    if kind == "chat":
        chat = _chat(data, context)
        shown = f.boolean(data, "verbose", False)
        prompts = [_chat_tokens(chat.text, chat.last_user, context.vocab, shown)]
        prepared = _completion(kind, chat.fields, prompts, context)
        prepared.tools = chat.tools
        return prepared
    if kind == "oai_completion":
        _check_oai_completion(data)
    shown = kind == "completion" or f.boolean(data, "verbose", False)
    return _completion(kind, data, _prompts(data.get("prompt"), context.vocab, shown), context)


def parse(body: bytes | bytearray) -> dict[str, Any]:
    """The body as an object. Raises ApiError with where it went wrong."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"The request body is not valid JSON in UTF-8: {error}") from None
    if type(data) is not dict:
        raise bad_request(f"The request body must be a JSON object, but is {f.type_name(data)}")
    return data


def _completion(kind: Kind, data: dict[str, Any], prompts: list[Prompt], context: PrepareContext) -> Prepared:
    generation, vocab = context.generation, context.vocab
    stream = f.boolean(data, "stream", False)
    for prompt in prompts:
        n_prompt = len(prompt.tokens) // 4
        if n_prompt == 0:
            raise bad_request('"prompt" must not be empty')
        if n_prompt >= context.n_ctx_slot:
            raise context_exceeded(n_prompt, context.n_ctx_slot)
    id_slot = f.ID_SLOT.read(data, -1)
    limits: dict[str, Any] = {
        "n_predict": f.N_PREDICT.read(data, generation.n_predict),
        "stop": _stop(data),
        "n_keep": f.N_KEEP.read(data, generation.n_keep),
        "n_discard": f.N_DISCARD.read(data, 0),
        "n_indent": f.N_INDENT.read(data, 0),
        "t_max_predict_ms": f.T_MAX_PREDICT_MS.read(data, -1),
        "cache_prompt": f.boolean(data, "cache_prompt", generation.cache_prompt),
        "id_slot": id_slot % context.n_slots if id_slot >= 0 else -1,
        "return_tokens": f.boolean(data, "return_tokens", False),
        "return_progress": f.boolean(data, "return_progress", False),
        "timings_per_token": f.boolean(data, "timings_per_token", False),
        "preserved_tokens": _preserved(data, vocab),
    }
    n_cmpl = f.Number(("n_cmpl", "n"), 1, context.n_slots, hard=True).read(data, 1)
    return Prepared(
        kind,
        prompts=prompts,
        sampling=read_sampling(data, generation.sampling, vocab),
        limits=limits,
        n_cmpl=n_cmpl,
        stream=stream,
        include_usage=f.boolean(f.mapping(data, "stream_options"), "include_usage", False),
        verbose=f.boolean(data, "verbose", False),
        response_fields=tuple(f.strings(data, "response_fields")),
        ping_interval_s=f.SSE_PING_INTERVAL.read(data, context.sse_ping_interval_s),
    )


def _stop(data: f.Body) -> tuple[str, ...]:
    stop = data.get("stop")
    words = [stop] if type(stop) is str else f.strings(data, "stop")
    return tuple(word for word in words if word)


def _preserved(data: f.Body, vocab: VocabularyLike) -> frozenset[int]:
    found = [vocab.tokenize(text, False, True) for text in f.strings(data, "preserved_tokens")]
    return frozenset(int(tokens[0]) for tokens in found if len(tokens) == 1)


def _check_oai_completion(data: f.Body) -> None:
    if data.get("prompt") is None:
        raise bad_request('"prompt" is required')
    if f.boolean(data, "echo", False):
        raise bad_request("Only no echo is supported")
    for name in ("best_of", "suffix"):
        if data.get(name) is not None:
            raise bad_request(f"Unsupported param: {name}")


def _prompts(prompt: Any, vocab: VocabularyLike, shown: bool) -> list[Prompt]:
    """Text, tokens, a mixture, an object with `prompt_string`, or a list of those."""
    if prompt is None:
        raise bad_request('"prompt" is required')
    if type(prompt) is list and not any(type(p) is int for p in prompt):
        if not prompt:
            raise bad_request('"prompt" must not be empty')
        return [_prompt(p, vocab, shown) for p in prompt]
    return [_prompt(prompt, vocab, shown)]


def _prompt(prompt: Any, vocab: VocabularyLike, shown: bool) -> Prompt:
    if type(prompt) is dict:
        if prompt.get("multimodal_data"):
            raise not_supported("multimodal_data is not supported: this server reads text only")
        prompt = f.string(prompt, "prompt_string")
    tokens = mixed_tokens("prompt", prompt, vocab, add_special=True)
    echo = b""
    if shown:
        # The text itself where we have it: turning a long prompt's tokens back into it costs more than tokenizing did.
        prefix = vocab.bos_piece if vocab.add_bos else ""
        text = prefix + prompt if type(prompt) is str else vocab.detokenize(tokens)
        echo = orjson.dumps(text)
    return Prompt(tokens.tobytes(), echo)


def mixed_tokens(name: str, value: Any, vocab: VocabularyLike, add_special: bool, parse_special: bool = True) -> Tokens:
    """Tokens of a text, of a list of tokens, or of a list of both; only a text that comes first gets BOS."""
    if type(value) is str:
        return vocab.tokenize(value, add_special, parse_special)
    if type(value) is not list:
        raise bad_field(name, f"must be a text or a list of texts and tokens, but is {f.type_name(value)}")
    if not any(type(v) is str for v in value):
        f.token_ids(name, value, vocab.n_vocab)
        return np.array(value, np.int32)
    parts: list[Tokens] = []
    for i, item in enumerate(value):
        if type(item) is str:
            parts.append(vocab.tokenize(item, add_special and i == 0, parse_special))
        else:
            f.token_ids(name, [item], vocab.n_vocab)
            parts.append(np.array([item], np.int32))
    return np.concatenate(parts)


def _chat(data: Mapping[str, Any], context: PrepareContext) -> ChatPrompt:
    generation = context.generation
    if data.get("tools") and not generation.jinja:
        raise bad_request("tools param requires --jinja flag")
    chat = chat_prompt(data, context.chat, generation.chat_template_kwargs, generation.prefill_assistant)
    bos = context.vocab.bos_piece
    if context.vocab.add_bos and bos and chat.text.startswith(bos):
        # The tokenizer adds it again.
        chat.text, chat.last_user = chat.text[len(bos) :], chat.last_user - len(bos)
    return chat


def _chat_tokens(text: str, last_user: int, vocab: VocabularyLike, shown: bool) -> Prompt:
    tokens = vocab.tokenize(text, True, True)
    starts: tuple[int, ...] = ()
    if last_user > 0:
        # A message normally begins with a special token, where tokenizing the rest alone gives the same tokens; checked.
        rest = vocab.tokenize(text[last_user:], False, True)
        n_before = len(tokens) - len(rest)
        if n_before > 0 and np.array_equal(tokens[n_before:], rest):
            starts = (n_before,)
    return Prompt(tokens.tobytes(), orjson.dumps(text) if shown else b"", starts)


def _tokenize(data: f.Body, vocab: VocabularyLike) -> bytes:
    content = data.get("content")
    if content is None:
        return orjson.dumps({"tokens": []})
    add_special = f.boolean(data, "add_special", False)
    parse_special = f.boolean(data, "parse_special", True)
    tokens = mixed_tokens("content", content, vocab, add_special, parse_special).tolist()
    if not f.boolean(data, "with_pieces", False):
        return orjson.dumps({"tokens": tokens})
    return orjson.dumps({"tokens": [{"id": token, "piece": _piece(vocab.piece(token))} for token in tokens]})


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def _detokenize(data: f.Body, vocab: VocabularyLike) -> bytes:
    tokens = data.get("tokens")
    if tokens is None:
        return orjson.dumps({"content": ""})
    f.token_ids("tokens", f.expect("tokens", tokens, list, "array"), vocab.n_vocab)
    return orjson.dumps({"content": vocab.detokenize(tokens)})
