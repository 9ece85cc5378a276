"""The error of benchmarks."""

from __future__ import annotations


class BenchError(RuntimeError):
    """Nothing can be measured like this; the text says what to do."""
