"""The sides of the grid: ours, ours with all plugins off, the unpatched llama-server, any URL. All get the same command line.

A side that differs is written NAME:WORDS, with `upstream` or nothing as the first word, then variables, then flags:
`g2:--decode-groups-groups 2`, `peer:upstream GGML_CUDA_P2P=1`.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from llamamg import paths

from . import record
from .errors import BenchError
from .grid_prompts import model_facts
from .sides import Server, llama_server, llama_server_binary, ours

DEFAULT = ("ours", "off", "upstream")
LABELS = {"ours": "llamamg", "off": "llamamg, plugins off", "upstream": "llama-server (unpatched)"}
NAMED = re.compile(r"([A-Za-z][\w-]*):(?!//)(.*)", re.DOTALL)
VARIABLE = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)", re.DOTALL)
SPARE_TOKENS = 64  # beside prompt and answer


@dataclass(frozen=True, slots=True)
class Side:
    """How one side is started; `url` is one that runs already."""

    name: str
    label: str
    url: str | None = None
    binary: Path | None = None
    is_upstream: bool = False
    flags: tuple[str, ...] = ()  # its own, after everybody's
    env: tuple[tuple[str, str], ...] = ()

    def server(self, model: Path, flags: Sequence[str]) -> Server:
        """A server that is not started yet."""
        if self.url is not None:
            return Server(self.label, self.url)
        env = dict(self.env) or None
        if self.is_upstream:
            return llama_server(model, [*flags, *self.flags], self.binary, env)
        return ours(model, flags, self.flags, self.label, env=env)

    def build(self) -> dict[str, Any]:
        """What its library was built from; {} for a URL."""
        if self.url is not None:
            return {}
        if self.is_upstream:
            return record.build((self.binary or llama_server_binary()).parent)
        folder = Path(os.environ.get("LLAMAMG_BUILD") or paths.build("patched"))
        return record.build(folder) or record.build(folder / "bin")

    def json(self, flags: Sequence[str]) -> dict[str, Any]:
        """For the result; the address of a foreign server is left out."""
        return {
            "name": self.name,
            "label": self.label,
            "external": self.url is not None,
            "flags": [] if self.url is not None else record.without_paths([*flags, *self.flags]),
            "env": dict(self.env),
            "build": self.build(),
        }


def parse(texts: Sequence[str], binary: Path | None) -> list[Side]:
    """Sides from the command line: `ours`, `off`, `upstream`, NAME=URL or NAME:WORDS. Raises BenchError."""
    sides = []
    for text in texts or DEFAULT:
        name, found, url = text.partition("=")
        if named := NAMED.fullmatch(text):
            sides.append(_named(named.group(1), named.group(2), binary))
        elif found:
            if not name or not _is_address(url):
                raise BenchError(f"--side {text}: give NAME=http://HOST:PORT")
            sides.append(Side(name, name, url.rstrip("/")))
        elif name in LABELS:
            flags = ("--enable", "none") if name == "off" else ()
            is_upstream = name == "upstream"
            sides.append(Side(name, LABELS[name], None, binary if is_upstream else None, is_upstream, flags))
        else:
            raise BenchError(
                f"--side {text}: it is one of {', '.join(LABELS)}, NAME=http://HOST:PORT or NAME:FLAGS for ours with these flags"
            )
    names = [side.name for side in sides]
    if len(set(names)) < len(names):
        raise BenchError("every --side needs a name of its own")
    return sides


def _is_address(url: str) -> bool:
    parts = urlsplit(url)
    try:
        return parts.scheme == "http" and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that cannot be
        return False


def _named(name: str, text: str, binary: Path | None) -> Side:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BenchError(f"--side {name}:{text}: {error}") from error
    is_upstream = words[:1] == ["upstream"]
    words = words[is_upstream:]
    env = []
    while words and (match := VARIABLE.fullmatch(words[0])):
        env.append((match.group(1), match.group(2)))
        del words[0]
    return Side(name, name, None, binary if is_upstream else None, is_upstream, tuple(words), tuple(env))


def serve_flags(given: Sequence[str], n_slots: int, n_tokens: int) -> list[str]:
    """The command line of all sides: slots and context that the grid needs, then what was given, which counts if it differs."""
    n_ctx = n_slots * -(-(n_tokens + SPARE_TOKENS) // 256) * 256
    words = set(given)
    flags = [] if words & {"-np", "--parallel"} else ["-np", str(n_slots)]
    flags += [] if words & {"-c", "--ctx-size"} else ["-c", str(n_ctx)]
    flags += (
        [] if words & {"-cram", "--cache-ram"} else ["--cache-ram", "0"]
    )  # copies of whole slots would be timed too
    return [*flags, *given]


def with_ubatch(flags: Sequence[str], n_ubatch: int) -> list[str]:
    """The same command line with another -ub, and -b at least as large."""
    kept, n_batch, words = [], 2048, iter(flags)
    for word in words:
        if word in ("-ub", "--ubatch-size"):
            next(words, None)
        elif word in ("-b", "--batch-size"):
            n_batch = int(next(words, "2048"))
        else:
            kept.append(word)
    return [*kept, "-b", str(max(n_batch, n_ubatch)), "-ub", str(n_ubatch)]


def ubatch_of(flags: Sequence[str]) -> int:
    """-ub of a command line; llama-server's default where it is missing."""
    for word, value in zip(reversed(flags[:-1]), reversed(flags[1:]), strict=True):
        if word in ("-ub", "--ubatch-size") and value.isdigit():
            return int(value)
    return 512


class Checks:
    """Room, and the same model on all sides that were looked at so far."""

    def __init__(self, n_slots: int, n_tokens: int) -> None:
        self._n_slots, self._n_tokens = n_slots, n_tokens
        self._facts: dict[str, tuple[str, Any]] = {}  # what is known of the model, and which side said it first

    def check(self, server: Server) -> None:
        """Look at a server that is ready. Raises BenchError."""
        check_room(server, self._n_slots, self._n_tokens)
        for key, value in model_facts(server).items():
            name, first = self._facts.setdefault(key, (server.name, value))
            if first != value:
                raise BenchError(
                    f"the sides serve different models ({key}: {name} {first}, {server.name} {value}): "
                    "start all with the same file"
                )

    def check_running(self, sides: Sequence[Side]) -> None:
        """The servers that run already, before anything is started or measured. Raises BenchError and SideError."""
        for side in sides:
            if side.url is not None:
                with side.server(Path(), ()) as server:
                    self.check(server)


def check_room(server: Server, n_slots: int, n_tokens: int) -> None:
    """Whether the deepest cell fits. Raises BenchError."""
    props = server.get("/props")
    n_ctx = (props.get("default_generation_settings") or {}).get("n_ctx")
    have = props.get("total_slots")
    if isinstance(have, int) and have < n_slots:
        raise BenchError(f"{server.name} has {have} slots and {n_slots} are asked for: start it with -np {n_slots}")
    if isinstance(n_ctx, int) and n_ctx < n_tokens:
        raise BenchError(
            f"{server.name} has {n_ctx} tokens of context per slot and {n_tokens} are needed: "
            "give a larger -c (up to what the model was trained for), or ask for less depth"
        )
