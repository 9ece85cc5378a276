"""The graph of a step's decoding rows survives the prompt beside them: neither is built anew in every step.

The work is native: a switch that gives a context another scheduler for small ubatches, one that says which ubatches of a
prompt CUDA records, and one for how it adds up products that were split. This class turns them and reads a counter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llamamg import Config, Guard, Options, PluginError, Unavailable, has_switch, hookimpl, plugin
from llamamg_plugins.native_effect import NativeEffect

SWITCH = "small-graphs"
RECORD = "record-rows"
FIXUP = "quick-fixup"
OF_OPTION = {"record-below": RECORD, FIXUP: FIXUP}  # option -> switch that older builds lack
N_GRAPH_MAX = 8  # n_sets_max of native/src/graph_sets.cpp


def graphs(text: str) -> int:
    """A value of the option `count`."""
    value = int(text)
    if not 1 <= value <= N_GRAPH_MAX:
        raise ValueError(text)
    return value


graphs.__name__ = f"a whole number from 1 to {N_GRAPH_MAX}"


@plugin(
    name=SWITCH,
    summary="keeps the graphs of small ubatches beside that of a prompt, instead of building each anew in every step",
    helps="streams that go on while a prompt is computed; steps whose rows need several ubatches",
    hurts="memory: compute buffers for 64 tokens more in each context",
    guard=Guard.exact(),
    toggle="step",
    effect="graphs kept",
)
class SmallGraphs(NativeEffect):
    """`effect` counts ubatches whose graph was still there though another one had been computed since.

    Zero means that no two kinds of ubatches took turns.
    """

    counted, switch = ("spared",), SWITCH

    def __init__(self, count: int = 1, record_below: int = 32, quick_fixup: bool = True) -> None:
        super().__init__()
        self._values = {SWITCH: count, RECORD: record_below, FIXUP: int(quick_fixup)}

    @hookimpl
    def register_options(self, options: Options) -> None:
        """How many, where drafts and sessions make more than one shape; and what CUDA does with small ubatches."""
        options.add(
            "count",
            type=graphs,
            default=1,
            help="graphs of small ubatches that a context keeps beside its own, 8 at most: one for each shape of ubatch "
            "that takes turns with others. Each costs compute buffers for 64 tokens",
        )
        options.add(
            "record-below",
            type=int,
            default=32,
            minimum=0,
            help="CUDA: a prompt's ubatches of so many tokens or more, but not full ones (--ubatch-size), are launched kernel "
            "by kernel, so that no new size costs a step of 25 ms more; others are recorded as a graph, as upstream does "
            "with all (0)",
        )
        options.add(
            FIXUP,
            type=bool,
            default=True,
            help="CUDA: parts of a quantized product that is split between SMs are added up by more threads, in the same order; "
            "ubatches of some 10 to 256 tokens are computed so",
        )

    @hookimpl
    def configure(self, config: Config) -> None:
        """Every model has graphs; the library must be ours."""
        if not has_switch(SWITCH):
            raise Unavailable("this native build cannot do it: run `llamamg build`")
        for option in config.plugins.options.get(SWITCH, {}):
            if option in OF_OPTION and not has_switch(OF_OPTION[option]):
                raise PluginError(
                    f"this native build has no {OF_OPTION[option]}: run `llamamg build`, or leave out --{SWITCH}-{option}"
                )

    @hookimpl
    def native_switches(self) -> Mapping[str, Any]:
        """Off is upstream, bit for bit."""
        return {name: value for name, value in self._values.items() if has_switch(name)}  # older builds keep graphs too
