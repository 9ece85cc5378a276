"""What a client asked for, and what it gets back: plain values that cross from the event loop to the engine thread and back."""

from __future__ import annotations

import itertools
import time
from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]

SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
RANDOM_SEED = 0xFFFFFFFF

_ids = itertools.count()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one request; names, defaults and meanings are llama-server's `generation_settings`."""

    seed: int = RANDOM_SEED
    temperature: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    typical_p: float = 1.0
    repeat_last_n: int = 64
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    min_keep: int = 0
    samplers: tuple[str, ...] = SAMPLERS
    logit_bias: tuple[tuple[int, float], ...] = ()
    ignore_eos: bool = False
    grammar: str = ""
    n_probs: int = 0
    post_sampling_probs: bool = False


class FinishReason(Enum):
    """Why a sequence ended. The values of the first three are llama-server's `stop_type`."""

    EOS = "eos"
    LIMIT = "limit"
    WORD = "word"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(slots=True)
class Request:
    """One prompt to be continued. Only `priority` and `tags` may change after submission."""

    prompt: Tokens  # [n_prompt] int32
    sampling: SamplingParams
    n_predict: int = -1  # -1: until the end of text or of the context
    stop: tuple[str, ...] = ()
    n_keep: int = 0
    n_discard: int = 0
    n_indent: int = 0
    t_max_predict_ms: int = 0
    cache_prompt: bool = True
    id_slot: int = -1
    stream: bool = False
    return_tokens: bool = False
    return_progress: bool = False
    timings_per_token: bool = False
    user_starts: tuple[int, ...] = ()  # token positions where a user message begins; checkpoints are made there
    echo_settings: dict[str, Any] = field(default_factory=dict)  # shown by /slots as `params`
    preserved_tokens: frozenset[int] = frozenset()  # special tokens whose text is shown
    id: int = field(default_factory=lambda: next(_ids))
    arrival: float = field(default_factory=time.perf_counter)  # seconds, perf_counter clock
    priority: int = 0  # lower goes first
    tags: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Timings:
    """Where a request's time went. Milliseconds; `json()` has llama-server's `timings` names, and ours behind them."""

    cache_n: int = 0
    prompt_n: int = 0
    prompt_ms: float = 0.0
    predicted_n: int = 0
    predicted_ms: float = 0.0
    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    draft_n: int = 0
    draft_n_accepted: int = 0
    gaps_s: array[float] = field(default_factory=lambda: array("f"))  # between tokens, seconds

    def json(self) -> dict[str, Any]:
        """The `timings` object; rates are 0.0 where nothing was measured, the first token counts to the prompt."""
        prompt_rate = 1e3 * self.prompt_n / self.prompt_ms if self.prompt_ms > 0 else 0.0
        n_gaps = self.predicted_n - 1
        out: dict[str, Any] = {
            "cache_n": self.cache_n,
            "prompt_n": self.prompt_n,
            "prompt_ms": round(self.prompt_ms, 3),
            "prompt_per_token_ms": self.prompt_ms / self.prompt_n if self.prompt_n else 0.0,
            "prompt_per_second": prompt_rate,
            "predicted_n": self.predicted_n,
            "predicted_ms": round(self.predicted_ms, 3),
            "predicted_per_token_ms": self.predicted_ms / n_gaps if n_gaps > 0 else 0.0,
            "predicted_per_second": 1e3 * n_gaps / self.predicted_ms if n_gaps > 0 and self.predicted_ms > 0 else 0.0,
        }
        if self.draft_n > 0:
            out["draft_n"] = self.draft_n
            out["draft_n_accepted"] = self.draft_n_accepted
        if self.ttft_ms > 0:
            out["queue_ms"] = round(self.queue_ms, 3)
            out["ttft_ms"] = round(self.ttft_ms, 3)
        if self.gaps_s:
            p50, p99, most = (
                1e3 * float(v) for v in np.percentile(np.frombuffer(self.gaps_s, np.float32), (50, 99, 100))
            )
            out["itl_p50_ms"], out["itl_p99_ms"], out["itl_max_ms"] = round(p50, 3), round(p99, 3), round(most, 3)
        return out


@dataclass(frozen=True, slots=True)
class TokenProb:
    """A token with its log-probability (or probability, when `post_sampling_probs`), and the best alternatives."""

    id: int
    prob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt went into a slot: a streaming answer sends its headers now."""

    id_slot: int
    n_cached: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Prompt tokens done so far (only with `return_progress`)."""

    total: int
    cache: int
    processed: int
    time_ms: float
    timings: Timings | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """Newly generated text, valid UTF-8 without any part of a stop string; may be empty while text is held back."""

    text: str
    tokens: tuple[int, ...]
    n_decoded: int
    probs: tuple[TokenProb, ...] = ()
    timings: Timings | None = None  # only with `timings_per_token`


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a request that ran. `text` is the whole generated text, streamed or not."""

    reason: FinishReason
    text: str
    tail: str  # text not yet sent in a Delta (a streaming answer sends it first)
    tokens: tuple[int, ...]
    n_prompt: int
    n_decoded: int
    n_cached_slot: int  # tokens the slot now holds (llama-server's `tokens_cached`)
    id_slot: int
    timings: Timings
    stopping_word: str = ""
    truncated: bool = False
    has_new_line: bool = False
    probs: tuple[TokenProb, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a request that could not run; the fields are those of the error JSON."""

    code: int
    type: str
    message: str
    extra: dict[str, Any] = field(default_factory=dict)


Event = Started | Progress | Delta | Finished | Failed
