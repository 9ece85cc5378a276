"""Products with experts on CUDA use tiles as wide as the rows that an expert gets, not as if one expert got every token.

The work is native: a switch read where the tile of a quantized product is chosen. This class turns it and reads a counter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llamamg import Config, Guard, Options, Unavailable, has_switch, hookimpl, n_experts, plugin
from llamamg_plugins.native_effect import NativeEffect

SWITCH = "expert-tiles"


@plugin(
    name=SWITCH,
    summary="fits the tiles of products with experts to the rows an expert gets, instead of to the whole ubatch",
    helps="mixtures of experts on NVIDIA GPUs: prompts in chunks, verified drafts; "
    "larger ubatches where experts are many (expected, not measured)",
    hurts="a router that sends most tokens to few experts: their weights are read once per tile",
    guard=Guard.same_tokens(),
    toggle="step",
    effect="narrower tiles",
)
class ExpertTiles(NativeEffect):
    """`effect` counts products whose tile was chosen narrower than the ubatch, once per CUDA graph that is captured.

    Zero means that no ubatch had more rows than its experts get.
    """

    counted, switch = ("tiled",), SWITCH

    def __init__(self, percent: int = 150) -> None:
        super().__init__()
        self.percent = percent

    @hookimpl
    def register_options(self, options: Options) -> None:
        """How much room experts have that get more rows than others."""
        options.add(
            "percent",
            type=int,
            default=150,
            minimum=1,
            help="width of a tile in percent of the rows that an expert gets on average; experts with more take several",
        )

    @hookimpl
    def configure(self, config: Config, devices: Sequence[Any]) -> None:
        """It is about experts, and about kernels of NVIDIA GPUs."""
        if not has_switch(SWITCH):
            raise Unavailable("this native build cannot do it: run `llamamg build --cuda`")
        if not any(device.backend == "CUDA" for device in devices):
            raise Unavailable("it chooses tiles of CUDA kernels, and there is no CUDA device")
        if n_experts(config) < 2:
            raise Unavailable("the model has no experts")

    @hookimpl
    def native_switches(self) -> Mapping[str, Any]:
        """Off is upstream, bit for bit."""
        return {SWITCH: self.percent}
