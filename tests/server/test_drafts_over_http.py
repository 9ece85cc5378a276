"""Drafts as a client sees them: never, but in the numbers. A real model over HTTP, every draft verified at its full width."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Running, read_events, running

from llamamg import loading
from llamamg.config import Config, ContextConfig, ModelConfig, PluginsConfig, ServerConfig
from llamamg.plugins import PluginSet

SENTENCES = (
    "The river rises in the hills north of the town. It flows past the old mill, under the stone bridge, and through the "
    "market square before it turns west towards the sea. "
)
PROMPT = 3 * SENTENCES + "The river rises in"
BODY = {"prompt": PROMPT, "n_predict": 40, "temperature": 0, "ignore_eos": True, "return_tokens": True}
MARGIN = 0.5  # nats: where answers part, the token that came must be this near to the best one (docs/guards.md)
METRICS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


@pytest.fixture(scope="module")
def server(library: object, smol_model: Path) -> Iterator[Running]:
    options = {"type": "suffix", "always": "on", "draft-n-max": "7"}
    plugins = PluginsConfig(enable=("spec",), only=True, options={"spec": options})
    context = ContextConfig(n_ctx=1024, n_parallel=2, n_batch=128, n_ubatch=64, n_threads=1, n_threads_batch=1)
    config = Config(
        ModelConfig(smol_model),
        context=context,
        server=ServerConfig(port=0, endpoint_metrics=True, endpoint_slots=True),
        plugins=plugins,
    )
    engine = loading.load(config, PluginSet.discover(plugins))
    with running(engine, engine.config) as found:
        yield found


def toggle(server: Running, on: bool) -> None:
    assert server.client.patch("/plugins/spec", json={"enabled": on}).status_code == 200


def report(server: Running) -> dict[str, Any]:
    found = next(view for view in server.client.get("/plugins").json() if view["name"] == "spec")
    assert found["quarantined"] is None
    return dict(found["report"])


def counters(server: Running) -> dict[str, float]:
    lines = server.client.get("/metrics").text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def without(server: Running, body: dict[str, Any]) -> dict[str, Any]:
    """The answer while drafts are off, with the other tokens it could have had."""
    toggle(server, False)
    answer = server.post("/completion", {"n_probs": 4, **body}).json()
    toggle(server, True)
    assert "draft_n" not in answer["timings"]
    return dict(answer)


def check_same(off: dict[str, Any], tokens: list[int]) -> bool:
    """Whether all tokens are equal; where not, it must be a tie, which is told."""
    at = next((i for i, (x, y) in enumerate(zip(off["tokens"], tokens, strict=False)) if x != y), None)
    if at is None:
        assert len(tokens) == len(off["tokens"])
        return True
    probs = off["completion_probabilities"][at]
    behind = probs["logprob"] - {top["id"]: top["logprob"] for top in probs["top_logprobs"]}[tokens[at]]
    print(f"parted at token {at}, the one that came is {behind:.3f} nats behind")
    assert behind < MARGIN
    return False


def test_what_is_told_of_drafts(server: Running) -> None:
    off = without(server, BODY)
    before, metrics = report(server), counters(server)
    on = server.post("/completion", BODY).json()
    check_same(off, on["tokens"])
    after, now = report(server), counters(server)
    drafted, accepted = on["timings"]["draft_n"], on["timings"]["draft_n_accepted"]
    assert drafted >= accepted > 10
    assert (after["drafted"] - before["drafted"], after["accepted"] - before["accepted"]) == (drafted, accepted)
    n_drafts, n_drafted, n_accepted = (
        now[f"llamacpp:spec_decode_{name}_total"] - metrics[f"llamacpp:spec_decode_{name}_total"] for name in METRICS
    )
    assert (n_drafts, n_drafted, n_accepted) == (after["drafts"] - before["drafts"], drafted, accepted)
    assert now["llamacpp:tokens_predicted_total"] - metrics["llamacpp:tokens_predicted_total"] == 40
    assert now["llamacpp:n_decode_total"] - metrics["llamacpp:n_decode_total"] <= 42 - accepted
    per_position = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"
    assert [now[f'{per_position}{{position="{i}"}}'] for i in range(7)] == after["accepted_per_position"]
    assert now['llamamg:plugin_effect_total{plugin="spec"}'] == after["accepted"]
    assert on["generation_settings"]["speculative.types"] == "none,suffix"  # as llama-server writes it
    assert off["generation_settings"]["speculative.types"] == "none"


def told(server: Running) -> tuple[str, set[bool]]:
    """What /props and /slots say of drafts."""
    params = server.client.get("/props").json()["default_generation_settings"]["params"]
    return params["speculative.types"], {slot["speculative"] for slot in server.client.get("/slots").json()}


def test_a_toggle_changes_what_is_told(server: Running) -> None:
    assert told(server) == ("none,suffix", {True})
    toggle(server, False)
    assert told(server) == ("none", {False})
    toggle(server, True)
    assert told(server) == ("none,suffix", {True})


def test_a_slot_tells_of_the_kind_its_request_had(server: Running) -> None:
    server.post("/completion", {**BODY, "id_slot": 0})
    assert server.client.get("/slots").json()[0]["params"]["speculative.types"] == "none,suffix"


@pytest.mark.parametrize("n_predict", [0, 1, 2, 3])
def test_answers_too_short_for_a_draft(server: Running, n_predict: int) -> None:
    body = {**BODY, "n_predict": n_predict}
    off = without(server, body)
    on = server.post("/completion", body).json()
    assert on["tokens_predicted"] == off["tokens_predicted"] == max(1, n_predict)
    check_same(off, on["tokens"])


@pytest.mark.parametrize("stop", ["old mill", "town. It flows past", "the hills north of the", "."])
def test_a_stop_string_inside_a_draft_never_leaks(server: Running, stop: str) -> None:
    body = {**BODY, "stop": [stop]}
    off = without(server, body)
    assert off["stopping_word"] == stop
    whole = server.post("/completion", body).json()
    events = server.events("/completion", body)
    if check_same(off, whole["tokens"]):
        assert (whole["content"], whole["stopping_word"]) == (off["content"], stop)
    assert "".join(event["content"] for event in events) == whole["content"]
    assert events[-1]["stopping_word"] == whole["stopping_word"]
    assert stop not in whole["content"]


@pytest.mark.parametrize("stream", [False, True])
def test_each_token_has_its_probabilities(server: Running, stream: bool) -> None:
    body = {**BODY, "n_probs": 3}
    off = without(server, body)
    before = report(server)["accepted"]
    if stream:
        events = server.events("/completion", body)
        probs = [prob for event in events for prob in event.get("completion_probabilities", [])]
        tokens = [token for event in events for token in event["tokens"]]
        assert any(len(event.get("completion_probabilities", [])) > 1 for event in events)
    else:
        answer = server.post("/completion", body).json()
        probs, tokens = answer["completion_probabilities"], answer["tokens"]
    assert report(server)["accepted"] > before
    assert [prob["id"] for prob in probs] == tokens
    assert all(len(prob["top_logprobs"]) == 3 for prob in probs)
    if check_same(off, tokens):
        ours, theirs = ([prob["logprob"] for prob in each] for each in (probs, off["completion_probabilities"]))
        assert ours == pytest.approx(theirs, abs=0.05)


def test_chat_logprobs_with_drafts(server: Running) -> None:
    body = {
        "messages": [{"role": "user", "content": f"Say this again, word by word: {SENTENCES}"}],
        "max_tokens": 30,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = server.post("/v1/chat/completions", body).json()["choices"][0]
    events = [event for event in server.events("/v1/chat/completions", body) if event != "[DONE]"]
    choices = [event["choices"][0] for event in events if event["choices"]]
    content = [prob for choice in choices if choice.get("logprobs") for prob in choice["logprobs"]["content"]]
    assert [prob["token"] for prob in content] == [prob["token"] for prob in whole["logprobs"]["content"]]
    said = b"".join(bytes(prob["bytes"]) for prob in content).decode()
    assert said.startswith(whole["message"]["content"])


def test_post_sampling_probabilities_come_without_drafts(server: Running) -> None:
    answer = server.post("/completion", {**BODY, "n_probs": 2, "post_sampling_probs": True}).json()
    assert "draft_n" not in answer["timings"]
    assert len(answer["completion_probabilities"]) == len(answer["tokens"]) == 40


def test_switched_under_load_the_answers_stay(server: Running) -> None:
    """On and off all the time, while two clients read and others leave in the middle."""
    body = {**BODY, "n_predict": 80}
    off = without(server, body)
    over, parted = threading.Event(), []

    def switch() -> None:
        on = False
        while not over.wait(0.03):
            toggle(server, on)
            on = not on
        toggle(server, True)

    def leave() -> None:
        while not over.is_set():
            with server.client.stream("POST", "/completion", json={**body, "stream": True}) as response:
                for _, _ in zip(range(3), read_events(response), strict=False):
                    pass

    threads = [threading.Thread(target=target) for target in (switch, leave)]
    for thread in threads:
        thread.start()
    before = report(server)["accepted"]
    try:
        for i in range(5):
            answer = server.post("/completion", {**body, "cache_prompt": i % 2 == 0}).json()
            parted.append(not check_same(off, answer["tokens"]))
    finally:
        over.set()
        for thread in threads:
            thread.join(30)
    print(f"near ties: {sum(parted)} of {len(parted)} answers")
    assert report(server)["accepted"] > before
