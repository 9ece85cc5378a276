"""Options and variables of llama-server and its multi-GPU fork that mean plugins of this project, installed or not.

An installed plugin declares its options itself and takes these names over; until then
PluginSet says that it is missing.
A value that asks for what happens without the plugin (`neutral`) is fine then.
"""

from __future__ import annotations

from llamamg.options.option import Option, Status
from llamamg.options.values import text

GROUPS = "Plugin decode-groups (batches in flight across devices)"
QSA = "Plugin qsa (sparse attention)"
SWITCHES = "Native switches"


def _value(
    group: str,
    target: str,
    names: str,
    help: str,
    *,
    env: str = "",
    neutral: tuple[str, ...] = (),
    example: str = "1",
    metavar: str = "N",
) -> Option:
    """An option whose text goes to the plugin as typed."""
    return Option(
        names=tuple(names.split()),
        target=f"plugin:{target}",
        parse=text,
        metavar=metavar,
        env=env,
        neutral=neutral,
        help=help,
        group=group,
        example=example,
        default="set by the plugin",
    )


def _variable(group: str, target: str, env: str, help: str, *, neutral: tuple[str, ...] = ()) -> Option:
    """A variable of the fork that has no flag of llama-server's."""
    return Option(
        names=(), target=f"plugin:{target}", parse=text, env=env, neutral=neutral, help=help, group=group, example="2"
    )


def _of_another_way(env: str, help: str) -> Option:
    """A variable of the fork for a piece of its way to do sparse attention, which the plugin qsa does without."""
    return Option(
        names=(),
        parse=text,
        env=env,
        status=Status.NOTED,
        reason="the plugin qsa needs neither bias, mask nor gather; --disable qsa is the way to compare",
        help=help,
        group=QSA,
        example="1",
    )


OPTIONS = (
    Option(
        names=(),
        env="GGML_CUDA_GRAPHS_FORCE",
        parse=text,
        status=Status.NOTED,
        reason="batches of several sequences are run from CUDA graphs anyway; GGML_CUDA_DISABLE_GRAPHS=1 turns them off",
        help="CUDA graphs for batches of a group",
        group=GROUPS,
        example="1",
    ),
    _of_another_way("LLAMA_QSA_BIAS_DEVICE", "selection bias made on the device"),
    _of_another_way("LLAMA_KQ_MASK_DEVICE", "attention mask made on the device"),
    _of_another_way("LLAMA_QSA_COMPACT_DISABLE", "no compact gather"),
    Option(
        names=(),
        env="LLAMA_PIPELINE_PARALLEL",
        target="switch:pipeline-parallel",
        help="the same as --native-switch pipeline-parallel=1: prompts are pipelined over devices with -ot too",
        group=SWITCHES,
    ),
    Option(
        names=(),
        env="LLAMA_ATTN_ROT_DISABLE",
        parse=text,
        status=Status.SUPPORTED,
        help="read by libllama itself: 1 keeps keys and values unrotated in a quantized cache; passed through",
        group=SWITCHES,
        example="1",
    ),
)
