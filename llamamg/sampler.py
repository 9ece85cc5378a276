"""Sampling of one sequence: libllama's own sampler chain, built from the request. Everything over the vocabulary is native."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from llamamg import grammar_size
from llamamg.abi import Abi, ffi
from llamamg.request import SamplingParams, TokenProb, Tokens
from llamamg.vocab import Vocabulary

NEG_INF = float("-inf")


class SamplerError(ValueError):
    """The request's sampling cannot be set up; the text goes to the client."""


class Sampler:
    """Owns the native chain and grammar of one request. Built off the engine thread, used and freed on it.

    `chain` and `grammar` are addresses; a chain of 0 means plain argmax, which is what temperature 0 comes to when
    nothing else touches the logits. Forbidden tokens (`banned`) leave it at that: only when one of them has the highest
    logit the row is sampled again, with `fallback`.
    """

    __slots__ = ("_grammar", "_llama", "_mg", "_pointer", "banned", "chain", "fallback", "grammar", "params")

    def __init__(
        self, llama: Any, mg: Abi, vocab: Vocabulary, params: SamplingParams, prompt: Tokens, n_ctx: int
    ) -> None:
        self._llama, self._mg, self.params = llama, mg, params
        self._pointer: Any = None
        self._grammar: Any = None
        biases = list(params.logit_bias)
        if params.ignore_eos:
            biases += [(token, NEG_INF) for token in _eog(vocab)]
        biases += [(token, NEG_INF) for token in _suppressed(vocab)]
        if params.grammar:
            if (why := grammar_size.complaint(params.grammar)) is not None:
                raise SamplerError(why)
            self._grammar = llama.llama_sampler_init_grammar(vocab.handle, params.grammar.encode(), b"root")
            if not self._grammar:
                raise SamplerError("Failed to initialize samplers: failed to parse grammar")
        banned = frozenset(token for token, bias in biases if bias == NEG_INF)
        greedy = self.is_greedy(params, [bias for bias in biases if bias[1] != NEG_INF])
        if biases or not greedy:
            self._pointer = self._build(vocab, params, biases, n_ctx)
            self._accept_prompt(params, prompt, n_ctx)
        self.grammar = _address(self._grammar)
        self.chain, self.fallback, self.banned = _address(self._pointer), 0, frozenset[int]()
        if greedy and not self.grammar:  # a grammar takes in each token that is sampled, so it must not be asked twice
            self.chain, self.fallback, self.banned = 0, self.chain, banned

    @staticmethod
    def is_greedy(p: SamplingParams, biases: list[tuple[int, float]]) -> bool:
        """Whether the best token is taken, without any sampler that could change which one that is."""
        penalized = p.repeat_last_n != 0 and (p.repeat_penalty, p.frequency_penalty, p.presence_penalty) != (
            1.0,
            0.0,
            0.0,
        )
        return (
            p.temperature <= 0
            and p.dynatemp_range <= 0
            and p.mirostat == 0
            and not biases
            and not (penalized and "penalties" in p.samplers)
            and not (p.dry_multiplier > 0 and "dry" in p.samplers)
            and not (p.xtc_probability > 0 and "xtc" in p.samplers)
            and "temperature" in p.samplers
            and "adaptive_p" not in p.samplers
            and "infill" not in p.samplers
            and not p.post_sampling_probs
        )

    def _build(self, vocab: Vocabulary, p: SamplingParams, biases: list[tuple[int, float]], n_ctx: int) -> Any:
        llama = self._llama
        chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())

        def add(sampler: Any) -> None:
            llama.llama_sampler_chain_add(chain, sampler)

        if biases:
            array = (llama.llama_logit_bias * len(biases))(*biases)
            add(llama.llama_sampler_init_logit_bias(vocab.n_vocab, len(biases), array))
        if p.mirostat == 1:
            add(llama.llama_sampler_init_temp(p.temperature))
            add(llama.llama_sampler_init_mirostat(vocab.n_vocab, p.seed, p.mirostat_tau, p.mirostat_eta, 100))
            return chain
        if p.mirostat == 2:
            add(llama.llama_sampler_init_temp(p.temperature))
            add(llama.llama_sampler_init_mirostat_v2(p.seed, p.mirostat_tau, p.mirostat_eta))
            return chain
        for name in p.samplers:
            match name:
                case "penalties":
                    last_n = n_ctx if p.repeat_last_n < 0 else p.repeat_last_n
                    add(
                        llama.llama_sampler_init_penalties(
                            vocab.n_vocab, last_n, p.repeat_penalty, p.frequency_penalty, p.presence_penalty
                        )
                    )
                case "dry":
                    breakers = [text.encode() for text in p.dry_sequence_breakers]
                    array = (ctypes.c_char_p * len(breakers))(*breakers)
                    last_n = n_ctx if p.dry_penalty_last_n < 0 else p.dry_penalty_last_n
                    add(
                        llama.llama_sampler_init_dry(
                            vocab.handle,
                            p.dry_multiplier,
                            p.dry_base,
                            p.dry_allowed_length,
                            last_n,
                            array,
                            len(breakers),
                        )
                    )
                case "top_k":
                    add(llama.llama_sampler_init_top_k(p.top_k))
                case "top_p":
                    add(llama.llama_sampler_init_top_p(p.top_p, p.min_keep))
                case "top_n_sigma":
                    add(llama.llama_sampler_init_top_n_sigma(p.top_n_sigma))
                case "min_p":
                    add(llama.llama_sampler_init_min_p(p.min_p, p.min_keep))
                case "xtc":
                    add(llama.llama_sampler_init_xtc(p.xtc_probability, p.xtc_threshold, p.min_keep, p.seed))
                case "typ_p":
                    add(llama.llama_sampler_init_typical(p.typical_p, p.min_keep))
                case "temperature":
                    add(llama.llama_sampler_init_temp_ext(p.temperature, p.dynatemp_range, p.dynatemp_exponent))
                case "infill":
                    add(llama.llama_sampler_init_infill(vocab.handle))
                case "adaptive_p":
                    pass  # it chooses the token, so it comes last
                case _:
                    raise SamplerError(f"unknown sampler {name!r}")
        if "adaptive_p" in p.samplers:
            add(llama.llama_sampler_init_adaptive_p(p.adaptive_target, p.adaptive_decay, p.seed))
        else:
            add(llama.llama_sampler_init_dist(p.seed))
        return chain

    def _accept_prompt(self, p: SamplingParams, prompt: Tokens, n_ctx: int) -> None:
        """Show the prompt's end to the samplers that look back; the others keep no history."""
        back = 0
        if "penalties" in p.samplers and (p.repeat_penalty, p.frequency_penalty, p.presence_penalty) != (1.0, 0.0, 0.0):
            back = n_ctx if p.repeat_last_n < 0 else p.repeat_last_n
        if "dry" in p.samplers and p.dry_multiplier > 0:
            back = max(back, n_ctx if p.dry_penalty_last_n < 0 else p.dry_penalty_last_n)
        if back:
            tokens = np.ascontiguousarray(prompt[max(0, len(prompt) - back) :], np.int32)
            chain, data = ffi.cast("void *", _address(self._pointer)), ffi.cast("int32_t *", tokens.ctypes.data)
            if self._mg.lib.mg_accept_tokens(chain, data, len(tokens)) != 0:
                raise SamplerError(str(self._mg.error()))

    def close(self) -> None:
        """Free the native samplers."""
        for pointer in (self._pointer, self._grammar):
            if pointer:
                self._llama.llama_sampler_free(pointer)
        self._pointer = self._grammar = None
        self.chain = self.grammar = self.fallback = 0


