"""The disk tier: conversations come back after a restart; whatever is wrong with a file costs a prompt, not an answer."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cache_server import Server, alone, talk

from llamamg import PluginError, Unavailable
from llamamg.cli import main
from llamamg.config import Config, GenerationConfig, ModelConfig, PluginsConfig
from llamamg.plugins.testing import on
from llamamg.statefile import FolderInUse, FolderLock, StateFile
from llamamg.testing import ask
from llamamg_plugins.async_cache import AsyncCache

Make = Callable[..., Server]


class DiskServer(Server):
    def settle(self) -> None:
        super().settle()
        disk = self.parts.disk
        assert disk is not None
        until = time.monotonic() + 20
        while disk.n_pending:
            disk.drain()
            assert time.monotonic() < until
            time.sleep(0.001)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """`start(model=b"…", hybrid=False, **options)`: a server that keeps prompts in tmp_path/disk."""
    made: list[Server] = []

    def make(*, model: bytes = b"weights", hybrid: bool = False, **options: str) -> Server:
        path = tmp_path / "m.gguf"
        path.write_bytes(model * 100)
        for server in made:
            server.stop()
        made.clear()
        identity = __import__("llamamg_plugins.async_cache_parts", fromlist=["x"])
        config = Config(ModelConfig(path), plugins=PluginsConfig(none=True))
        monkeypatch.setattr(identity, "model_identity", lambda _: real(config))
        made.append(DiskServer(1, hybrid=hybrid, disk=str(tmp_path / "disk"), **options))
        return made[-1]

    from llamamg.statefile import model_identity as real

    yield make
    for server in made:
        server.stop()


def files(tmp_path: Path) -> list[Path]:
    return sorted(path for path in (tmp_path / "disk").iterdir() if path.name != ".lock")


@pytest.mark.parametrize("hybrid", [False, True])
def test_conversations_survive_a_restart(start: Make, tmp_path: Path, hybrid: bool) -> None:
    talks = [talk(300, 0) + talk(500 + 90 * i, i) for i in range(1, 4)]
    server = start(hybrid=hybrid)
    for t in talks:
        server.run(ask(t, n_predict=4))
    assert len(files(tmp_path)) == 3
    server = start(hybrid=hybrid)
    for t in talks:
        again = ask(t + talk(20, 9), n_predict=6)
        assert server.run(again) == [alone(t + talk(20, 9), 6, hybrid=hybrid)]
        assert server.n_cached(again) >= len(t) - 4
    assert server.parts.disk is not None
    assert server.parts.disk.n_read > 0


def test_an_answer_is_on_disk_though_nothing_happens_after_it(start: Make, tmp_path: Path) -> None:
    """Between two steps of an idle engine lie seconds: the plugin asks to be called again until its copies are through."""
    server = start()
    server.cells.slow = lambda: time.sleep(0.005)
    server.engine.submit(ask(talk(800, 1), n_predict=4))
    while server.engine.step():
        pass
    n_calls = 0
    while server.cache.idle(server.engine.scheduler.state):
        n_calls += 1
        assert n_calls < 20_000
    assert server.parts.saver.n_running == 0
    server.plugins.stop()  # what is queued is still written
    (path,) = files(tmp_path)
    with StateFile(path) as file:
        assert file.header.n_tokens == 803


def test_what_is_copied_when_the_server_ends_is_written(start: Make, tmp_path: Path) -> None:
    server = start()
    server.engine.submit(ask(talk(800, 1), n_predict=4))
    while server.engine.step():
        pass
    server.parts.saver.prepare()
    copying = server.engine.slots[0].copying
    assert copying is not None
    assert copying.wait(10)
    assert server.parts.saver.n_running == 1
    server.plugins.stop()
    assert len(files(tmp_path)) == 1


def test_a_long_write_does_not_hold_up_the_end(start: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamamg_plugins.async_cache_writer.END_S", 0.05)
    server = start()
    disk = server.parts.disk
    assert disk is not None

    def write(path: Path, header: Any, tokens: Any, records: Any, stopped: Callable[[], bool]) -> int:
        until = time.monotonic() + 20
        while not stopped():
            assert time.monotonic() < until
            time.sleep(0.001)
        raise OSError("writing was stopped")

    monkeypatch.setattr("llamamg_plugins.async_cache_disk.write_state_file", write)
    server.engine.submit(ask(talk(800, 1), n_predict=4))
    while server.engine.step():
        pass
    while server.cache.idle(server.engine.scheduler.state):
        pass
    assert disk.n_pending == 1
    server.plugins.stop()
    assert disk._thread.join(10)
    assert files(tmp_path) == []
    disk.drain()


def test_the_folder_is_given_up_when_nothing_more_is_written(
    start: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the engine does not wait for a disk that is stuck; another server has to."""
    monkeypatch.setattr("llamamg_plugins.async_cache_writer.END_S", 0.02)
    monkeypatch.setattr("llamamg_plugins.async_cache_writer.STOP_S", 0.02)
    server, go_on = start(), threading.Event()
    monkeypatch.setattr("llamamg.statefile.write.os.fsync", lambda handle: go_on.wait(20))
    server.engine.submit(ask(talk(800, 1), n_predict=4))
    while server.engine.step():
        pass
    while server.cache.idle(server.engine.scheduler.state):
        pass
    disk = server.parts.disk
    assert disk is not None
    server.plugins.stop()
    with pytest.raises(FolderInUse, match=str(os.getpid())):
        FolderLock(tmp_path / "disk")
    with pytest.raises(PluginError, match="in use by process"):
        server.cache.configure(server.engine.config)
    go_on.set()
    assert disk._thread.join(20)
    FolderLock(tmp_path / "disk").release()
    assert len(files(tmp_path)) == 1
    disk.drain()


