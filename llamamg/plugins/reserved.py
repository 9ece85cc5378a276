"""Names of plugins that belong to this project, and the flags and variables of llama-server and its fork that mean them.

While such a plugin is not installed, its options are recognised and stop the start instead of being ignored.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reserved:
    """Flags (each takes a value) and environment variables."""

    flags: tuple[str, ...] = ()
    env: tuple[str, ...] = ()


RESERVED: dict[str, Reserved] = {
    "spec": Reserved(
        flags=(
            "--spec-type",
            "--spec-draft-n-max",
            "--spec-draft-n-min",
            "--spec-draft-p-min",
            "--spec-ngram-simple-size-n",
            "--spec-ngram-simple-size-m",
            "--spec-ngram-simple-min-hits",
            "--spec-ngram-map-k-size-n",
            "--spec-ngram-map-k-size-m",
            "--spec-ngram-map-k-min-hits",
            "--spec-ngram-map-k4v-size-n",
            "--spec-ngram-map-k4v-size-m",
            "--spec-ngram-map-k4v-min-hits",
            "--spec-ngram-mod-n-match",
            "--spec-ngram-mod-n-min",
            "--spec-ngram-mod-n-max",
        ),
        env=("LLAMA_ARG_SPEC_TYPE", "LLAMA_SERVER_SPEC_MAX_USERS", "LLAMA_SERVER_SPEC_MIN_ACCEPT"),
    ),
    "decode-groups": Reserved(env=("LLAMA_SERVER_GROUPS", "LLAMA_DECODE_PIPELINE")),
    "async-cache": Reserved(env=("LLAMA_SERVER_XFER_STAGE_MB", "LLAMA_STATE_XFER_THREADS")),
    "qsa": Reserved(env=("LLAMA_QSA_BIAS_DEVICE", "LLAMA_QSA_COMPACT_DISABLE", "LLAMA_KQ_MASK_DEVICE")),
}


def reserved_options(installed: Collection[str]) -> dict[str, Reserved]:
    """The entries whose plugin is not installed; an installed one declares its options itself."""
    return {name: reserved for name, reserved in RESERVED.items() if name not in installed}
