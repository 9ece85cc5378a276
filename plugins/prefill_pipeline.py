"""Ubatches of a prompt overlap over the devices of a layer split: nothing between two of them waits for every device.

The work is native: three switches, each of which removes one wait or one copy. This class turns them and reads a counter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llamamg import Config, Guard, Unavailable, has_switch, hookimpl, plugin
from llamamg_plugins.native_effect import NativeEffect

SWITCHES = ("stable-graph", "prefill-rebuild", "hop-once")


@plugin(
    name="prefill-pipeline",
    summary="keeps ubatches of a prompt in flight on every device of a layer split, instead of waiting for all of them",
    helps="prompts on two and more devices",
    hurts="models so small that a ubatch is computed faster than its graph is built (a few milliseconds)",
    guard=Guard.exact(),
    toggle="idle",
    effect="waits avoided",
)
class PrefillPipeline(NativeEffect):
    """`effect` counts ubatches before which the library did not wait for all devices though upstream does.

    Zero while prompts are computed means that upstream would not have waited either.
    """

    # A graph laid out as reserved, a graph built anew: each is a wait less.
    counted, switch = ("kept", "rebuilt"), "prefill-rebuild"

    @hookimpl
    def configure(self, config: Config, devices: Sequence[Any]) -> None:
        """One device is no pipeline, and only a split by layers is one."""
        if config.model.split_mode != "layer":
            raise Unavailable(f"-sm {config.model.split_mode} is no pipeline: only layers follow each other")
        if (n := n_stages(config, devices)) < 2:
            raise Unavailable(f"a pipeline needs two devices that compute asynchronously, and here are {n}")
        if not has_switch(self.switch):
            raise Unavailable("this native build cannot do it: run `llamamg build`")

    @hookimpl
    def native_switches(self) -> Mapping[str, Any]:
        """Off is upstream, bit for bit."""
        return dict.fromkeys(SWITCHES, 1)


def n_stages(config: Config, devices: Sequence[Any]) -> int:
    """Devices over which the layers are split: those named, or all that can work while the host goes on."""
    if config.model.devices is not None:
        return len(config.model.devices)
    able = [device for device in devices if device.asynchronous and device.events and device.type in ("gpu", "igpu")]
    return len(able) + len(config.model.rpc)