def test_a_folder_that_cannot_be_read_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("llamamg_plugins.async_cache_disk.remove_leftovers", refuse)
    monkeypatch.setattr("llamamg_plugins.async_cache_parts.model_identity", lambda config: "a model")
    server = DiskServer(1, disk=str(tmp_path / "disk"))
    assert "Permission denied" in str(server.plugins.views()[0].quarantined)
    FolderLock(tmp_path / "disk").release()


def test_a_conversation_that_grows_writes_what_is_new(start: Make, tmp_path: Path) -> None:
    server = start()
    t = talk(1000, 1)
    t += list(server.run(ask(t, n_predict=4))[0].encode())
    t += talk(300, 2)
    server.run(ask(t, n_predict=4))
    sizes = []
    for path in files(tmp_path):
        with StateFile(path) as file:
            sizes.append((file.header.start, file.header.n_tokens))
    assert sorted(sizes) == [(0, 1003), (768, 1307)]
    server = start()
    again = ask(t, n_predict=4)
    assert server.run(again) == [alone(t, 4)]
    assert server.n_cached(again) == len(t) - 1


def test_memory_may_be_small(start: Make) -> None:
    """What is only on disk passes through memory that is given back."""
    server = start()
    talks = [talk(700, i) for i in range(1, 6)]
    server.parts.tree.n_bytes_max = 4 * 256 * 4
    for t in talks:
        server.run(ask(t, n_predict=2))
    for t in talks:
        again = ask(t, n_predict=4)
        assert server.run(again) == [alone(t, 4)]
        assert server.n_cached(again) == 699
        assert server.parts.tree.n_bytes <= server.parts.tree.n_bytes_max


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at if at >= 0 else len(data) // 2] ^= 8
    path.write_bytes(data)


@pytest.mark.parametrize("when", ["before the start", "while it runs"])
def test_a_damaged_file_costs_a_prompt_and_goes(start: Make, tmp_path: Path, when: str) -> None:
    server = start()
    t = talk(800, 1)
    server.run(ask(t, n_predict=4))
    (path,) = files(tmp_path)
    if when == "before the start":
        flip(path)  # in a block: found when it is read
        server = start()
    else:
        server = start()
        flip(path)
    request = ask(t, n_predict=6)
    assert server.run(request) == [alone(t, 6)]
    assert server.n_cached(request) == 0
    assert server.parts.restorer.n_failed == 1
    assert server.parts.disk is not None
    assert server.parts.disk.n_bad == 1
    request = ask(t, n_predict=6)
    assert server.run(request) == [alone(t, 6)]
    server = start()
    request = ask(t, n_predict=6)
    assert server.run(request) == [alone(t, 6)]
    assert server.n_cached(request) == 799, "what was computed again was not written again"


@pytest.mark.parametrize("n", [0, 10, 1000])
def test_a_file_that_was_cut_off_is_deleted_at_the_start(start: Make, tmp_path: Path, n: int) -> None:
    server = start()
    server.run(ask(talk(800, 1), n_predict=4))
    (path,) = files(tmp_path)
    path.write_bytes(path.read_bytes()[:n])
    server = start()
    assert files(tmp_path) == []
    assert server.run(ask(talk(800, 1), n_predict=4)) == [alone(talk(800, 1), 4)]


def test_another_model_does_not_read_it_and_does_not_delete_it(start: Make, tmp_path: Path) -> None:
    server = start()
    server.run(ask(talk(800, 1), n_predict=4))
    server = start(model=b"others!")
    request = ask(talk(800, 1), n_predict=4)
    server.run(request)
    assert server.n_cached(request) == 0
    assert len(files(tmp_path)) == 2
    server = start()
    request = ask(talk(800, 1), n_predict=4)
    server.run(request)
    assert server.n_cached(request) == 799


