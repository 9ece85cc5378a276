"""Memory of a server while it is soaked: looks at it, and what of its growth is a leak.

States that slots keep come and go with the requests, so they are no growth, but only up to as many as the flags allow. A look
that could not be taken makes memory impossible to judge, and that fails the soak.
"""

from __future__ import annotations

import os
import re
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from llamamg.config import ContextConfig

from .grid_watch import Nvml, rss_mib, session_pids
from .sides import Server

MIB = 1 << 20
SPARE_MIB, SPARE_PART = 96.0, 0.05  # memory that may come: allocators keep some
OURS = "llamamg:"  # the metrics that another server lacks
CHECKPOINTS = {  # of a look, from our metrics; bytes are MiB there
    "checkpoints": ("checkpoint_bytes", MIB),
    "n_checkpoints": ("checkpoints", 1),
    "checkpoint_largest": ("checkpoint_largest_bytes", MIB),
}
LIMIT_FLAGS = ("-ctxcp", "--ctx-checkpoints", "--swa-checkpoints")
LIMIT_VARIABLE = "LLAMA_ARG_CTX_CHECKPOINTS"


def look(server: Server, nvml: Nvml) -> dict[str, Any]:
    """MiB of the server's processes on the host, what of it are checkpoints (None: it has no such thing), and of each device;
    in `unread` what could not be read, a sentence each."""
    found: dict[str, Any] = {"host": None, "unread": []}
    if server.process:
        found["host"] = rss_mib(session_pids(server.process.pid))
        if found["host"] is None:
            found["unread"].append("/proc does not tell the memory of the server's processes")
    try:
        found |= checkpoints(server)
    except (OSError, ValueError) as error:
        found |= dict.fromkeys(CHECKPOINTS)
        found["unread"].append(f"/metrics does not tell the memory of checkpoints: {error or type(error).__name__}")
    devices = [nvml.sample(i, set()).get("memory_mib") for i in range(len(nvml))]
    found["devices"] = [None if mib is None else round(mib, 1) for mib in devices]
    found["unread"] += [f"GPU {i} does not tell its memory" for i, mib in enumerate(devices) if mib is None]
    return found


def checkpoints(server: Server) -> dict[str, float | None]:
    """States that slots keep in main memory; None each where the server is not ours. Raises OSError and ValueError."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=30) as answer:
        text = answer.read().decode()
    if not re.search(f"^{OURS}", text, re.MULTILINE):
        return dict.fromkeys(CHECKPOINTS)
    found: dict[str, float | None] = {}
    for key, (name, unit) in CHECKPOINTS.items():
        said = re.search(rf"^{OURS}{name} (\S+)$", text, re.MULTILINE)
        if said is None:
            raise ValueError(f"there is no {OURS}{name}")
        found[key] = round(float(said[1]) / unit, 3)
    return found


def checkpoints_most(flags: Sequence[str], env: Mapping[str, str], n_slots: int) -> int:
    """As many checkpoints as a server with these flags and variables may hold."""
    limit, words = env.get(LIMIT_VARIABLE) or os.environ.get(LIMIT_VARIABLE), list(flags)
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in LIMIT_FLAGS:
            limit = value if equals else next(iter(words[at + 1 :]), None)
    return n_slots * (int(limit) if limit else ContextConfig().n_ctx_checkpoints)


def leaks(looks: Sequence[Mapping[str, Any]], n_most: int | None) -> list[str]:
    """What grew that should not, or why nobody can tell, a sentence each. `n_most` as from checkpoints_most; None: unknown."""
    unread = [
        f"look {i + 1} of {len(looks)}: {sentence}" for i, one in enumerate(looks) for sentence in one.get("unread", ())
    ]
    if unread:
        return [f"memory cannot be judged: {'; '.join(unread)}"]
    out = _too_many(looks, n_most)
    if len(looks) < 2:
        return out
    first, last = looks[0], looks[-1]
    # What the slots hold at the moment is no leak.
    held = (last.get("checkpoints") or 0.0) - (first.get("checkpoints") or 0.0)
    places = [("main memory", first["host"], last["host"] and last["host"] - held)]
    places += [(f"GPU {i}", a, b) for i, (a, b) in enumerate(zip(first["devices"], last["devices"], strict=True))]
    return out + [
        f"{what} grew from {a:.0f} to {b:.0f} MiB"
        for what, a, b in places
        if a is not None and b is not None and b > a * (1 + SPARE_PART) + SPARE_MIB
    ]


def _too_many(looks: Sequence[Mapping[str, Any]], n_most: int | None) -> list[str]:
    """Of the look with most of them."""
    told = [one for one in looks if one.get("checkpoints") is not None]
    if n_most is None or not told:
        return []
    n = max(one["n_checkpoints"] for one in told)
    mib, most_mib = (
        max(one["checkpoints"] for one in told),
        n_most * max(one["checkpoint_largest"] for one in told),
    )
    if n > n_most or mib > most_mib + 0.1:  # rounded figures
        return [
            f"checkpoints grew to {n:.0f} of {mib:.0f} MiB: slots x --ctx-checkpoints are {n_most}, at most {most_mib:.0f} MiB"
        ]
    return []
