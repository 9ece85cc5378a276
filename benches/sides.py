"""What is compared: our server, the unpatched llama-server, any URL, the bare library. Each starts and stops cleanly."""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any
from urllib.parse import urlsplit

from llamamg import paths

from .quiet import cpu_s
from .record import free_port

ROOT = Path(__file__).resolve().parent.parent
START_S = 300.0
EXTERNAL_S = 5.0  # for a server that runs already
STOP_S = 15.0
PR_SET_PDEATHSIG = 1


class SideError(RuntimeError):
    """A side cannot be started or answers wrongly; the text says what to do."""


def _end_with_parent() -> None:
    """In the child, before it runs: on Linux a server must not outlive a bench that was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class Process:
    """A child with its output in a temporary log that is shown when it fails."""

    def __init__(self, name: str, argv: Sequence[str], env: dict[str, str] | None = None, piped: bool = False) -> None:
        self.name, self.argv = name, list(argv)
        self._env = {**os.environ, **(env or {})}
        self._piped = piped
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as we do
        self.child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        pipe = subprocess.PIPE if self._piped else subprocess.DEVNULL
        try:
            self.child = subprocess.Popen(
                self.argv,
                stdin=pipe,
                stdout=subprocess.PIPE if self._piped else self._log,
                stderr=self._log,
                env=self._env,
                cwd=ROOT,
                start_new_session=True,  # Ctrl-C is ours to pass on
                preexec_fn=_end_with_parent,
            )
        except OSError as error:
            raise SideError(f"{self.name}: cannot run {self.argv[0]}: {error.strerror}") from error

    def log_tail(self, n_bytes: int = 2000) -> str:
        """The end of what it printed."""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - n_bytes))
        return self._log.read().decode("utf-8", "replace")

    @property
    def pid(self) -> int:
        return self.child.pid if self.child is not None else -1

    def cpu_s(self) -> float:
        """CPU seconds it has used."""
        return cpu_s(self.pid)

    def alive(self) -> bool:
        return self.child is not None and self.child.poll() is None

    def stop(self) -> None:
        """Ask it to end, then insist."""
        child, self.child = self.child, None
        if child is None or child.poll() is not None:
            return
        child.send_signal(signal.SIGINT)
        try:
            child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


class Server:
    """A llama-server compatible server. `with server:` starts it and waits until it is ready; an external one is only asked."""

    def __init__(self, name: str, url: str, process: Process | None = None) -> None:
        self.name, self.url, self.process = name, url, process

    def __enter__(self) -> Server:
        if self.process is not None:
            self.process.start()
        try:
            self._wait()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process is not None:
            self.process.stop()

    def _wait(self) -> None:
        deadline, said = time.monotonic() + (START_S if self.process else EXTERNAL_S), ""
        while time.monotonic() < deadline:
            if self.process is not None and not self.process.alive():
                raise SideError(f"{self.name} ended while it started:\n{self.process.log_tail()}")
            try:
                answer = self.get("/health")
                if isinstance(answer, dict) and answer.get("status") == "ok":
                    return
                said = f"it answers {str(answer)[:200]}"
            except SideError as error:
                said = str(error)
            except ConnectionError:
                said = ""
            time.sleep(0.1)
        if said:
            raise SideError(f"{self.name} is no llama-server that is ready at {self.url}: {said}")
        raise SideError(f"{self.name} does not answer at {self.url}/health: is the server running there?")

    def get(self, path: str) -> Any:
        """GET as JSON."""
        return self._ask("GET", path, None)

    def post(self, path: str, body: dict[str, Any], method: str = "POST", timeout_s: float = 600.0) -> Any:
        """POST (or PATCH) as JSON. Raises SideError for an error answer, ConnectionError where nobody answers."""
        return self._ask(method, path, body, timeout_s)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float = 600.0) -> Any:
        parts = urlsplit(self.url)
        link = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port or 80, timeout=timeout_s)
        try:
            data = None if body is None else json.dumps(body).encode()
            link.request(method, path, data, {"Content-Type": "application/json"})
            response = link.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ConnectionError(
                f"{self.name} does not answer at {self.url}: {error or type(error).__name__}"
            ) from error
        finally:
            link.close()
        if response.status != 200:
            raise SideError(
                f"{self.name}: {method} {path} gave {response.status}: {text[:300].decode(errors='replace')}"
            )
        try:
            return json.loads(text)
        except ValueError as error:
            raise SideError(
                f"{self.name}: {method} {path} gave no JSON: {text[:60].decode(errors='replace')!r}"
            ) from error

    def cpu_s(self) -> float:
        """CPU seconds of its process; -1.0 for one we did not start."""
        return self.process.cpu_s() if self.process else -1.0


def ours(
    model: Path,
    flags: Sequence[str],
    plugins: Sequence[str] = (),
    name: str = "ours",
    module: str = "llamamg",
    env: dict[str, str] | None = None,
) -> Server:
    """`llamamg serve` of this checkout; `plugins` are its --enable/--disable options, `module` is what starts it."""
    port = free_port()
    argv = [sys.executable, "-m", module, "serve", "-m", str(model), *flags, "--port", str(port), *plugins]
    return Server(name, f"http://127.0.0.1:{port}", Process(name, argv, env))


def llama_server(
    model: Path, flags: Sequence[str], binary: Path | None = None, env: dict[str, str] | None = None
) -> Server:
    """The unpatched llama-server of the same tree."""
    path = binary or llama_server_binary()
    port = free_port()
    argv = [str(path), "-m", str(model), *flags, "--port", str(port)]
    return Server("llama-server", f"http://127.0.0.1:{port}", Process("llama-server", argv, env))


def llama_server_binary() -> Path:
    """Where `llamamg build --upstream --server` puts it. Raises SideError."""
    path = paths.build("upstream") / "bin" / "llama-server"
    if not path.is_file():
        raise SideError("the unpatched llama-server is not built: run `llamamg build --upstream --server`")
    return path


class BareLibrary:
    """llama_decode and an argmax in a loop, in a process of its own (benches/bare.py)."""

    def __init__(self, model: Path, flags: dict[str, Any], build: Path | None = None) -> None:
        self.name = "bare library"
        argv = [sys.executable, "-m", f"{__package__}.bare", str(model), json.dumps(flags)]
        self.process = Process(self.name, argv, {"LLAMAMG_BUILD": str(build)} if build else None, piped=True)

    def __enter__(self) -> BareLibrary:
        self.process.start()
        try:
            self._read()
        except BaseException:
            self.process.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.stop()

    def generate(self, prompts: Sequence[str], n_predict: int) -> dict[str, Any]:
        """`stamps`: seconds after each step; `n_streams` tokens came with each."""
        child = self.process.child
        assert child is not None
        assert child.stdin is not None
        child.stdin.write(json.dumps({"prompts": list(prompts), "n_predict": n_predict}).encode() + b"\n")
        child.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.child is not None
        assert self.process.child.stdout is not None
        line = self.process.child.stdout.readline()
        if not line:
            raise SideError(f"the bare library ended:\n{self.process.log_tail()}")
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    def cpu_s(self) -> float:
        """CPU seconds of its process."""
        return self.process.cpu_s()
