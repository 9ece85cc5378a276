"""Which model, and which settings of a context, computed rows belong to."""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from pathlib import Path

from llamamg.config import Config

N_SAMPLES = 64
SAMPLE_BYTES = 1 << 16


def model_identity(config: Config) -> str:
    """A hash of the model's files and of all that changes what a row holds. Raises OSError without a file."""
    c, m = config.context, config.model
    settings = (
        c.rope_scaling,
        c.rope_scale,
        c.rope_freq_base,
        c.rope_freq_scale,
        c.yarn_orig_ctx,
        c.yarn_ext_factor,
        c.yarn_attn_factor,
        c.yarn_beta_slow,
        c.yarn_beta_fast,
        m.override_kv,
        os.environ.get("LLAMA_ATTN_ROT_DISABLE", ""),
    )
    digest = hashlib.blake2b(repr(settings).encode(), digest_size=16)
    for path in files_of(m.path):
        digest.update(_hash_of(path, path.stat().st_size, path.stat().st_mtime_ns))
    return digest.hexdigest()


def files_of(path: Path) -> list[Path]:
    """All parts of a split model, or the one file."""
    stem, mark, count = path.stem.rpartition("-of-")
    if mark and count.isdigit():
        return sorted(path.parent.glob(f"{stem.rpartition('-')[0]}-*-of-{count}{path.suffix}"))
    return [path]


@lru_cache(maxsize=64)
def _hash_of(path: Path, size: int, changed: int) -> bytes:
    """Of the first MiB (the metadata), and of samples all over the file: hashing 80 GB would take minutes."""
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        digest.update(file.read(1 << 20))
        for i in range(N_SAMPLES):
            file.seek(size * i // N_SAMPLES)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()
