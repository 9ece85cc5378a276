"""What the plugin spec asks of a context at its start: room for drafts, and recurrent states to go back to."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from llamamg import Config, affordable_rollback
from llamamg_plugins.spec_cost import width_below
from llamamg_plugins.spec_types import Kind

ROLLBACK_MAX = 7  # tokens a recurrent state is kept for: each costs the memory of a whole state


def drafts_nothing(kinds: Seq[Kind], n_max: int, n_min: int) -> str:
    """Which option makes it draft nothing; "" where drafts of up to `n_max` tokens are possible."""
    n_widest = width_below(min(n_max, max(kind.n_max for kind in kinds)))
    if n_max == 0:
        return "--spec-draft-n-max is 0"
    if n_widest == 0:
        return f"the largest draft of --spec-type {kinds[0].name} is 0"
    if n_min > n_widest:
        return f"--spec-draft-n-min {n_min} is more than the longest draft, {n_widest}"
    if all(kind.rule.n_min > kind.n_max for kind in kinds):
        return "--spec-ngram-mod-n-min is more than --spec-ngram-mod-n-max"
    return ""


def states_kept(config: Config, devices: Seq[Any], n_asked: int, n_max: int) -> int:
    """States kept of each sequence. Drafts beyond them need a copy of the state, which takes as much as one more.

    Raises RuntimeError when there is no memory for even one.
    """
    in_ubatch = max(0, min(config.context.n_ubatch, config.context.n_batch) - 2)  # libllama keeps no more
    wanted = min(n_asked, n_max, ROLLBACK_MAX, in_ubatch)
    with_copy = wanted + (n_max > wanted)
    fit = affordable_rollback(config, devices, with_copy)
    if fit == 0:
        raise RuntimeError("there is no memory for a second state of each sequence: lower --ctx-size or --parallel")
    return wanted if fit == with_copy else fit - 1
