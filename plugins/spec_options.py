"""Options of the plugin spec: llama-server's and the multi-GPU fork's names where they have one."""

from __future__ import annotations

from llamamg import Options

SIZES = (
    ("size-n", 12, 1, "tokens that must match"),
    ("size-m", 48, 1, "most tokens proposed"),
    ("min-hits", 1, 1, "earlier occurrences needed before it proposes"),
)


def declare(options: Options) -> None:
    """Add them all."""
    add = options.add
    add(
        "type",
        default="none",
        help="kinds of lookup, asked in turn: ngram-simple, ngram-map-k, ngram-map-k4v, ngram-mod, suffix; none is off",
        env=("LLAMA_ARG_SPEC_TYPE",),
    )
    for kind in ("ngram-simple", "ngram-map-k", "ngram-map-k4v"):
        for name, default, least, text in SIZES:
            add(f"{kind}-{name}", type=int, default=default, minimum=least, help=f"{kind}: {text}")
    add("ngram-mod-n-match", type=int, default=24, minimum=1, help="ngram-mod: tokens that must match")
    add("ngram-mod-n-min", type=int, default=48, minimum=0, help="ngram-mod: shorter proposals are dropped")
    add("ngram-mod-n-max", type=int, default=64, minimum=0, help="ngram-mod: most tokens proposed")
    add(
        "draft-n-max",
        type=int,
        default=31,
        minimum=0,
        help="most tokens drafted for one sequence; rounded down to 1, 3, 7, 15, 31 or 63",
        env=("LLAMA_ARG_SPEC_DRAFT_N_MAX",),
    )
    add(
        "draft-n-min",
        type=int,
        default=0,
        minimum=0,
        help="shorter drafts are dropped",
        env=("LLAMA_ARG_SPEC_DRAFT_N_MIN",),
    )
    add(
        "draft-p-min",
        type=float,
        default=0.0,
        minimum=0.0,
        help="a draft ends where the occurrences it was looked up from agree less than this, all tokens together",
        aliases=("--draft-p-min",),
        env=("LLAMA_ARG_SPEC_DRAFT_P_MIN",),
    )
    add(
        "max-users",
        type=int,
        default=0,
        minimum=0,
        help="no drafts while more sequences than this generate; 0: decided by cost alone",
        env=("LLAMA_SERVER_SPEC_MAX_USERS",),
    )
    add(
        "min-accept",
        type=float,
        default=0.0,
        minimum=0.0,
        help="no drafts of a sequence that has fewer tokens accepted per draft than this times the users; 0: by cost alone",
        env=("LLAMA_SERVER_SPEC_MIN_ACCEPT",),
    )
    add(
        "max-loss",
        type=float,
        default=2.0,
        minimum=0.0,
        help="percent of its speed that a sequence may lose by drafts, its own or those of others",
    )
    add(
        "shared",
        type=bool,
        default=False,
        help="also look in what other slots hold; what is drafted may then tell one user about another's text by its timing",
    )
    add(
        "rollback",
        type=int,
        default=7,
        minimum=0,
        help="states kept of each recurrent sequence to take drafts back, 7 at most and only if they fit; 0: snapshots only",
    )
    add(
        "always",
        type=bool,
        default=False,
        help="verify every draft at its full width, whatever it costs: for measuring",
    )
