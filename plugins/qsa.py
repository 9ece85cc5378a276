"""Sparse attention of qwen4exp whose work per step does not grow with the context, in place of upstream's graph.

The work is native: pooled keys that are kept, one operation that selects blocks, one that attends to them. This class
turns the switch and reads the counter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llamamg import Config, Guard, Unavailable, architecture, has_switch, hookimpl, plugin, qsa_stats


@plugin(
    name="qsa",
    summary="keeps the pooled keys of qwen4exp's sparse attention and reads selected cells in place, without a mask",
    helps="qwen4exp beyond a thousand tokens, prompts and answers alike; memory of long contexts",
    hurts="memory: 4 bytes per pooled key and dimension (384 MiB per 262144 tokens of the released model)",
    guard=Guard.close(kl=0.1, top1=0.8),
    toggle="idle",
    effect="ubatches",
)
class Qsa:
    """`effect` counts ubatches that were computed natively since this instance was made."""

    def __init__(self) -> None:
        self._n_before = qsa_stats().n_native

    @property
    def effect(self) -> int:
        """Zero while the switch is on means that the layout or the model sent every ubatch to upstream's graph."""
        return qsa_stats().n_native - self._n_before

    @hookimpl
    def configure(self, config: Config) -> None:
        """Other architectures have nothing to select; without flash attention the cache lies the other way round."""
        found = architecture(config)
        if found != "qwen4exp":
            raise Unavailable(f"it computes the sparse attention of qwen4exp, and this model is {found or 'unknown'}")
        if not has_switch("qsa"):
            raise Unavailable("this native build has no QSA of its own: run `llamamg build`")
        if config.context.flash_attn == "off":
            raise Unavailable("it needs flash attention (leave out -fa off)")

    @hookimpl
    def native_switches(self) -> Mapping[str, Any]:
        """Off is upstream, bit for bit."""
        return {"qsa": 1}
