"""Several contexts of a real model under random arrivals, cancels and moves: the same bits as one call after the other,
and the texts that each request has alone.

LLAMAMG_STRESS_S=120 makes each round last so long.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llamamg import contexts, handover, paths
from llamamg import library as native_library
from llamamg.config import Config, ContextConfig, ModelConfig
from llamamg.facts import has_patch
from llamamg.model import describe, load_model
from llamamg.replay import decode, read_logits
from llamamg.replay_alone import Alone, other_cuts, still_there
from llamamg.request import Finished, FinishReason
from llamamg.vocab import Vocabulary

from .context_tape import Tape, random_requests, restless

STRESS_S = float(os.environ.get("LLAMAMG_STRESS_S", "0"))
N_SLOTS = 5
OPTIONS: dict[str, Any] = {
    "n_ctx": N_SLOTS * 512,
    "n_parallel": N_SLOTS,
    "n_threads": 1,
    "n_batch": 128,
    "n_ubatch": 64,
}
RPC = tuple(os.environ.get("LLAMAMG_TEST_RPC", "").split(",")) if os.environ.get("LLAMAMG_TEST_RPC") else ()


def stress(
    live: Any, path: Path, seed: int, n_least: int = 1, **options: Any
) -> tuple[Any, Tape, list[Any], list[Any]]:
    """Run a round of `n_least` tokens: the engine, what was recorded, requests that were answered, and their answers."""
    rng = random.Random(seed)
    made = live(path, start=False, plugins=(restless(rng),), rpc=RPC, **OPTIONS, **options)
    tape = Tape(made.engine)
    made.engine.start()
    requests: list[Any] = []
    cancelled = set()
    end = time.monotonic() + STRESS_S
    while (
        sum(request.n_predict for request in requests if request.id not in cancelled) < n_least
        or time.monotonic() < end
    ):
        for request in random_requests(rng, 16):
            requests.append(request)
            made.engine.submit(request)
            time.sleep(rng.choice((0.0, 0.005, 0.05)))
            if rng.random() < 0.15:
                gone = rng.choice(requests)
                made.engine.cancel(gone.id)
                cancelled.add(gone.id)
    kept = [request for request in requests if request.id not in cancelled]
    answers = [made.last(request) for request in kept]
    kept.append(next(request for request in random_requests(rng, 64) if request.n_predict == 20))
    made.engine.submit(kept[-1])  # with nobody else there
    answers.append(made.last(kept[-1]))
    made.engine.call(lambda engine: None).result(30)
    deadline = time.monotonic() + 30
    while made.engine.runner.n_in_flight or made.engine.scheduler.moves.wanted:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    slots = made.engine.slots
    assert not any(slot.busy or slot.seq_id != slot.home for slot in slots)
    assert sorted(slot.home for slot in slots) == list(range(N_SLOTS))
    assert made.engine.error is None
    assert not [view for view in made.engine.plugins.views() if view.quarantined]
    for answer in answers:
        assert isinstance(answer, Finished), answer
        assert answer.reason is FinishReason.LIMIT
    return made, tape, kept, answers


def check_alone(path: Path, requests: list[Any], answers: list[Any]) -> tuple[int, int]:
    """Each text, one request at a time in one context: positions compared and ties. Anything else fails.

    A model may change its mind when a prompt is cut into other batches, so a miss is asked for again in other cuts.
    """
    lib = native_library.load()
    model = load_model(lib, ModelConfig(path))
    vocab = Vocabulary(lib.llama, model)
    info = describe(lib, model, path, vocab.n_vocab, vocab.type, None)
    config = Config(ModelConfig(path), ContextConfig(**OPTIONS | {"n_parallel": 1, "n_ctx": 512}, warmup=False))
    made = contexts.make(lib, model, config, info, vocab)
    n = n_ties = 0
    missed = []
    never = np.array(vocab.eog_tokens(), np.int32)

    def differences(request: Any, answer: Any, cut: int) -> list[Any]:
        made.kv.clear()
        given = np.array(answer.tokens, np.int32)
        one = Alone(lib.llama, made.runner.context, 0, request.prompt, given, vocab.n_vocab)
        found = []
        while one.n_left > 0:
            found += [d for d in one.compare(cut, request.id, never) if d is not None]
        return found

    for request, answer in zip(requests, answers, strict=True):
        found = differences(request, answer, 64)
        left = [d for d in found if not d.tie]
        for cut in other_cuts(len(request.prompt)):
            if left:
                left = still_there(left, differences(request, answer, cut))
        n += len(answer.tokens)
        n_ties += len(found) - len(left)
        missed += left
    made.runner.close()
    lib.llama.llama_model_free(model)
    # The random model does so in one context too: 3 of 4669 tokens, up to 1.05 nats behind; here 3 of 5170.
    # Over rpc-servers 3 of 989 and 3 of 1118; tokens of a wrong state come from 12 to 15 nats behind.
    assert len(missed) <= max(4, n // 250), missed
    assert all(d.behind < 3.0 for d in missed), missed
    return n, n_ties + len(missed)


LAYOUTS = [{"n_groups": 3, "n_prefill_slots": 0}, {"n_groups": 2, "n_prefill_slots": 2, "n_ubatch_decode": 8}]


@pytest.mark.parametrize("options", LAYOUTS, ids=["groups", "groups and prompts"])
@pytest.mark.parametrize("model", ["micro", "smol"])
@pytest.mark.parametrize("way", ["best", "host", "alone"])
def test_stress(
    live: Callable[..., Any],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    model: str,
    way: str,
) -> None:
    """`alone`: a batch with no other one in flight is computed on the engine's thread, as on GPUs."""
    lib = native_library.load()
    holders = [SimpleNamespace(asynchronous=True)] if way == "alone" else []
    monkeypatch.setattr(contexts, "only_gpus", lambda *_: holders)
    if way == "best" and isinstance(handover.best(lib.mg), handover.ThroughHost):
        pytest.skip("this library moves sequences through the host only")
    if way == "host":
        monkeypatch.setattr(handover, "best", lambda mg: handover.ThroughHost())
    path = request.getfixturevalue(f"{model}_model")
    # The micro model ties at about 3 % of its tokens: a short round would be too small a sample for the bar below.
    n_least = 1100 if model == "micro" else 1
    made, tape, requests, answers = stress(live, path, len(str(options)), n_least, **options)
    assert made.engine.runner.n_alone > 0 if way == "alone" else made.engine.runner.n_alone == 0
    n_moved, n_overlaps = made.engine.stats.n_hand_overs, sum(call[0] == "decode" for call in tape.calls)
    assert n_moved >= 3
    assert n_overlaps >= 20
    config = made.engine.config
    made.engine.stop(0.0)

    # An rpc-server computes with weights as the file has them, so the CPU must not have them in another order either.
    on_cpu = replace(config.model, rpc=(), devices=(), n_gpu_layers=0, repack=False)
    for where in (config.model, on_cpu) if RPC else (config.model,):
        handle = load_model(lib, where)
        again = contexts.make(lib, handle, replace(config, model=where), made.engine.model, made.engine.vocab)
        pairs = list(tape.play(again))
        again.runner.close()
        lib.llama.llama_model_free(handle)
        assert sum(then != now for then, now in pairs) == 0
    assert len(pairs) >= sum(len(answer.tokens) for answer in answers)

    n, n_ties = check_alone(path, requests, answers)
    print(
        f"{model}: {len(pairs)} logits rows equal, {n_moved} moves, {made.engine.runner.n_alone} alone, {n} tokens of "
        f"{len(answers)} texts, {n_ties} ties"
    )
    assert n_ties <= 0.05 * n, f"{n_ties} of {n} tokens"


