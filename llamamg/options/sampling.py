"""Options that set the defaults of sampling; a request may override each."""

from __future__ import annotations

from collections.abc import Callable

from llamamg.options.option import Combine, Option
from llamamg.options.sampling_values import logit_bias, sampler_letters, samplers, schema_file, schema_text, seed
from llamamg.options.values import file_text, integer, number, text

GROUP = "Sampling (defaults of a request)"


def _one(
    names: str,
    field: str,
    parse: Callable[[str], object],
    example: str,
    help: str,
    metavar: str = "N",
    env: str = "",
    default: str = "",
) -> Option:
    """A row of the plain kind: one value into one field of SamplingParams."""
    return Option(
        names=tuple(names.split()),
        target=f"generation.sampling.{field}",
        parse=parse,
        example=example,
        help=help,
        metavar=metavar,
        env=env,
        default=default,
        group=GROUP,
    )


OPTIONS = (
    _one("-s --seed", "seed", seed, "42", "random seed; -1 takes a new one for each request", default="-1"),
    _one(
        "--temp --temperature", "temperature", number(0), "0.2", "temperature; 0 is greedy", env="LLAMA_ARG_TEMPERATURE"
    ),
    _one("--top-k", "top_k", integer(), "20", "keep the k likeliest tokens; 0 keeps all", env="LLAMA_ARG_TOP_K"),
    _one(
        "--top-p",
        "top_p",
        number(),
        "0.9",
        "keep the likeliest tokens up to this sum; 1 keeps all",
        env="LLAMA_ARG_TOP_P",
    ),
    _one(
        "--min-p",
        "min_p",
        number(),
        "0.1",
        "keep tokens at least this likely, relative to the best; 0 keeps all",
        env="LLAMA_ARG_MIN_P",
    ),
    _one(
        "--top-nsigma --top-n-sigma",
        "top_n_sigma",
        number(),
        "1",
        "keep tokens within n standard deviations of the best logit; -1 is off",
    ),
    _one(
        "--xtc-probability",
        "xtc_probability",
        number(0, 1),
        "0.5",
        "chance that the likeliest tokens are removed; 0 is off",
    ),
    _one(
        "--xtc-threshold",
        "xtc_threshold",
        number(0, 1),
        "0.2",
        "how likely tokens must be for --xtc-probability to remove them",
    ),
    _one("--typical --typical-p", "typical_p", number(), "0.9", "locally typical sampling; 1 is off"),
    _one(
        "--repeat-last-n",
        "repeat_last_n",
        integer(0, also=(-1,)),
        "128",
        "tokens looked at by the penalties; 0 is off, -1 the context",
    ),
    _one(
        "--repeat-penalty",
        "repeat_penalty",
        number(above=0),
        "1.1",
        "divisor for tokens that occurred; 1 is off",
        env="LLAMA_ARG_REPEAT_PENALTY",
    ),
    _one(
        "--presence-penalty",
        "presence_penalty",
        number(),
        "0.5",
        "taken off once for tokens that occurred",
        env="LLAMA_ARG_PRESENCE_PENALTY",
    ),
    _one(
        "--frequency-penalty",
        "frequency_penalty",
        number(),
        "0.5",
        "taken off for each occurrence",
        env="LLAMA_ARG_FREQUENCY_PENALTY",
    ),
    _one(
        "--dry-multiplier",
        "dry_multiplier",
        number(),
        "0.8",
        "strength of the DRY penalty on repeated passages; 0 is off",
    ),
    _one("--dry-base", "dry_base", number(1), "2", "growth of the DRY penalty with length"),
    _one("--dry-allowed-length", "dry_allowed_length", integer(0), "3", "repeated tokens that go unpunished"),
    _one(
        "--dry-penalty-last-n",
        "dry_penalty_last_n",
        integer(0, also=(-1,)),
        "128",
        "tokens the DRY penalty looks at; -1 is the context, 0 off",
    ),
    Option(
        names=("--dry-sequence-breaker",),
        metavar="TEXT",
        target="generation.sampling.dry_sequence_breakers",
        parse=lambda value: () if value == "none" else (value,),
        combine=Combine.EXTEND,
        default='newline : " *',
        help="text at which a repeated passage ends; replaces the default ones, may be repeated; none for no breaker",
        group=GROUP,
        example=";",
    ),
    _one(
        "--adaptive-target",
        "adaptive_target",
        number(maximum=1),
        "0.5",
        "adaptive-p: choose tokens near this probability; negative is off",
    ),
    _one("--adaptive-decay", "adaptive_decay", number(0, 0.99), "0.5", "adaptive-p: how slowly the target adapts"),
    _one(
        "--dynatemp-range", "dynatemp_range", number(0), "0.5", "temperature varies by this much with entropy; 0 is off"
    ),
    _one("--dynatemp-exp", "dynatemp_exponent", number(), "2", "exponent of the dynamic temperature"),
    _one("--mirostat", "mirostat", integer(0, 2), "2", "Mirostat version instead of the other samplers; 0 is off"),
    _one("--mirostat-lr", "mirostat_eta", number(), "0.2", "Mirostat's learning rate"),
    _one("--mirostat-ent", "mirostat_tau", number(), "4", "Mirostat's target entropy"),
    _one(
        "--samplers",
        "samplers",
        samplers,
        "top_k;temperature",
        "samplers in their order, separated by ;",
        metavar="NAMES",
    ),
    _one(
        "--sampler-seq --sampling-seq",
        "samplers",
        sampler_letters,
        "kt",
        "samplers in their order, one letter each",
        "LETTERS",
        default="edskypmxt",
    ),
    Option(
        names=("--ignore-eos",),
        target="generation.sampling.ignore_eos",
        help="never choose the end-of-text token",
        group=GROUP,
    ),
    Option(
        names=("-l", "--logit-bias"),
        metavar="TOKEN±BIAS",
        target="generation.sampling.logit_bias",
        parse=logit_bias,
        combine=Combine.EXTEND,
        help="make a token (by id) likelier or less likely, e.g. 15043+1; may be repeated",
        group=GROUP,
        example="15043-1.5",
    ),
    _one("--grammar", "grammar", text, 'root ::= "yes" | "no"', "GBNF grammar that output must follow", metavar="GBNF"),
    _one("--grammar-file", "grammar", file_text, "", "file holding a GBNF grammar", metavar="FILE"),
    Option(
        names=("-j", "--json-schema"),
        metavar="SCHEMA",
        target="local.json_schema",
        parse=schema_text,
        help="JSON schema that output must follow",
        group=GROUP,
        example='{"type": "object"}',
    ),
    Option(
        names=("-jf", "--json-schema-file"),
        metavar="FILE",
        target="local.json_schema",
        parse=schema_file,
        help="file holding a JSON schema",
        group=GROUP,
    ),
)
