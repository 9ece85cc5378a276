"""From a body to what the engine gets: sampling, limits, prompts."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from fake_engine import FakeVocab, fake_context

from llamamg.config import GenerationConfig
from llamamg.request import SamplingParams
from llamamg.server.errors import ApiError
from llamamg.server.prepare import Kind, PrepareContext, Prepared, prepare


def ready(body: dict[str, Any], kind: Kind = "completion", context: PrepareContext | None = None) -> Prepared:
    return prepare(kind, json.dumps({"prompt": "a", **body}).encode(), context or fake_context())


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("kpt", ("top_k", "top_p", "temperature")),
        (["top-k", "min_p", "temp"], ("top_k", "min_p", "temperature")),
        (["typical_p", "typical"], ("typ_p", "typ_p")),
        (["magic"], None),
        ([], ()),
    ],
)
def test_samplers(given: Any, names: tuple[str, ...] | None) -> None:
    if names is None:
        with pytest.raises(ApiError, match="samplers"):
            ready({"samplers": given})
    else:
        assert ready({"samplers": given}).sampling.samplers == names


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([[5, 1.5], [6, False], ["ab", -1]], ((5, 1.5), (6, -math.inf), (97, -1.0), (98, -1.0))),
        ({"7": 2, "x": False}, ((7, 2.0), (120, -math.inf))),
        ([[999, 1.0], [-1, 1.0], [5], "x", [5, "much"], [5, True]], ()),
        ([], ()),
    ],
)
def test_logit_bias(given: Any, expected: tuple[tuple[int, float], ...]) -> None:
    assert ready({"logit_bias": given}).sampling.logit_bias == expected


def test_defaults_are_the_command_lines() -> None:
    sampling = SamplingParams(temperature=0.3, seed=7, top_k=9)
    context = fake_context(generation=GenerationConfig(sampling=sampling, n_predict=33, n_keep=4, cache_prompt=False))
    prepared = ready({"top_k": None, "temperature": 0}, context=context)
    assert prepared.sampling == dataclasses.replace(sampling, temperature=0.0)
    assert (prepared.limits["n_predict"], prepared.limits["n_keep"], prepared.limits["cache_prompt"]) == (33, 4, False)


def test_stop_is_a_list_without_empty_strings() -> None:
    assert ready({"stop": "x"}).limits["stop"] == ("x",)
    assert ready({"stop": ["x", "", "y"]}).limits["stop"] == ("x", "y")
    assert ready({"stop": "x", "messages": [{"role": "user", "content": "a"}]}, "chat").limits["stop"] == ("x",)
    with pytest.raises(ApiError, match="stop"):
        ready({"stop": ["x", 1]})


class BosVocab(FakeVocab):
    """Puts <|im_start|> before every prompt."""

    add_bos, bos, bos_piece = True, 256, "<|im_start|>"

    def tokenize(self, text: str | bytes, add_special: bool, parse_special: bool) -> Any:
        data = text.encode() if isinstance(text, str) else text
        return super().tokenize((b"<|im_start|>" if add_special else b"") + data, False, True)


def test_bos_comes_once() -> None:
    context = dataclasses.replace(fake_context(), vocab=BosVocab())
    text = ready({"prompt": "ab"}, context=context).prompts[0]
    assert text.array().tolist() == [256, 97, 98]
    assert json.loads(text.echo) == "<|im_start|>ab"
    assert ready({"prompt": ["ab", "c"]}, context=context).prompts[1].array().tolist() == [256, 99]
    assert ready({"prompt": [97, "b"]}, context=context).prompts[0].array().tolist() == [97, 98]
    chat = ready({"messages": [{"role": "user", "content": "a"}]}, "chat", context).prompts[0].array().tolist()
    assert chat[0] == 256
    assert chat[1] != 256


def test_last_user_message_starts_where_its_text_does() -> None:
    messages = [{"role": role, "content": "text"} for role in ("user", "assistant", "user")]
    (prompt,) = ready({"messages": messages}, "chat").prompts
    (start,) = prompt.user_starts
    assert FakeVocab().detokenize(prompt.array()[start:]).startswith("<|im_start|>user\ntext")
    assert ready({"messages": messages[:1]}, "chat").prompts[0].user_starts == ()


def test_assistant_message_at_the_end_is_continued() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Sure,"}]
    (prompt,) = ready({"messages": messages}, "chat").prompts
    assert FakeVocab().detokenize(prompt.array()).endswith("<|im_start|>assistant\nSure,")


def test_prompt_text_is_rendered_only_where_it_is_shown() -> None:
    assert ready({}).prompts[0].echo == b'"a"'
    assert ready({}, "oai_completion").prompts[0].echo == b""
    assert ready({"verbose": True}, "oai_completion").prompts[0].echo == b'"a"'


def test_tools_need_jinja() -> None:
    context = fake_context(generation=GenerationConfig(jinja=False))
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(ApiError, match="--jinja"):
        ready({"messages": [{"role": "user", "content": "a"}], "tools": tools}, "chat", context)
