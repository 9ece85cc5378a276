"""The clock of layers: by hand, and on a real model."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamamg.config import Config, ContextConfig, ModelConfig
from llamamg.devices import stages
from llamamg.devices.stages import LayerClock
from llamamg.library import Library
from llamamg.model import load_model


class Scheduler:
    """Walks over nodes as ggml's scheduler does with a callback; computing a node takes `seconds`."""

    def __init__(self, splits: list[list[tuple[str, float]]], copy_s: float) -> None:
        self.splits, self.copy_s, self.now = splits, copy_s, 0.0
        self.names = [name for split in splits for name, _ in split]

    def run(self, clock: LayerClock) -> None:
        node = 0
        for split in self.splits:
            self.now += self.copy_s
            group = 0.0
            for i, (_, seconds) in enumerate(split):
                group += seconds
                wanted = clock.on_node(node, True)
                if wanted or i == len(split) - 1:
                    self.now += group
                    group = 0.0
                    if wanted:
                        assert clock.on_node(node, False)
                node += 1


def test_time_goes_to_the_layer_it_was_spent_in() -> None:
    splits = [
        [("embd", 5.0)],
        [("norm-0", 1.0), ("l_out-0", 2.0), ("q-1", 3.0), ("l_out-1", 4.0), ("norm-2", 0.5)],
        [("q-2", 7.0), ("l_out-2", 1.0), ("result_norm", 2.0), ("result_output", 6.0)],
    ]
    scheduler = Scheduler(splits, copy_s=0.25)
    clock = LayerClock(3, lambda node: scheduler.names[node].encode(), clock=lambda: scheduler.now)
    clock.begin()
    scheduler.run(clock)
    scheduler.now += 0.125  # waiting at the end
    times = clock.end()
    assert times.layers == [3.0, 7.0, 8.0]
    assert times.before == [5.5, 0.0, 0.75]  # input and its copy; the rest of the stage before, and the hop
    assert times.head == 8.125
    clock.begin()
    assert clock.end().layers == [0.0, 0.0, 0.0], "a step does not see the one before"


@pytest.mark.parametrize("name", ["l_out-1x", "xl_out-1", "l_out-7", "ffn_out-1", "l_out-1 (view)"])
def test_other_nodes_are_not_wanted(name: str) -> None:
    assert not LayerClock(3, lambda _: name.encode()).on_node(0, True)


@pytest.mark.parametrize("model", ["micro_model", "smol_model"])
def test_every_layer_of_a_real_model_has_a_time(model: str, library: Library, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(model)
    context = ContextConfig(n_threads=1, n_threads_batch=1, n_ubatch=32)
    config = Config(ModelConfig(path, devices=()), context)
    handle = load_model(library, config.model)
    try:
        n_layer = library.llama.llama_model_n_layer(handle)
        times = stages.measure(library, handle, config, n_layer)
    finally:
        library.llama.llama_model_free(handle)
    for phase in ("decode", "prefill"):
        assert len(times[phase].layers) == n_layer
        assert min(times[phase].layers) > 0
        assert times[phase].head > 0