def test_the_oldest_files_go(start: Make, tmp_path: Path) -> None:
    server = start(**{"disk-gb": "2e-5"})  # four files of five blocks
    for i in range(1, 9):
        server.run(ask(talk(1100, i), n_predict=2))
        os.utime(files(tmp_path)[0])
    assert server.parts.disk is not None
    assert server.parts.disk.n_bytes == sum(path.stat().st_size for path in files(tmp_path)) <= 20000
    assert server.parts.disk.n_evicted >= 4
    server = start(**{"disk-gb": "2e-5"})
    request = ask(talk(1100, 8), n_predict=4)
    assert server.run(request) == [alone(talk(1100, 8), 4)]
    assert server.n_cached(request) == 1099


def test_what_is_built_on_a_file_goes_with_it(start: Make, tmp_path: Path) -> None:
    server = start()
    t = talk(1000, 1)
    server.run(ask(t, n_predict=2))
    server.run(ask(t + talk(400, 2), n_predict=2))
    first = next(path for path in files(tmp_path) if StateFile(path).header.start == 0)
    first.unlink()
    server = start()
    assert files(tmp_path) == []
    request = ask(t, n_predict=4)
    assert server.run(request) == [alone(t, 4)]


def test_a_full_disk_is_a_warning(
    start: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = start()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("llamamg.statefile.write.os.fsync", full)
    t = talk(800, 1)
    server.run(ask(t, n_predict=2))
    assert "No space left" in caplog.text
    assert files(tmp_path) == []
    server.run(ask(talk(500, 2), n_predict=2))
    request = ask(t, n_predict=4)
    assert server.run(request) == [alone(t, 4)]
    assert server.n_cached(request) == 799  # from memory


def test_a_folder_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PluginError, match="cache-disk .* cannot be used"):
        on(AsyncCache, options={"async-cache": {"disk": str(tmp_path / "file" / "x")}})


def test_a_plugin_that_cannot_be_used_does_not_keep_the_folder(tmp_path: Path) -> None:
    config = Config(ModelConfig(Path("fake.gguf")), generation=GenerationConfig(cache_prompt=False))
    plugin = AsyncCache(disk=str(tmp_path))
    with pytest.raises(Unavailable, match="not reused"):
        plugin.configure(config)
    FolderLock(tmp_path).release()  # raises while somebody has it


def test_a_folder_is_of_no_use_without_memory(tmp_path: Path) -> None:
    config = Config(ModelConfig(Path("fake.gguf")))
    with pytest.raises(PluginError, match="--cache-disk needs main memory too"):
        AsyncCache(disk=str(tmp_path / "disk"), ram=0).configure(config)
    with pytest.raises(Unavailable, match="--cache-ram is 0"):
        AsyncCache(ram=0).configure(config)


def test_states_read_from_disk_are_counted(start: Make) -> None:
    t = talk(800, 1)
    start(hybrid=True).run(ask(t, n_predict=2))
    server = start(hybrid=True)
    request = ask(t + talk(20, 2), n_predict=2)
    server.run(request)
    assert server.n_cached(request) >= 796
    tree = server.parts.tree
    assert tree is not None
    server.run(ask(talk(600, 3), n_predict=2))
    assert tree.n_state_bytes > 0
    tree.n_bytes_max = 0
    tree.make_room(0)
    assert tree.n_bytes == 0


def test_a_limit_beyond_all_disks(start: Make) -> None:
    server = start(**{"disk-gb": "1e308"})
    server.run(ask(talk(500, 1), n_predict=2))
    assert server.parts.disk is not None
    assert server.parts.disk.n_written > 0


