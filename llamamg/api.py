"""What a plugin needs, offered as names of `llamamg` itself; nothing native is loaded by importing it."""

from llamamg.batch import Batch, Plan, Row, StepState
from llamamg.blocks import N_ROWS, BlockLayout, Cells
from llamamg.config import Config
from llamamg.decisions import Admit, Defer, Fail, PrefixHit, Reject, Retry, Shrink
from llamamg.draft_index import Draft, DraftIndex, DraftRule
from llamamg.facts import (
    affordable_rollback,
    architecture,
    has_lookup,
    has_patch,
    has_room,
    has_switch,
    keeps_state,
    n_experts,
    n_stages,
    native_count,
    only_gpus,
    qsa_stats,
    set_switch,
)
from llamamg.guard import Guard
from llamamg.hookspecs import hookimpl
from llamamg.kept import KeptState, host_bytes
from llamamg.kvcache import Removal
from llamamg.plugins import Options, PluginError, Unavailable, plugin
from llamamg.request import FinishReason, Request, SamplingParams, Timings
from llamamg.sequence import Sequence, SequenceState
from llamamg.slot import Checkpoint, Slot
from llamamg.transfer import Copier, Piece, PlaceWork, StateWork, Transfer, Work, Workers, pick_copier

__all__ = [
    "N_ROWS",
    "Admit",
    "Batch",
    "BlockLayout",
    "Cells",
    "Checkpoint",
    "Config",
    "Copier",
    "Defer",
    "Draft",
    "DraftIndex",
    "DraftRule",
    "Fail",
    "FinishReason",
    "Guard",
    "KeptState",
    "Options",
    "Piece",
    "PlaceWork",
    "Plan",
    "PluginError",
    "PrefixHit",
    "Reject",
    "Removal",
    "Request",
    "Retry",
    "Row",
    "SamplingParams",
    "Sequence",
    "SequenceState",
    "Shrink",
    "Slot",
    "StateWork",
    "StepState",
    "Timings",
    "Transfer",
    "Unavailable",
    "Work",
    "Workers",
    "affordable_rollback",
    "architecture",
    "has_lookup",
    "has_patch",
    "has_room",
    "has_switch",
    "hookimpl",
    "host_bytes",
    "keeps_state",
    "n_experts",
    "n_stages",
    "native_count",
    "only_gpus",
    "pick_copier",
    "plugin",
    "qsa_stats",
    "set_switch",
]
