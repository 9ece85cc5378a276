"""The contexts of one loaded model: one, or one for each decode group and one for prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llamamg import handover
from llamamg.config import Config
from llamamg.errors import LoadError
from llamamg.facts import has_patch, only_gpus
from llamamg.kvcache import KVCache
from llamamg.kvcache_contexts import ContextsKV
from llamamg.layout import Layout, layout_of, n_ubatch
from llamamg.library import Library
from llamamg.model import ModelInfo, check_sizes, is_unified, n_spare, new_context
from llamamg.runner import ModelRunner
from llamamg.runner_pool import ContextPool
from llamamg.vocab import Vocabulary

# Native switches while the context of a decode group is made beside one for prompts: groups overlap with each other, so
# their contexts need no pipeline of their own, and a step of a few rows goes before a ubatch of a prompt.
DECODE_ONLY = {"one-copy": 1, "stream-priority": 1}
# And while the one for prompts is made: it leaves room on the device when told to (switch prefill-sms).
PROMPTS_ONLY = {"prefill-stream": 1}
# Without this patch one context may have the graph of another computed, and then samples its own logits of a step before.
SHARED_RPC = "graph-check-and-send"


@dataclass(frozen=True, slots=True)
class Contexts:
    """What an engine computes with."""

    layout: Layout
    runner: ModelRunner | ContextPool
    kv: KVCache

    @property
    def pointers(self) -> list[Any]:
        """Each llama_context that is not freed yet."""
        runners = self.runner.runners if isinstance(self.runner, ContextPool) else (self.runner,)
        return [runner.context for runner in runners if runner.context]


def check(config: Config) -> None:
    """Before anything is loaded: raise LoadError with a sentence where a batch is too small for what a context serves."""
    layout = layout_of(config.context, n_spare(config))
    for context in range(layout.n_contexts):
        check_sizes(config, layout.n_seq(context), n_ubatch(config.context, layout, context))


def make(lib: Library, handle: Any, config: Config, model: ModelInfo, vocab: Vocabulary) -> Contexts:
    """Make the contexts that the configuration asks for. Raises LoadError with a sentence."""
    c = config.context
    layout = layout_of(c, n_spare(config))
    if layout.n_contexts > 1 and is_unified(c):
        raise LoadError(
            "several contexts need a KV cache of their own for each slot: give --parallel N, not --kv-unified"
        )
    if layout.n_contexts > 1 and config.model.rpc and not has_patch(SHARED_RPC):
        raise LoadError(
            "several contexts on one rpc-server need a library that keeps their graphs apart: run `llamamg build`, or "
            "leave decode groups out"
        )
    runners: list[ModelRunner] = []
    parts: list[KVCache] = []
    for context in range(layout.n_contexts):
        try:
            runner, kv = _one(lib, handle, config, model, layout, context)
        except LoadError as error:
            if layout.n_contexts == 1:
                raise
            for made in runners:
                made.close()
            sentence = (
                f"{error}; or leave decode-groups out (--disable decode-groups): it makes {layout.n_contexts} contexts"
            )
            raise LoadError(sentence) from error
        if c.warmup:
            _warm_up(lib.llama, runner.context, vocab, kv)
        runners.append(runner)
        parts.append(kv)
    if layout.n_contexts == 1:
        return Contexts(layout, runners[0], parts[0])
    holders = only_gpus(config, lib.mg.devices())
    is_async = bool(holders) and all(device.asynchronous for device in holders)
    pool = ContextPool(runners, c.stall_s, is_async)
    return Contexts(layout, pool, ContextsKV(parts, layout, handover.best(lib.mg), pool.settle_one))


def _one(
    lib: Library, handle: Any, config: Config, model: ModelInfo, layout: Layout, context: int
) -> tuple[ModelRunner, KVCache]:
    llama, c = lib.llama, config.context
    n_seq = layout.n_seq(context)
    with lib.mg.held(_kind(layout, context)):
        pointer = new_context(lib, handle, config, n_seq, n_ubatch(c, layout, context))
    kv = KVCache(
        llama, pointer, is_recurrent=model.is_recurrent or model.is_hybrid, n_swa=0 if c.swa_full else model.n_swa
    )
    n_outputs = c.n_outputs_max or n_seq * (1 + c.n_draft_max)
    sizes = llama.llama_n_batch(pointer), llama.llama_n_ubatch(pointer)
    return ModelRunner(llama, lib.mg, pointer, *sizes, n_outputs, layout.first(context)), kv


def _kind(layout: Layout, context: int) -> dict[str, int]:
    """Native switches that a context is made with."""
    if not layout.prefill:
        return {}
    return DECODE_ONLY if context < len(layout.groups) else PROMPTS_ONLY


def _warm_up(llama: Any, context: Any, vocab: Vocabulary, kv: KVCache) -> None:
    """One decode of a couple of tokens: memory is touched and kernels are loaded before the first request."""
    llama.llama_set_warmup(context, True)
    tokens = [token for token in (vocab.bos, vocab.eos) if token >= 0] or [0]
    array = (llama.llama_token * len(tokens))(*tokens)
    llama.llama_decode(context, llama.llama_batch_get_one(array, len(tokens)))
    kv.clear()
    llama.llama_synchronize(context)
    llama.llama_set_warmup(context, False)
