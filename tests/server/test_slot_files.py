"""POST /slots/ID?action=… over the real engine with a stand-in model, and with real models."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness import Running, running

from llamamg import loading
from llamamg.blocks import BlockLayout
from llamamg.config import Config, ContextConfig, ModelConfig, PluginsConfig, ServerConfig
from llamamg.library import Library
from llamamg.plugins import PluginSet
from llamamg.statefile import StateFile
from llamamg.testing import FakeCells, FakeVocabulary, fake_engine

PROMPT = "The quick brown fox jumps over the lazy dog. " * 12
Make = Callable[..., Running]


def by_history(sequence: Any, so_far: list[int]) -> int:
    return 32 + sum(i * token for i, token in enumerate(so_far, 1)) % 95


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """`make(hybrid=False, n_ctx_slot=2048)`: a server whose slots are kept in tmp_path/slots."""
    (tmp_path / "slots").mkdir()
    (tmp_path / "m.gguf").write_bytes(b"weights" * 1000)
    open_: list[Any] = []

    def start(**options: Any) -> Running:
        server = ServerConfig(port=0, slot_save_path=tmp_path / "slots", timeout_s=5.0)
        model = ModelConfig(options.pop("model", tmp_path / "m.gguf"))
        config = Config(model, server=server, plugins=PluginsConfig(none=True))
        engine, _, _ = fake_engine(
            2, n_ctx_slot=options.pop("n_ctx_slot", 2048), config=config, next_token=by_history, **options
        )
        from fake_engine import fake_context

        context = fake_context(engine.n_ctx_slot, 2, config.generation)
        context = replace(context, vocab=FakeVocabulary())
        block = running(engine, engine.config, context=context)
        open_.append(block)
        return block.__enter__()

    yield start
    for block in open_:
        block.__exit__(None, None, None)


def complete(server: Running, prompt: str, **more: Any) -> dict[str, Any]:
    answer = server.post("/completion", {"prompt": prompt, "n_predict": 8, "temperature": 0, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def act(server: Running, id_slot: int | str, action: str, name: Any = None) -> Any:
    return server.post(f"/slots/{id_slot}?action={action}", {} if name is None else {"filename": name})


@pytest.mark.parametrize("hybrid", [False, True])
def test_saved_restored_erased(make: Make, tmp_path: Path, hybrid: bool) -> None:
    server = make(hybrid=hybrid)
    first = complete(server, PROMPT, id_slot=0)
    n = first["tokens_cached"]
    saved = act(server, 0, "save", "a.bin").json()
    size = (tmp_path / "slots" / "a.bin").stat().st_size
    assert set(saved.pop("timings")) == {"save_ms"}
    assert saved == {"id_slot": 0, "filename": "a.bin", "n_saved": n, "n_written": size}
    assert act(server, 0, "erase").json() == {"id_slot": 0, "n_erased": n}
    restored = act(server, 1, "restore", "a.bin").json()
    assert set(restored.pop("timings")) == {"restore_ms"}
    assert restored == {"id_slot": 1, "filename": "a.bin", "n_restored": n, "n_read": size}
    follow_up = PROMPT + first["content"][:-1]
    again = complete(server, follow_up + " And then", id_slot=1)
    assert again["timings"]["cache_n"] == n
    assert again["content"] == complete(make(hybrid=hybrid), follow_up + " And then")["content"]


def test_after_a_restart(make: Make) -> None:
    first = complete(make(), PROMPT, id_slot=0)
    before = make()
    complete(before, PROMPT, id_slot=0)
    assert act(before, 0, "save", "a.bin").status_code == 200
    after = make()
    assert act(after, 1, "restore", "a.bin").status_code == 200
    again = complete(after, PROMPT, id_slot=1)
    assert again["content"] == first["content"]
    assert again["timings"]["cache_n"] == len(PROMPT) - 1


def test_an_empty_slot(make: Make) -> None:
    server = make()
    assert act(server, 0, "save", "empty").json()["n_saved"] == 0
    assert act(server, 1, "restore", "empty").json()["n_restored"] == 0
    assert act(server, 1, "erase").json() == {"id_slot": 1, "n_erased": 0}


@pytest.mark.parametrize(
    ("path", "body", "code", "words"),
    [
        ("/slots/0?action=save", {"filename": "../a"}, 400, "Invalid filename"),
        ("/slots/0?action=restore", {"filename": "../a"}, 400, "Invalid filename"),
        ("/slots/0?action=save", {"filename": 5}, 400, "Invalid filename"),
        ("/slots/0?action=save", {}, 400, "Invalid filename"),
        ("/slots/0?action=restore", {"filename": "none"}, 400, "there is no file 'none'"),
        ("/slots/0?action=copy", {"filename": "a"}, 400, "Invalid action"),
        ("/slots/0", {"filename": "a"}, 400, "Invalid action"),
        ("/slots/9?action=save", {"filename": "a"}, 400, "Invalid slot ID"),
        ("/slots/x?action=erase", {}, 400, "Invalid slot ID"),
        ("/slots/%D9%A1?action=erase", {}, 400, "Invalid slot ID"),  # a digit in another script
        (f"/slots/{'9' * 5000}?action=erase", {}, 400, "Invalid slot ID"),
    ],
)
def test_what_is_wrong_is_said(make: Make, path: str, body: dict[str, Any], code: int, words: str) -> None:
    answer = make().post(path, body)
    assert answer.status_code == code
    assert words in answer.json()["error"]["message"]


def test_what_a_killed_server_left_is_removed(make: Make, tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    (tmp_path / "slots" / f".a.bin.{child.pid}.part").touch()
    make()
    assert list((tmp_path / "slots").iterdir()) == []


def damaged(data: bytes, how: str) -> bytes:
    if how == "cut off":
        return data[: len(data) // 2]
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 4
    return bytes(flipped)


@pytest.mark.parametrize("how", ["cut off", "damaged"])
def test_a_bad_file_leaves_the_slot_and_the_server_alone(make: Make, tmp_path: Path, how: str) -> None:
    server = make()
    first = complete(server, PROMPT, id_slot=0)
    act(server, 0, "save", "a.bin")
    path = tmp_path / "slots" / "a.bin"
    path.write_bytes(damaged(path.read_bytes(), how))
    answer = act(server, 0, "restore", "a.bin")
    assert answer.status_code == 400
    assert how in answer.json()["error"]["message"]
    again = complete(server, PROMPT, id_slot=0)
    assert again["content"] == first["content"]
    assert again["timings"]["cache_n"] == len(PROMPT) - 1


def test_another_model_another_context(make: Make, tmp_path: Path) -> None:
    server = make()
    complete(server, PROMPT, id_slot=0)
    act(server, 0, "save", "a.bin")
    (tmp_path / "other.gguf").write_bytes(b"others!" * 1000)
    answer = act(make(model=tmp_path / "other.gguf"), 0, "restore", "a.bin")
    assert answer.status_code == 400
    assert "another model" in answer.json()["error"]["message"]
    answer = act(make(n_ctx_slot=256), 0, "restore", "a.bin")
    assert answer.status_code == 400
    assert "has room for 256" in answer.json()["error"]["message"]


def test_other_cache_types_and_an_older_format(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = make()
    complete(server, PROMPT, id_slot=0)
    act(server, 0, "save", "a.bin")
    cells = server.engine.cells
    assert isinstance(cells, FakeCells)
    planes = cells.layout.planes
    cells.layout = BlockLayout(((8, 4, 1),))
    answer = act(server, 1, "restore", "a.bin")
    assert answer.status_code == 400
    assert "other cache types (-ctk, -ctv)" in answer.json()["error"]["message"]
    cells.layout = BlockLayout(planes)
    path = tmp_path / "slots" / "a.bin"
    path.write_bytes(path.read_bytes()[:8] + (0).to_bytes(4, "little") + path.read_bytes()[12:])
    answer = act(server, 1, "restore", "a.bin")
    assert answer.status_code == 400
    assert "version 0 of the format" in answer.json()["error"]["message"]
    assert len(server.engine.slots[1].tokens) == 0


@pytest.mark.parametrize(
    ("code", "words"), [(errno.ENOSPC, "the disk is full: free some space"), (errno.EROFS, "the folder is read-only")]
)
def test_a_folder_that_takes_nothing(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    server = make()
    first = complete(server, PROMPT, id_slot=0)

    def fail(handle: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("llamamg.statefile.write.os.fsync", fail)
    answer = act(server, 0, "save", "a.bin")
    assert answer.status_code == 500
    assert words in answer.json()["error"]["message"]
    assert list((tmp_path / "slots").iterdir()) == []
    monkeypatch.undo()
    again = complete(server, PROMPT, id_slot=0)
    assert again["content"] == first["content"]
    assert again["timings"]["cache_n"] == len(PROMPT) - 1


def test_a_copy_that_fails_leaves_the_slot_empty(make: Make) -> None:
    server = make()
    complete(server, PROMPT, id_slot=0)
    act(server, 0, "save", "a.bin")
    cells = server.engine.cells
    assert isinstance(cells, FakeCells)

    def fail() -> None:
        raise OSError("no")

    cells.slow = fail
    assert act(server, 0, "save", "b.bin").status_code == 500
    assert act(server, 0, "restore", "a.bin").status_code == 500
    cells.slow = lambda: None
    assert not server.engine.slots[0].busy
    assert complete(server, PROMPT, id_slot=0)["timings"]["cache_n"] == 0
    assert act(server, 0, "restore", "a.bin").status_code == 200


def test_a_busy_slot_is_waited_for_and_a_copied_one_is_nobody_elses(make: Make) -> None:
    server = make()
    complete(server, PROMPT, id_slot=0)
    gate = threading.Event()
    server.engine.cells.slow = lambda: gate.wait(10) and None
    answers: dict[str, Any] = {}
    saving = threading.Thread(target=lambda: answers.update(saved=act(server, 0, "save", "a.bin")))
    saving.start()
    while not server.engine.slots[0].restoring:
        time.sleep(0.005)
    asking = threading.Thread(target=lambda: answers.update(said=complete(server, "Something else" * 9, id_slot=0)))
    asking.start()
    other = complete(server, "Elsewhere", id_slot=1)
    assert other["id_slot"] == 1
    assert answers == {}
    gate.set()
    saving.join(10)
    asking.join(10)
    assert answers["saved"].json()["n_saved"] == len(PROMPT) + 7
    assert answers["said"]["id_slot"] == 0


@pytest.mark.parametrize("which", ["smol_model", "micro_model"])
def test_real_models_go_on_as_if_nothing_had_been(
    which: str, library: Library, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if not library.patched:
        pytest.skip("an unpatched build does not show its cells")
    model: Path = request.getfixturevalue(which)
    context = ContextConfig(n_ctx=2048, n_parallel=2, n_threads=1, n_threads_batch=1, warmup=False)
    server = ServerConfig(port=0, slot_save_path=tmp_path)
    config = Config(ModelConfig(model), context, server=server, plugins=PluginsConfig(none=True))
    prompt = "Once upon a time there was a fox. " * 20
    more = {"ignore_eos": True, "n_probs": 2}

    def start() -> Any:
        engine = loading.load(config, PluginSet.discover(config.plugins))
        return running(engine, engine.config)

    with start() as first:
        begun = complete(first, prompt, id_slot=0, **more)
        assert act(first, 0, "save", "s").status_code == 200
        expected = complete(first, prompt + begun["content"] + " And", id_slot=0, **more)
    with start() as second:
        assert act(second, 1, "restore", "s").json()["n_restored"] == begun["tokens_cached"]
        found = complete(second, prompt + begun["content"] + " And", id_slot=1, **more)
    for key in ("content", "completion_probabilities"):
        assert found[key] == expected[key]
    assert found["timings"]["cache_n"] == expected["timings"]["cache_n"] > 100
    with StateFile(tmp_path / "s") as file:
        assert file.header.planes
    shutil.rmtree(tmp_path)
