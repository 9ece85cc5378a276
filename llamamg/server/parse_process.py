"""A process of its own that runs `prepare` for long bodies, so that parsing them never holds our interpreter's lock.

Frames over two pipes. To the child: a pickled function that makes its PrepareContext, then per request the kind and the
body as it came. Back: the pickled Prepared (or error) without its bulk, then tokens and texts as raw bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from llamamg.server.errors import ApiError
from llamamg.server.prepare import Kind, PrepareContext, Prepared, Prompt, prepare

PIPE_BYTES = 1 << 20
LENGTH = struct.Struct("<Q")
Buffer = bytes | bytearray | memoryview
MakeContext = Callable[[], PrepareContext]


class Pipe:
    """Length-prefixed frames over a pair of file descriptors. Reads and writes release the interpreter lock."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        for fd in (read_fd, write_fd):
            _widen(fd)
        self._in = io.FileIO(read_fd, "rb")
        self._out = io.FileIO(write_fd, "wb")

    def write(self, *chunks: Buffer) -> None:
        """One frame out of several pieces, without joining them."""
        self._write_all(LENGTH.pack(sum(len(chunk) for chunk in chunks)))
        for chunk in chunks:
            self._write_all(chunk)

    def _write_all(self, data: Buffer) -> None:
        view = memoryview(data)
        while view:
            view = view[self._out.write(view) :]

    def read(self) -> bytearray:
        """One frame. Raises EOFError when the other side is gone."""
        (length,) = LENGTH.unpack(self._read_exactly(LENGTH.size))
        return self._read_exactly(length)

    def _read_exactly(self, length: int) -> bytearray:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            n = self._in.readinto(view)
            if not n:
                raise EOFError("the other process has ended")
            view = view[n:]
        return data

    def close(self) -> None:
        """Close both ends."""
        self._in.close()
        self._out.close()


def _widen(fd: int) -> None:
    """Let a pipe take a megabyte at once: each refill costs both processes a wake-up, and ours the interpreter lock."""
    with contextlib.suppress(AttributeError, OSError):  # not every system has it, and it may be limited
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


class ParseProcess:
    """The parent's side. `run` blocks; call it from one thread at a time (it locks)."""

    def __init__(self, make_context: MakeContext) -> None:
        self._make_context = make_context
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._pipe: Pipe | None = None
        self._is_stopped = False

    @property
    def pid(self) -> int | None:
        """The child's process id, None when it does not run."""
        return self._child.pid if self._child is not None else None

    def start(self) -> None:
        """Start the child unless it runs."""
        with self._lock:
            try:
                self._ensure()
            except EOFError:  # stopped
                self._discard()

    def run(self, kind: Kind, chunks: Sequence[bytes]) -> Prepared:
        """`prepare` in the child. Raises ApiError; if the child dies that is a 500, and the next call has a new child."""
        with self._lock:
            try:
                pipe = self._ensure()
                pipe.write(kind.encode())
                pipe.write(*chunks)
                return _receive(pipe)
            except (OSError, EOFError):
                code = self._discard()
                if self._is_stopped:
                    raise ApiError(503, "The server is shutting down") from None
                raise ApiError(
                    500,
                    f"The process that parses long requests ended unexpectedly (exit code {code}). "
                    "It is started again with the next one; if it happens twice, the request may need more memory than there is.",
                ) from None

    def stop(self) -> None:
        """End the child, in the middle of a body too, and start none any more."""
        self._is_stopped = True
        child = self._child
        if child is not None:
            child.kill()  # whoever waits for its answer holds the lock, and a long body on a busy machine takes a while
        with self._lock:
            if self._child is not None:
                self._discard()

    def _ensure(self) -> Pipe:
        if self._pipe is not None and self._child is not None and self._child.poll() is None:
            return self._pipe
        if self._child is not None:
            self._discard()
        if self._is_stopped:
            raise EOFError
        child_in, ours_out = os.pipe()
        ours_in, child_out = os.pipe()
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self._child = subprocess.Popen(
            [sys.executable, "-m", "llamamg.server.parse_process", str(child_in), str(child_out)],
            pass_fds=(child_in, child_out),
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        os.close(child_in)
        os.close(child_out)
        self._pipe = Pipe(ours_in, ours_out)
        if self._is_stopped:  # `stop` came while it started, and did not see it
            raise EOFError
        self._pipe.write(pickle.dumps(self._make_context))
        return self._pipe

    def _discard(self) -> int | None:
        child, pipe = self._child, self._pipe
        self._child = self._pipe = None
        if pipe is not None:
            pipe.close()
        if child is None:
            return None
        try:
            return child.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            child.kill()
            return child.wait()


def _receive(pipe: Pipe) -> Prepared:
    answer = pickle.loads(pipe.read())
    if isinstance(answer, ApiError):
        raise answer
    prepared: Prepared = answer
    prepared.answer = bytes(pipe.read())
    for prompt in prepared.prompts:
        prompt.tokens = pipe.read()
        prompt.echo = bytes(pipe.read())
    return prepared


def _respond(pipe: Pipe, result: Prepared | ApiError) -> None:
    if isinstance(result, ApiError):
        pipe.write(pickle.dumps(result))
        return
    bulk: list[Buffer] = [result.answer]
    for prompt in result.prompts:
        bulk += [prompt.tokens, prompt.echo]
    result.answer = b""
    result.prompts = [Prompt(b"", b"", prompt.user_starts) for prompt in result.prompts]
    pipe.write(pickle.dumps(result))
    for data in bulk:
        pipe.write(data)


def serve_requests(read_fd: int, write_fd: int) -> None:
    """The child: answer until the parent closes the pipe."""
    os.nice(10)  # a long prompt waits a moment rather than anybody's next token
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent decides
    pipe = Pipe(read_fd, write_fd)
    try:
        make_context: MakeContext = pickle.loads(pipe.read())
        context = make_context()
        while True:
            kind: Any = pipe.read().decode()
            body = pipe.read()
            result: Prepared | ApiError
            try:
                result = prepare(kind, body, context)
            except ApiError as error:
                result = error
            except MemoryError:
                result = ApiError(500, "There is not enough memory to parse this request.")
            _respond(pipe, result)
    except (EOFError, BrokenPipeError):
        return


if __name__ == "__main__":
    # Run as __main__, this module's classes would differ from the ones that get pickled.
    from llamamg.server.parse_process import serve_requests as serve

    serve(int(sys.argv[1]), int(sys.argv[2]))