def test_what_is_not_damaged_is_not_deleted(
    start: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = start()
    t = talk(1000, 1)
    server.run(ask(t, n_predict=2))
    server.run(ask(t + talk(400, 2), n_predict=2))
    first = next(path for path in files(tmp_path) if StateFile(path).header.start == 0)
    older, mine = (tmp_path / "disk" / f"{32 * letter}.llmg" for letter in "ab")
    older.write_bytes(first.read_bytes()[:8] + (0).to_bytes(4, "little") + first.read_bytes()[12:])
    mine.write_text("a diary")
    mine.with_stem(32 * "c").symlink_to(tmp_path / "nowhere")
    os.mkfifo(mine.with_stem(32 * "d"))
    mine.with_stem("slot").write_bytes(b"LMGSTATE, damaged")
    before = set(files(tmp_path))
    opened = os.open

    def refuse(path: Any, *args: Any, **more: Any) -> int:
        if path == first:
            raise OSError(24, "Too many open files")
        return opened(path, *args, **more)

    monkeypatch.setattr(os, "open", refuse)
    server = start()
    assert set(files(tmp_path)) == before
    assert f"{first} is left alone: [Errno 24] Too many open files" in caplog.text
    assert f"{mine} is left alone: it is no state file" in caplog.text
    assert f"{older} is not used: it has version 0" in caplog.text
    monkeypatch.undo()
    server.stop()
    disk = server.parts.disk
    assert disk is not None
    assert older in {entry.path for entry in disk.entries}, "it counts, so that it goes when room is needed"


def test_a_folder_belongs_to_one_server(start: Make, tmp_path: Path) -> None:
    folder = str(tmp_path / "disk")
    server = start()
    server.run(ask(talk(800, 1), n_predict=2))
    with pytest.raises(PluginError, match=rf"in use by process {os.getpid()}: give each server a folder of its own"):
        on(AsyncCache, options={"async-cache": {"disk": folder}})
    server.stop()
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom llamamg.statefile import FolderLock\n"
        "lock = FolderLock(Path(sys.argv[1]))\nprint('have it', flush=True)\ntime.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    other = subprocess.Popen([sys.executable, "-c", code, folder], stdout=subprocess.PIPE, text=True, env=environment)
    assert other.stdout is not None
    assert other.stdout.readline() == "have it\n"
    with pytest.raises(PluginError, match=rf"in use by process {other.pid}:"):
        on(AsyncCache, options={"async-cache": {"disk": folder}})
    other.kill()  # a lock goes with its process, however that ends
    other.wait()
    request = ask(talk(800, 1), n_predict=2)
    after = start()
    after.run(request)
    assert after.n_cached(request) == 799


def test_cache_command_says_what_cannot_be_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.bin"
    path.touch()

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "pread", refuse)
    assert main(["cache", "ls", str(tmp_path)]) == 0
    assert "not usable: Permission denied" in capsys.readouterr().out
    assert main(["cache", "verify", str(tmp_path)]) == 1
    assert "a.bin: Permission denied" in capsys.readouterr().out
    assert main(["cache", "rm", str(tmp_path), "--damaged"]) == 0
    assert "a.bin cannot be read: Permission denied" in capsys.readouterr().err
    monkeypatch.setattr(Path, "unlink", refuse)
    assert main(["cache", "rm", str(tmp_path), "a.bin", "a.bin"]) == 1
    assert capsys.readouterr().err == "llamamg cache: a.bin cannot be deleted: Permission denied\n"
    monkeypatch.setattr(Path, "iterdir", refuse)
    assert main(["cache", "ls", str(tmp_path)]) == 1
    assert "Permission denied" in capsys.readouterr().err


def test_cache_command(start: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = start()
    for i in (1, 2):
        server.run(ask(talk(800, i), n_predict=2))
    folder = str(tmp_path / "disk")
    first, second = files(tmp_path)
    assert main(["cache", "ls", folder]) == 0
    assert "801 tokens from       0, 0 states, fake" in capsys.readouterr().out
    assert main(["cache", "verify", folder]) == 0
    assert "2 of 2 files are good" in capsys.readouterr().out
    flip(first)
    assert main(["cache", "verify", folder]) == 1
    assert f"{first.name}: a checksum is wrong" in capsys.readouterr().out
    assert main(["cache", "rm", folder, "--all"]) == 1
    assert f"is in use by process {os.getpid()}: end that server first" in capsys.readouterr().err
    server.stop()
    assert main(["cache", "rm", folder]) == 1
    assert main(["cache", "rm", folder, "../m.gguf"]) == 1
    assert main(["cache", "rm", folder, "none"]) == 1
    (tmp_path / "disk" / "notes.txt").write_text("mine")
    older, packages = (tmp_path / "disk" / f"{name}.llmg" for name in ("older", "packages"))
    older.write_bytes(second.read_bytes()[:8] + (0).to_bytes(4, "little") + second.read_bytes()[12:])
    names = "xxh3", "crc32"  # the header is the same length, and its checksum is of a kind that nobody knows
    text = next(
        second.read_bytes().replace(name.encode(), b"?" * len(name))
        for name in names
        if name in str(second.read_bytes())
    )
    packages.write_bytes(text)
    kept = sorted([second, tmp_path / "disk" / "notes.txt", older, packages])
    assert main(["cache", "rm", folder, "--damaged"]) == 0
    assert files(tmp_path) == kept, "what another version wrote is not damaged"
    assert main(["cache", "rm", folder, "--all"]) == 0
    assert files(tmp_path) == [tmp_path / "disk" / "notes.txt"]
    second.write_bytes(text)
    assert main(["cache", "rm", folder, second.name]) == 0
    assert main(["cache", "ls", str(tmp_path / "nowhere")]) == 1
