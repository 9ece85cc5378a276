"""Request fields that decide how tokens are chosen -> SamplingParams, and back to `generation_settings`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from llamamg.json_schema import SchemaError, schema_to_grammar
from llamamg.options import sampling_values
from llamamg.request import RANDOM_SEED, SamplingParams
from llamamg.server.contract import VocabularyLike
from llamamg.server.errors import bad_field, bad_request
from llamamg.server.fields import (
    SAMPLING,
    SEED,
    Body,
    Number,
    boolean,
    expect,
    find,
    refuse,
    string,
    strings,
    type_name,
)

NO_LAZY_GRAMMAR = "lazy grammars are not supported; leave it out to have the grammar apply from the first token"


def read_sampling(body: Body, defaults: SamplingParams, vocab: VocabularyLike) -> SamplingParams:
    """The sampling of one request. Raises ApiError."""
    refuse(body, "lora", "per-request LoRA adapters are not supported")
    refuse(body, "grammar_lazy", NO_LAZY_GRAMMAR)
    refuse(body, "grammar_triggers", NO_LAZY_GRAMMAR)
    budget = Number(("reasoning_budget_tokens", "thinking_budget_tokens"), -1).read(body, -1)
    if budget >= 0:
        refuse({"reasoning_budget_tokens": True}, "reasoning_budget_tokens", "reasoning budgets are not supported")
    values: dict[str, Any] = {
        name: number.read(body, getattr(defaults, name))
        for name, number in SAMPLING.items()
        if find(body, *number.names)
    }
    dry_base = Number(("dry_base",), whole=False).read(body, defaults.dry_base)
    values["dry_base"] = dry_base if dry_base >= 1.0 else defaults.dry_base
    if body.get("dry_sequence_breakers") is not None:
        values["dry_sequence_breakers"] = tuple(strings(body, "dry_sequence_breakers"))
        if not values["dry_sequence_breakers"]:
            raise bad_field("dry_sequence_breakers", "must be a non-empty array of strings")
    if body.get("samplers") is not None:
        values["samplers"] = _samplers(body["samplers"])
    values["seed"] = SEED.read(body, defaults.seed) & RANDOM_SEED
    values["n_probs"] = _n_probs(body, defaults.n_probs, vocab.n_vocab)
    values["post_sampling_probs"] = boolean(body, "post_sampling_probs", defaults.post_sampling_probs)
    values["ignore_eos"] = boolean(body, "ignore_eos", defaults.ignore_eos)
    if body.get("logit_bias") is not None:
        values["logit_bias"] = _logit_bias(body["logit_bias"], vocab)
    values["grammar"] = _grammar(body, defaults.grammar)
    return dataclasses.replace(defaults, **values)


def _n_probs(body: Body, default: int, n_vocab: int) -> int:
    if body.get("n_probs") is None and type(body.get("logprobs")) is bool:
        return int(body["logprobs"])
    return int(Number(("n_probs", "logprobs"), 0, n_vocab).read(body, default))


def _samplers(value: Any) -> tuple[str, ...]:
    try:
        if type(value) is str:
            return sampling_values.sampler_letters(value)
        return sampling_values.samplers(";".join(strings({"samplers": value}, "samplers")))
    except ValueError as error:
        raise bad_field("samplers", str(error)) from None


def _bias(value: Any) -> float | None:
    if value is False:
        return -math.inf
    return float(value) if type(value) in (int, float) else None


def _logit_bias(value: Any, vocab: VocabularyLike) -> tuple[tuple[int, float], ...]:
    """Pairs [token or text, bias or false], or an object from token or text to bias; what fits neither is skipped."""
    if type(value) is list:
        pairs = [(el[0], el[1]) for el in value if type(el) is list and len(el) == 2]
    elif type(value) is dict:
        pairs = [(int(k) if k.lstrip("-").isdecimal() else k, v) for k, v in value.items()]
    else:
        raise bad_field("logit_bias", f"type must be array or object, but is {type_name(value)}")
    out: list[tuple[int, float]] = []
    for token, given in pairs:
        bias = _bias(given)
        if bias is None:
            continue
        if type(token) is int and 0 <= token < vocab.n_vocab:
            out.append((token, bias))
        elif type(token) is str:
            out.extend((int(t), bias) for t in vocab.tokenize(token, False, False))
    return tuple(out)


def _grammar(body: Body, default: str) -> str:
    grammar = string(body, "grammar")
    schema = body.get("json_schema")
    if schema is None:
        return grammar or default
    if grammar:
        raise bad_request("Cannot use both json_schema and grammar")
    return schema_grammar(expect("json_schema", schema, dict, "object"))


def schema_grammar(schema: dict[str, Any]) -> str:
    """The grammar of a JSON schema; {} means any object. Raises ApiError."""
    try:
        return schema_to_grammar(schema or {"type": "object"})
    except RecursionError:
        raise bad_field("json_schema", "it is nested too deeply") from None
    except SchemaError as error:
        raise bad_field("json_schema", f"not a schema that can be turned into a grammar: {error}") from None


def settings_json(sampling: SamplingParams, more: Mapping[str, Any], brief: bool = False) -> dict[str, Any]:
    """`generation_settings` in llama-server's order; `brief` is the form of /slots and /props. `more` has the rest's values."""
    out: dict[str, Any] = {
        "seed": sampling.seed,
        "temperature": sampling.temperature,
        "dynatemp_range": sampling.dynatemp_range,
        "dynatemp_exponent": sampling.dynatemp_exponent,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "top_n_sigma": sampling.top_n_sigma,
        "xtc_probability": sampling.xtc_probability,
        "xtc_threshold": sampling.xtc_threshold,
        "typical_p": sampling.typical_p,
        "repeat_last_n": sampling.repeat_last_n,
        "repeat_penalty": sampling.repeat_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "dry_multiplier": sampling.dry_multiplier,
        "dry_base": sampling.dry_base,
        "dry_allowed_length": sampling.dry_allowed_length,
        "dry_penalty_last_n": sampling.dry_penalty_last_n,
        "dry_sequence_breakers": list(sampling.dry_sequence_breakers),
        "mirostat": sampling.mirostat,
        "mirostat_tau": sampling.mirostat_tau,
        "mirostat_eta": sampling.mirostat_eta,
        "adaptive_target": sampling.adaptive_target,
        "adaptive_decay": sampling.adaptive_decay,
        "stop": list(more.get("stop", ())),
        "max_tokens": more.get("n_predict", -1),
        "n_predict": more.get("n_predict", -1),
        "n_keep": more.get("n_keep", 0),
        "n_discard": more.get("n_discard", 0),
        "ignore_eos": sampling.ignore_eos,
        "stream": more.get("stream", False),
        "logit_bias": [{"bias": bias, "token": token} for token, bias in sampling.logit_bias],
        "n_probs": sampling.n_probs,
        "min_keep": sampling.min_keep,
        "grammar": sampling.grammar,
        "grammar_lazy": False,
        "grammar_triggers": [],
        "preserved_tokens": sorted(more.get("preserved_tokens", ())),
        "chat_format": "Content-only",
        "reasoning_format": "none",
        "reasoning_in_content": False,
        "generation_prompt": more.get("generation_prompt", ""),
        "samplers": list(sampling.samplers),
        "speculative.types": more.get("speculative_types", "none"),
        "timings_per_token": more.get("timings_per_token", False),
        "post_sampling_probs": sampling.post_sampling_probs,
        "backend_sampling": False,
        "lora": [],
    }
    if brief:
        for name in _NOT_BRIEF:
            del out[name]
    return out


_NOT_BRIEF = (
    "dry_sequence_breakers", "stop", "logit_bias", "grammar", "grammar_lazy", "grammar_triggers", "preserved_tokens",
)  # fmt: skip
