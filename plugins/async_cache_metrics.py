"""What async-cache counts, as /metrics has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llamamg_plugins.async_cache_disk import Disk
from llamamg_plugins.async_cache_kept import KeptStates
from llamamg_plugins.async_cache_restore import Restorer
from llamamg_plugins.async_cache_save import Saver
from llamamg_plugins.async_cache_tree import Tree

Count = tuple[str, str, float, bool]  # name, help, value, and whether it only grows


def counts(tree: Tree, saver: Saver, restorer: Restorer, kept: KeptStates, disk: Disk | None) -> Iterator[Count]:
    """Hits, misses, bytes and evictions."""
    yield "hits", "Prompts whose beginning was restored", restorer.n_hits, True
    yield "misses", "Prompts of which nothing was kept", restorer.n_misses, True
    yield "failed", "Restores that came to nothing, so that the prompt was computed", restorer.n_failed, True
    yield "restored_tokens", "Tokens restored", restorer.n_tokens, True
    yield "saves", "Slots saved", saver.n_saved, True
    yield "saves_cut", "Slots whose next user came before all was saved", saver.n_cut, True
    yield "saves_failed", "Slots of which some could not be copied", saver.n_failed, True
    yield "saved_bytes", "Bytes copied from slots", saver.n_bytes, True
    yield "evicted_blocks", "Blocks that went to make room", tree.n_evicted, True
    yield "bytes", "Main memory in use", tree.n_bytes, False
    yield "bytes_max", "Main memory allowed", tree.n_bytes_max, False
    yield "device_states", "States kept on their devices", kept.n_taken, True
    yield "device_hits", "States put into a slot from their devices", kept.n_put, True
    yield "device_bytes", "Memory on devices in use for states", kept.n_bytes, False
    if disk is not None:
        yield "disk_written_bytes", "Bytes written to the folder", disk.n_written, True
        yield (
            "disk_unwritten_files",
            "Files that could not be written, as when the disk is full",
            disk.n_unwritten,
            True,
        )
        yield "disk_read_bytes", "Bytes read from the folder", disk.n_read, True
        yield "disk_evicted_files", "Files deleted to make room", disk.n_evicted, True
        yield "disk_bad_files", "Files deleted because they were damaged", disk.n_bad, True
        yield "disk_bytes", "Bytes of the folder in use", disk.n_bytes, False


class Counters(Collector):
    """Reads them at each scrape."""

    def __init__(self, read: Callable[[], Iterator[Count]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """As Prometheus has them."""
        for name, text, value, grows in self._read():
            family: Callable[..., Metric] = CounterMetricFamily if grows else GaugeMetricFamily
            yield family(f"llamamg:async_cache_{name}", text, value=value)