def test_stress_on_the_unpatched_library() -> None:
    folder = paths.build("upstream") / "bin"
    if not (folder / "libllamamg.so").is_file():
        pytest.skip("the unpatched build is missing: run `llamamg build --upstream`")
    if native_library.load().dir == folder.resolve():
        pytest.skip("it is the one under test")
    environment = {**os.environ, "LLAMAMG_BUILD": str(folder), "LLAMAMG_STRESS_S": "0"}
    environment.pop("LLAMA_CPP_LIB_PATH", None)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        __file__,
        "-k",
        "host and micro",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "2 passed" in done.stdout


def test_stress_over_two_rpc_servers() -> None:
    """In a process of its own: what is registered as a device stays one."""
    native_library.load()
    if not has_patch(contexts.SHARED_RPC):
        pytest.skip("with this library contexts get each other's results")
    program = paths.build("upstream") / "bin" / "ggml-rpc-server"
    if not program.is_file():
        pytest.skip("there is no rpc-server: run `llamamg build --upstream --server`")
    ports = [free_port() for _ in range(2)]
    servers = [
        subprocess.Popen([program, "-p", str(port), "-t", "1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for port in ports
    ]
    try:
        for port in ports:
            wait_for(port)
        environment = {**os.environ, "LLAMAMG_TEST_RPC": ",".join(f"127.0.0.1:{port}" for port in ports)}
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", __file__]
        on_device = not isinstance(handover.best(native_library.load().mg), handover.ThroughHost)
        command += ["-k", f"test_stress and {'best' if on_device else 'host'} and micro and prompts"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
        assert "1 passed" in done.stdout
    finally:
        for server in servers:
            server.kill()
            server.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(port: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise AssertionError("the rpc-server does not listen")


def test_replays_without_plugins_work_with_groups(live: Callable[..., Any], micro_model: Path) -> None:
    """The sequence of idle replays lies in the first context, and its promise is kept by a plugin that overlaps batches."""
    plugins = (restless(random.Random(3)),)
    made = live(
        micro_model, plugins=plugins, guard_replay=1, n_groups=2, n_prefill_slots=1, n_ubatch_decode=8, **OPTIONS
    )
    requests = random_requests(random.Random(5), 6)
    made.ask(*requests)
    assert made.engine.shadow is not None
    deadline = time.monotonic() + 60
    while made.engine.plugins.guard_counts("restless").n_replays + sum(made.engine.shadow.skipped.values()) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert made.engine.error is None


@pytest.mark.parametrize("model", ["micro", "smol"])
def test_what_was_saved_in_one_context_is_restored_in_another(request: pytest.FixtureRequest, model: str) -> None:
    """The next token's logits have the same bits there."""
    path = request.getfixturevalue(f"{model}_model")
    lib = native_library.load()
    handle = load_model(lib, ModelConfig(path))
    vocab = Vocabulary(lib.llama, handle)
    info = describe(lib, handle, path, vocab.n_vocab, vocab.type, None)
    context = ContextConfig(n_ctx=3 * 512, n_parallel=3, n_groups=2, n_threads=1, warmup=False)
    made = contexts.make(lib, handle, Config(ModelConfig(path), context), info, vocab)
    one, other = made.pointers
    tokens = [int(t) for t in np.random.default_rng(4).integers(1000, 5000, 41)]
    decode(lib.llama, one, [[1, 0, 1, tokens[:40]]])
    whole, part = made.kv.save(1, 0), made.kv.save(1)
    assert whole is not None
    assert part is not None
    decode(lib.llama, one, [[1, 40, 1, tokens[40:]]])
    then = read_logits(lib.llama, one, [[1, 40, 1, tokens[40:]]], vocab.n_vocab)
    assert made.kv.restore(2, whole, 0)
    assert made.kv.pos_max(2) == 39
    if info.is_hybrid:
        assert made.kv.restore(2, part)
    decode(lib.llama, other, [[0, 40, 1, tokens[40:]]])
    now = read_logits(lib.llama, other, [[0, 40, 1, tokens[40:]]], vocab.n_vocab)
    assert np.array_equal(then, now)
    assert not made.kv.restore(2, whole[:100], 0)
    made.runner.close()
    lib.llama.llama_model_free(handle)


def test_stop_with_batches_in_flight(live: Callable[..., Any], micro_model: Path) -> None:
    made = live(micro_model, plugins=(restless(random.Random(1)),), n_groups=3, **OPTIONS)
    requests = random_requests(random.Random(2), 8)
    for request in requests:
        request.n_predict = 300
        made.engine.submit(request)
    made.wait(lambda: made.engine.stats.n_predicted > 10)
    threads = [worker.thread for worker in made.engine.runner._workers]
    made.engine.stop(0.0)
    assert not made.engine.alive
    assert made.engine.error is None
    assert not any(thread.is_alive() for thread in threads)
    for request in requests:
        assert len([e for e in made.of(request) if type(e).__name__ in ("Finished", "Failed")]) == 1
