"""Sparse attention of qwen4exp whose work per step does not grow with the context, in place of upstream's graph.

The work is native: pooled keys that are kept, one operation that selects blocks, one that attends to them. This class
turns the switch and reads the counter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llamamg import Config, Guard, Options, Unavailable, architecture, has_switch, hookimpl, plugin, qsa_stats

MAX_UBATCH = 4080  # tokens of a sequence in a ubatch that the ring in place of the raw keys has room for


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

    def __init__(self, drop_raw_keys: bool = False) -> None:
        self.drop_raw_keys = drop_raw_keys
        before = qsa_stats()
        self._n_before, self._n_fallback_before = before.n_native, before.n_fallback

    @property
    def effect(self) -> int:
        """Zero while the switch is on means that the layout or the model sent every ubatch to upstream's graph."""
        return qsa_stats().n_native - self._n_before

    @property
    def note(self) -> str:
        """Its memory, what upstream computed in its stead and why, and what switching it on took."""
        now = qsa_stats()
        n_fallback = now.n_fallback - self._n_fallback_before
        parts = [
            f"{now.n_bytes / 2**20:.0f} MiB of pooled keys" if now.n_bytes else "",
            f"{n_fallback} ubatches left to upstream's attention, the last one because: {now.reason}"
            if n_fallback
            else "",
            f"switching on rebuilt {now.n_rebuilt} pooled keys per layer in {now.rebuilt_ms:.1f} ms"
            if now.n_rebuilt
            else "",
            "raw index keys are dropped, so only a restart switches it off" if now.n_lean else "",
        ]
        return "; ".join(part for part in parts if part)

    @hookimpl
    def register_options(self, options: Options) -> None:
        """One choice that a running server cannot change."""
        options.add(
            "drop-raw-keys",
            type=bool,
            default=False,
            help="keep no raw index keys, which only upstream's attention needs (768 MiB per 262144 tokens of the released "
            "model with an f16 cache): the plugin can then be switched off by a restart only",
        )

    @hookimpl
    def register_metrics(self, metrics: Any) -> None:
        """What `note` says, for machines."""
        metrics.register(_Counters())

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
        if self.drop_raw_keys:
            self._check_droppable(config)

    def _check_droppable(self, config: Config) -> None:
        context = config.context
        is_unified = context.kv_unified or (context.kv_unified is None and context.n_parallel < 0)
        if is_unified and context.n_parallel != 1:
            raise Unavailable("--qsa-drop-raw-keys needs a KV stream per slot (use --parallel N --no-kv-unified)")
        if min(context.n_ubatch, context.n_batch) > MAX_UBATCH:
            raise Unavailable(f"--qsa-drop-raw-keys needs an --ubatch-size of {MAX_UBATCH} or less")

    @hookimpl
    def native_switches(self) -> Mapping[str, Any]:
        """Off is upstream, bit for bit."""
        return {"qsa": 1, "qsa-drop-raw": 1} if self.drop_raw_keys else {"qsa": 1}


class _Counters(Collector):
    """Read at each scrape."""

    def collect(self) -> Iterator[Metric]:
        now = qsa_stats()
        counters = {
            "native_ubatches": ("Ubatches computed by the native graph", now.n_native),
            "fallback_ubatches": ("Ubatches left to upstream's graph although qsa was on", now.n_fallback),
            "pooled_keys": ("Pooled keys written, per layer", now.n_pooled),
            "rebuilt_keys": ("Pooled keys written because qsa was switched on, per layer", now.n_rebuilt),
            "rebuilt_seconds": ("Time that took", now.rebuilt_ms / 1e3),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"llamamg:qsa_{name}", text, value)
        yield GaugeMetricFamily("llamamg:qsa_pooled_bytes", "Memory of pooled keys", now.n_bytes)
