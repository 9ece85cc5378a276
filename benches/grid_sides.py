"""The sides of the grid: ours, ours with all plugins off, the unpatched llama-server, any URL. All get the same command line."""

from __future__ import annotations

import os
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
SPARE_TOKENS = 64  # beside prompt and answer


@dataclass(frozen=True, slots=True)
class Side:
    """How one side is started; `url` is one that runs already."""

    name: str
    label: str
    url: str | None = None
    binary: Path | None = None

    def server(self, model: Path, flags: Sequence[str]) -> Server:
        """A server that is not started yet."""
        if self.url is not None:
            return Server(self.label, self.url)
        if self.name == "upstream":
            return llama_server(model, flags, self.binary)
        return ours(model, flags, ("--enable", "none") if self.name == "off" else (), self.label)

    def build(self) -> dict[str, Any]:
        """What its library was built from; {} for a URL."""
        if self.url is not None:
            return {}
        if self.name == "upstream":
            return record.build((self.binary or llama_server_binary()).parent)
        folder = Path(os.environ.get("LLAMAMG_BUILD") or paths.build("patched"))
        return record.build(folder) or record.build(folder / "bin")

    def json(self, flags: Sequence[str]) -> dict[str, Any]:
        """For the result; the address of a foreign server is left out."""
        return {
            "name": self.name,
            "label": self.label,
            "external": self.url is not None,
            "flags": [] if self.url is not None else record.without_paths(flags),
            "build": self.build(),
        }


def parse(texts: Sequence[str], binary: Path | None) -> list[Side]:
    """Sides from the command line: `ours`, `off`, `upstream` or NAME=URL. Raises BenchError."""
    sides = []
    for text in texts or DEFAULT:
        name, found, url = text.partition("=")
        if found:
            if urlsplit(url).scheme != "http" or not urlsplit(url).hostname or not name:
                raise BenchError(f"--side {text}: give NAME=http://HOST:PORT")
            sides.append(Side(name, name, url.rstrip("/")))
        elif name in LABELS:
            sides.append(Side(name, LABELS[name], binary=binary if name == "upstream" else None))
        else:
            raise BenchError(f"--side {text}: it is one of {', '.join(LABELS)} or NAME=http://HOST:PORT")
    names = [side.name for side in sides]
    if len(set(names)) < len(names):
        raise BenchError("every --side needs a name of its own")
    return sides


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


def check(servers: Sequence[Server], n_slots: int, n_tokens: int) -> None:
    """Room and the same model on all sides. Raises BenchError."""
    facts: dict[str, Any] = {}
    for server in servers:
        check_room(server, n_slots, n_tokens)
        found = model_facts(server)
        for key in facts.keys() & found.keys():
            if facts[key] != found[key]:
                raise BenchError(
                    f"the sides serve different models ({key}: {servers[0].name} {facts[key]}, {server.name} {found[key]}): "
                    "start all with the same file"
                )
        facts = facts or found


def check_room(server: Server, n_slots: int, n_tokens: int) -> None:
    """Whether the deepest cell fits. Raises BenchError."""
    props = server.get("/props")
    n_ctx = (props.get("default_generation_settings") or {}).get("n_ctx")
    have = props.get("total_slots")
    if isinstance(have, int) and have < n_slots:
        raise BenchError(f"{server.name} has {have} slots and {n_slots} are asked for: start it with -np {n_slots}")
    if isinstance(n_ctx, int) and n_ctx < n_tokens:
        raise BenchError(
            f"{server.name} has {n_ctx} tokens of context per slot and the deepest cell needs {n_tokens}: "
            f"give a larger -c (up to what the model was trained for), or smaller --depths"
        )
