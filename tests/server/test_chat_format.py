"""Templates and schemas through llama_cpp: what a template can do is found out, and messages are put into that form."""

from __future__ import annotations

import pytest

from llamamg.server.chat_format import ChatFormat

pytestmark = pytest.mark.usefixtures("library")

PLAIN = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{% if add_generation_prompt %}[assistant:{% endif %}"
RICH = (
    "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}{{ m.reasoning_content }}/{% endif %}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}|{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({% for k in c.function.arguments %}{{ k }}{% endfor %}){% endfor %}"
    "{% endfor %}{% if reasoning_effort %}effort {{ reasoning_effort }}{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)


def test_capabilities_are_found_by_rendering() -> None:
    plain, rich = ChatFormat(PLAIN, "", "").caps, ChatFormat(RICH, "", "").caps
    assert {name for name, has in plain.items() if has} == {"supports_string_content", "supports_system_role"}
    assert all(rich.values())
    assert not ChatFormat(NO_SYSTEM, "", "").caps["supports_system_role"]


def test_typed_content_is_joined_for_templates_that_want_text() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert ChatFormat(PLAIN, "", "").render(messages) == "[user:a\nb][assistant:"
    assert ChatFormat(RICH, "", "").render(messages) == "<user>a|b|"


def test_arguments_become_objects_for_templates_that_iterate_them() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": 1}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert ChatFormat(RICH, "", "").render(messages) == "<assistant>f(city)"


def test_arguments_that_are_no_json_are_an_error_that_says_whose() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Par'}}
    with pytest.raises(ValueError, match="call of 'f' are not JSON"):
        ChatFormat(RICH, "", "").render([{"role": "assistant", "content": None, "tool_calls": [call]}])


def test_a_message_that_only_calls_has_no_text() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    strict = "{% for m in messages %}{{ '[' + m['role'] + ':' + m['content'] + ']' }}{% endfor %}"
    for message in ({"content": None}, {}):  # OpenAI's clients leave the content out
        messages = [{"role": "assistant", "tool_calls": [call], **message}, {"role": "tool", "content": "ok"}]
        assert ChatFormat(strict, "", "").render(messages) == "[assistant:][tool:ok]"


def test_generation_prompt_tools_and_arguments_reach_the_template() -> None:
    user = [{"role": "user", "content": "hi"}]
    assert ChatFormat(PLAIN, "", "").render(user, add_generation_prompt=False) == "[user:hi]"
    tools = [{"type": "function", "function": {"name": "weather"}}]
    assert "weather" in ChatFormat(RICH, "", "").render(user, tools)
    assert ChatFormat(RICH, "", "").render(user, kwargs={"reasoning_effort": "low"}).endswith("effort low")


def test_refusal_of_a_template_is_an_error() -> None:
    with pytest.raises(ValueError, match="no system role here"):
        ChatFormat(NO_SYSTEM, "", "").render([{"role": "system", "content": "x"}])


def test_model_without_a_template_gets_chatml() -> None:
    text = ChatFormat(None, "", "<|im_end|>").render([{"role": "user", "content": "hi"}])
    assert "<|im_start|>user\nhi<|im_end|>" in text
