"""Options that only llamamg has: plugins, native builds and switches, the config file."""

from __future__ import annotations

from pathlib import Path

from llamamg.options.option import Combine, Option
from llamamg.options.values import boolean, some_words, text

GROUP = "Plugins and native build"


def _plugin_option(value: str) -> tuple[tuple[str, str, str], ...]:
    name, dot, rest = value.partition(".")
    key, equals, content = rest.partition("=")
    if not (name and dot and key and equals):
        raise ValueError("must be PLUGIN.OPTION=VALUE, such as prefill-gate.max-partial=2")
    return ((name.strip(), key.strip().replace("_", "-"), content),)


def _switch(value: str) -> dict[str, bool]:
    name, equals, content = value.partition("=")
    if not name or not equals:
        raise ValueError("must be NAME=0 or NAME=1, such as pipeline-parallel=1")
    return {name.strip(): boolean(content)}


def _one_in(value: str) -> int:
    if value in ("0", "off"):
        return 0
    one, slash, n = value.partition("/")
    if one.strip() != "1" or not slash or not n.strip().isdigit() or int(n) == 0:
        raise ValueError("must be 1/N, such as 1/100 for one request in a hundred, or off")
    return int(n)


def _build(value: str) -> str | Path:
    return value if value in ("patched", "upstream") else Path(value).expanduser()


OPTIONS = (
    Option(
        names=("--enable",),
        metavar="NAMES",
        env="LLAMAMG_ENABLE",
        target="local.enable",
        parse=lambda value: (value,),
        combine=Combine.EXTEND,
        default="auto",
        help="plugins to switch on beside the automatic ones: a,b; only:a,b for these alone; none for no plugin at all",
        group=GROUP,
        example="prefill-gate",
    ),
    Option(
        names=("--disable",),
        metavar="NAMES",
        env="LLAMAMG_DISABLE",
        target="plugins.disable",
        parse=some_words,
        combine=Combine.EXTEND,
        help="plugins to leave off",
        group=GROUP,
        example="seq-compact",
    ),
    Option(
        names=("--plugin-option",),
        metavar="PLUGIN.OPTION=VALUE",
        target="local.plugin_option",
        parse=_plugin_option,
        combine=Combine.EXTEND,
        help="set an option of a plugin; may be repeated (`llamamg plugins` lists them)",
        group=GROUP,
        example="prefill-gate.max-partial=2",
    ),
    Option(
        names=("--ignore-missing-plugins",),
        env="LLAMAMG_IGNORE_MISSING_PLUGINS",
        target="plugins.ignore_missing",
        help="warn about options of plugins that are not installed instead of stopping",
        group=GROUP,
    ),
    Option(
        names=("--guard-replay",),
        metavar="1/N",
        env="LLAMAMG_GUARD_REPLAY",
        target="plugins.guard_replay",
        parse=_one_in,
        default="off",
        help="compute one in N finished greedy requests again without plugins while nothing runs, and switch a plugin off "
        "that changed an answer; takes the KV cache of one slot more when slots have caches of their own",
        group=GROUP,
        example="1/100",
    ),
    Option(
        names=("--native-switch",),
        metavar="NAME=0|1",
        env="LLAMAMG_NATIVE_SWITCH",
        target="native_switches",
        parse=_switch,
        combine=Combine.UPDATE,
        help="set a switch of the patched library; may be repeated (`llamamg doctor` lists them)",
        group=GROUP,
        example="pipeline-parallel=1",
    ),
    Option(
        names=("--build",),
        metavar="DIR|patched|upstream",
        env="LLAMAMG_BUILD",
        target="local.build",
        parse=_build,
        default="patched",
        help="native build to load: a folder, or one of the builds made by `llamamg build`",
        group=GROUP,
        example="upstream",
    ),
    Option(
        names=("--upstream",),
        target="local.build",
        const="upstream",
        help="the same as --build upstream: serve with the unpatched library",
        group=GROUP,
    ),
    Option(
        names=("--config",),
        metavar="FILE",
        env="LLAMAMG_CONFIG",
        target="local.config",
        parse=text,
        help="TOML file with the tables [serve] (long option names) and [plugins.NAME]; flags and variables win",
        group=GROUP,
    ),
    Option(names=("-h", "--help", "--usage"), target="local.help", help="show this help", group=GROUP),
    Option(names=("--version",), target="local.version", help="show versions", group=GROUP),
)
