"""Options of the plugin async-cache: llama-server's and llama.cpp-multigpu's names where they have one."""

from __future__ import annotations

from llamamg import Options


def declare(options: Options) -> None:
    """Add them all."""
    add = options.add
    add(
        "ram",
        type=int,
        default=8192,
        minimum=-1,
        help="MiB of main memory for prompts that left their slot; 0: none, -1: no limit",
        aliases=("-cram", "--cache-ram"),
        env=("LLAMA_ARG_CACHE_RAM",),
    )
    add(
        "idle-slots",
        type=bool,
        default=True,
        help="save a slot as soon as its sequence ends; off: only when its next user overwrites it, who waits for it",
        aliases=("--cache-idle-slots",),
        env=("LLAMA_ARG_CACHE_IDLE_SLOTS",),
    )
    add(
        "stage-mb",
        type=int,
        default=2048,
        minimum=0,
        help="MiB of the cache in page-locked memory, which a GPU reads and writes at full speed; taken at the start",
        env=("LLAMA_SERVER_XFER_STAGE_MB",),
    )
    add(
        "device-mb",
        type=int,
        default=-1,
        minimum=-1,
        help="MiB on the devices for recurrent states and those on their way to and from the host; 0: none, -1: a "
        "quarter of what is free, at most 2048",
        aliases=("--cache-device-mb",),
    )
    add(
        "threads",
        type=int,
        default=0,
        minimum=0,
        help="threads that copy; 0: one, two where the cache is on a GPU, four if there is a --cache-disk besides",
        env=("LLAMA_STATE_XFER_THREADS",),
    )
    add(
        "disk",
        default="",
        help="folder to keep prompts in across restarts; made if it is not there",
        aliases=("--cache-disk",),
    )
    add(
        "disk-gb",
        type=float,
        default=16.0,
        minimum=0,
        help="GB that folder may take; the prompts unused for longest go",
        aliases=("--cache-disk-gb",),
    )
