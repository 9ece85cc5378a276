"""/metrics: the engine's counters as Prometheus text, under llama-server's names, and ours as `llamamg:`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from llamamg.kept import KeptState, resident_bytes
from llamamg.server.contract import EngineLike
from llamamg.transfer.ways import ways

CONTENT_TYPE = b"text/plain; version=0.0.4"

# name without _total -> (help, attribute of Stats)
COUNTERS = {
    "prompt_tokens": ("Prompt tokens computed, without those reused from the cache", "n_prompt_tokens"),
    "prompt_tokens_cached": ("Prompt tokens reused from the cache", "n_prompt_cached"),
    "prompt_seconds": ("Seconds spent on prompts", "prompt_s"),
    "tokens_predicted": ("Tokens generated", "n_predicted"),
    "tokens_predicted_seconds": ("Seconds spent on generation", "predicted_s"),
    "n_decode": ("Calls of llama_decode", "n_decode"),
    "spec_decode_num_draft_tokens": ("Speculation: tokens drafted", "n_draft"),
    "spec_decode_num_accepted_tokens": ("Speculation: drafted tokens accepted", "n_draft_accepted"),
    "spec_decode_num_drafts": ("Speculation: drafts verified", "n_drafts"),
}


class EngineCollector(Collector):
    """Reads the engine's statistics at each scrape. The rate gauges are means since the scrape before."""

    def __init__(self, engine: EngineLike) -> None:
        self._engine = engine
        self._before: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)

    def collect(self) -> Iterator[Metric]:
        """Every metric but the one of `max_tokens_lines`."""
        stats = self._engine.stats
        for name, (text, attribute) in COUNTERS.items():
            yield CounterMetricFamily(f"llamacpp:{name}", text, getattr(stats, attribute))
        yield from self._rates(stats)
        yield GaugeMetricFamily("llamacpp:requests_processing", "Requests in a slot", stats.n_requests_processing)
        yield GaugeMetricFamily("llamacpp:requests_deferred", "Requests waiting for a slot", stats.n_requests_deferred)
        busy = stats.n_busy_sum / max(stats.n_decode, 1)
        yield GaugeMetricFamily("llamacpp:n_busy_slots_per_decode", "Mean number of busy slots per llama_decode", busy)
        if stats.accepted_per_pos:
            name = "llamacpp:spec_decode_num_accepted_tokens_per_pos"
            per_position = CounterMetricFamily(name, "Accepted tokens by position in the draft", labels=["position"])
            for position, n_accepted in enumerate(stats.accepted_per_pos):
                per_position.add_metric([str(position)], n_accepted)
            yield per_position
        yield from self._checkpoints()
        copiers = GaugeMetricFamily(
            "llamamg:copiers", "Who copies slots to the host and back, by how that is done", labels=["way"]
        )
        for way, n in ways().items():
            copiers.add_metric([way], n)
        yield copiers
        yield _histogram(
            "llamamg:time_to_first_token_seconds", "From a request's arrival to its first token", stats.ttft
        )
        yield _histogram("llamamg:queue_seconds", "From a request's arrival into a slot", stats.queue)
        yield _histogram("llamamg:prefill_seconds", "From the slot to the first token", stats.prefill)
        yield _histogram("llamamg:inter_token_latency_seconds", "Between two tokens of a sequence", stats.itl)
        if stats.n_hand_overs:
            yield CounterMetricFamily("llamamg:hand_overs", "Sequences moved between contexts", stats.n_hand_overs)
            yield CounterMetricFamily("llamamg:hand_over_seconds", "Time that took", stats.hand_over_s)
        yield from self._plugins()

    def _rates(self, stats: Any) -> Iterator[Metric]:
        now = (stats.n_prompt_tokens, stats.prompt_s, stats.n_predicted, stats.predicted_s)
        n_prompt, prompt_s, n_predicted, predicted_s = (a - b for a, b in zip(now, self._before, strict=True))
        self._before = now
        prompt_rate = n_prompt / prompt_s if prompt_s > 0 else 0.0
        predicted_rate = n_predicted / predicted_s if predicted_s > 0 else 0.0
        yield GaugeMetricFamily("llamacpp:prompt_tokens_seconds", "Mean prompt tokens per second", prompt_rate)
        yield GaugeMetricFamily("llamacpp:predicted_tokens_seconds", "Mean generated tokens per second", predicted_rate)

    def _checkpoints(self) -> Iterator[Metric]:
        kept = [one.data for slot in getattr(self._engine, "slots", ()) for one in list(slot.checkpoints)]
        in_memory = sum(data.nbytes for data in map(resident_bytes, kept) if data is not None)
        yield GaugeMetricFamily("llamamg:checkpoints", "Recurrent states (or SWA windows) kept for slots", len(kept))
        text = "Main memory of these; those on a device are not in it"
        yield GaugeMetricFamily("llamamg:checkpoint_bytes", text, in_memory)
        largest = max((data.n_bytes if isinstance(data, KeptState) else data.nbytes for data in kept), default=0)
        yield GaugeMetricFamily("llamamg:checkpoint_largest_bytes", "The largest of these, wherever it is", largest)

    def _plugins(self) -> Iterator[Metric]:
        effect = CounterMetricFamily("llamamg:plugin_effect", "What a plugin did, in its own unit", labels=["plugin"])
        enabled = GaugeMetricFamily("llamamg:plugin_enabled", "1 while a plugin is on", labels=["plugin"])
        for view in self._engine.plugins.views():
            effect.add_metric([view.name], view.effect)
            enabled.add_metric([view.name], float(view.enabled))
        yield effect
        yield enabled
        yield from self._replays()
        hooks = getattr(self._engine.plugins, "hooks", None)
        if hooks is not None and hooks.traced:
            text = "Time spent in a plugin's hook (with LLAMAMG_TRACE_HOOKS=1)"
            spent = CounterMetricFamily("llamamg:hook_seconds", text, labels=["plugin", "hook"])
            for (plugin, hook), seconds in list(hooks.seconds.items()):
                spent.add_metric([plugin, hook], seconds)
            yield spent

    def _replays(self) -> Iterator[Metric]:
        shadow = getattr(self._engine, "shadow", None)
        if shadow is None:
            return
        texts = {
            "replays": "Idle replays of requests during which a plugin acted",
            "ties": "Tokens of idle replays that fell the other way, too near to call",
            "violations": "Broken promises found by idle replays",
        }
        for what, text in texts.items():
            counter = CounterMetricFamily(f"llamamg:guard_{what}", text, labels=["plugin"])
            for view in self._engine.plugins.views():
                counter.add_metric([view.name], getattr(view, f"guard_{what}"))
            yield counter
        skipped = CounterMetricFamily("llamamg:guard_skipped", "Requests that could not be replayed", labels=["reason"])
        for reason, n in list(shadow.skipped.items()):
            skipped.add_metric([reason], n)
        yield skipped
        text = "Replays that gave other tokens although no plugin had acted"
        yield CounterMetricFamily("llamamg:guard_unexplained", text, shadow.n_unexplained)


def _histogram(name: str, text: str, histogram: Any) -> HistogramMetricFamily:
    total, buckets = 0, []
    for bound, count in zip([*map(str, histogram.bounds), "+Inf"], histogram.counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=histogram.sum)


class Metrics:
    """Renders /metrics."""

    def __init__(self, engine: EngineLike) -> None:
        self._engine = engine
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(EngineCollector(engine))
        self.t_start = int(time.time())  # seconds since 1970

    def text(self) -> bytes:
        """The whole page."""
        # llama-server calls this a counter without _total, which prometheus-client does not write.
        name, n = "llamacpp:n_tokens_max", self._engine.stats.n_tokens_max
        line = f"# HELP {name} Longest sequence seen, prompt and generation\n# TYPE {name} counter\n{name} {n}\n"
        of_plugins = getattr(self._engine.plugins, "registry", None)
        return line.encode() + generate_latest(self._registry) + (generate_latest(of_plugins) if of_plugins else b"")