_eog_cache: dict[int, list[int]] = {}
_suppressed_cache: dict[int, list[int]] = {}


def _eog(vocab: Vocabulary) -> list[int]:
    if id(vocab) not in _eog_cache:
        _eog_cache[id(vocab)] = vocab.eog_tokens()
    return _eog_cache[id(vocab)]


def _suppressed(vocab: Vocabulary) -> list[int]:
    if id(vocab) not in _suppressed_cache:
        _suppressed_cache[id(vocab)] = vocab.suppressed_tokens()
    return _suppressed_cache[id(vocab)]


def _address(pointer: Any) -> int:
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0 if pointer else 0


class RowSampler:
    """Samples all rows of a decoded batch in one native call."""

    def __init__(self, mg: Abi, context: int, n_max: int) -> None:
        self._lib = mg.lib
        self._context = ffi.cast("void *", context)
        self._chains = np.zeros(n_max, np.uintp)
        self._grammars = np.zeros(n_max, np.uintp)
        self._index = np.zeros(n_max, np.int32)
        self._tokens = np.zeros(n_max, np.int32)
        self._chains_c = ffi.cast("void * const *", self._chains.ctypes.data)
        self._grammars_c = ffi.cast("void * const *", self._grammars.ctypes.data)
        self._index_c = ffi.cast("int32_t *", self._index.ctypes.data)
        self._tokens_c = ffi.cast("int32_t *", self._tokens.ctypes.data)
        self._error = mg.error
        self.has_run = hasattr(mg.lib, "mg_sample_run")  # libraries built before it do row by row

    def sample(self, samplers: list[Sampler], index: list[int]) -> list[int]:
        """One token for each row; `index` counts tokens of the batch. -1 for a row that failed. Waits for the device."""
        n = len(index)
        self._chains[:n] = [s.chain for s in samplers]
        self._grammars[:n] = [s.grammar for s in samplers]
        self._index[:n] = index
        self._lib.mg_sample_rows(self._context, n, self._chains_c, self._grammars_c, self._index_c, self._tokens_c)
        tokens: list[int] = self._tokens[:n].tolist()
        for i, sampler in enumerate(samplers):
            if sampler.banned and tokens[i] in sampler.banned:
                tokens[i] = self._sample_again(sampler, index[i])
        return tokens

    def sample_run(self, sampler: Sampler, index: int, draft: list[int]) -> list[int]:
        """Tokens of consecutive rows from `index` on, up to the first that is not the drafted one. -1 for a row that failed."""
        out: list[int] = []
        while True:
            left = draft[len(out) :]
            if sampler.banned:  # natively one would be taken for right: argmax knows nothing of them
                left = left[: next((i for i, token in enumerate(left) if token in sampler.banned), len(left))]
            tokens = ffi.new("int32_t[]", len(left) + 1)
            chain, grammar = ffi.cast("void *", sampler.chain), ffi.cast("void *", sampler.grammar)
            at = index + len(out)
            n = self._lib.mg_sample_run(self._context, chain, grammar, at, left, len(left), tokens)
            out += ffi.unpack(tokens, n)
            if out[-1] in sampler.banned:
                out[-1] = self._sample_again(sampler, index + len(out) - 1)
            if len(out) > len(draft) or out[-1] != draft[len(out) - 1]:
                return out

    def _sample_again(self, sampler: Sampler, index: int) -> int:
        """Argmax chose a forbidden token: the chain that rules it out chooses."""
        self._chains[0], self._grammars[0], self._index[0] = sampler.fallback, 0, index
        self._lib.mg_sample_rows(self._context, 1, self._chains_c, self._grammars_c, self._index_c, self._tokens_c)
        return int(self._tokens[0])

    def logprobs(self, index: int, token: int, n_top: int) -> TokenProb:
        """Log-probabilities over the raw logits of one row."""
        ids, values = ffi.new("int32_t[]", max(1, n_top)), ffi.new("float[]", max(1, n_top))
        chosen = ffi.new("float *")
        n = self._lib.mg_logprobs(self._context, index, token, n_top, ids, values, chosen)
        if n < 0:
            raise self._error()
        return TokenProb(token, float(chosen[0]), tuple((int(ids[i]), float(values[i])) for i in range(n)))

    def sample_with_probs(self, sampler: Sampler, index: int, n_top: int) -> TokenProb:
        """Sample one row and tell the probabilities that the chain left."""
        ids, values, token = (
            ffi.new("int32_t[]", max(1, n_top)),
            ffi.new("float[]", max(1, n_top)),
            ffi.new("int32_t *"),
        )
        chain, grammar = ffi.cast("void *", sampler.chain), ffi.cast("void *", sampler.grammar)
        n = self._lib.mg_sample_row_probs(self._context, chain, grammar, index, n_top, ids, values, token)
        if n < 0:
            raise self._error()
        top = tuple((int(ids[i]), float(values[i])) for i in range(n) if values[i] > 0)
        own = next((p for i, p in top if i == token[0]), 0.0)
        return TokenProb(int(token[0]), own, top)
