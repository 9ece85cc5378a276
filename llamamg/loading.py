"""From a configuration to an engine ready to start."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Mapping
from typing import Any

from llamamg import contexts
from llamamg import library as native
from llamamg.admission import Admission
from llamamg.arrange import Arranger
from llamamg.cells import NativeCells
from llamamg.checkpoint import CheckpointPolicy
from llamamg.completion import Completion
from llamamg.config import Config, ContextConfig
from llamamg.devices import split
from llamamg.engine import Engine
from llamamg.errors import LoadError, NativeError
from llamamg.hookcalls import HookCalls
from llamamg.kept import KeptState
from llamamg.kvcache import KVCache
from llamamg.layout import Layout, one_context
from llamamg.memory import check_memory, main_memory
from llamamg.model import ModelInfo, describe, is_unified, load_model, n_slots
from llamamg.modelfile import open_model
from llamamg.plugins import PluginError, PluginSet
from llamamg.request import Request, Timings
from llamamg.runner import Runner
from llamamg.sampler import Sampler
from llamamg.scheduler import Scheduler
from llamamg.shadow import Shadow
from llamamg.slot import Slot
from llamamg.stats import Stats
from llamamg.vocab import Vocabulary

# What of llama.cpp's own log is shown at each -lv: like llama-server, its information only from 4 on.
LOG_LEVELS = ("none", "error", "warn", "warn", "info", "debug")


def load(
    config: Config, plugins: PluginSet, progress: Callable[[float], None] | None = None, handle: Any = None
) -> Engine:
    """Load the library, the model and a context. `progress` gets the loaded fraction. Raises LoadError with a sentence.

    `handle` is a llama_model that is loaded already, as the configuration says; it stays its owner's.
    """
    try:
        lib = native.load(config.build)
    except native.LibraryNotFound as error:
        raise LoadError(str(error)) from error
    try:
        config = plugins.configure(config, lib.mg.devices())
        _connect_switches(lib, plugins, config.native_switches)
    except PluginError as error:
        raise LoadError(str(error)) from error
    for sentence in plugins.warnings:
        _warn(sentence)
    contexts.check(config)
    lib.mg.set_log(LOG_LEVELS[max(0, min(config.server.log_level, 5))])
    switches = {**plugins.native_switches(), **config.native_switches}
    header, pooled_keys = open_model(config.model.path), bool(switches.get("qsa"))
    llama, is_ours = lib.llama, handle is None
    if is_ours:
        config = split.resolve(lib, config, header, _say, pooled_keys)
        check_memory(config, header, lib.mg.devices(), _warn, pooled_keys, raw_keys=not switches.get("qsa-drop-raw"))
        handle = load_model(lib, config.model, progress)
    vocab = Vocabulary(llama, handle)
    model = describe(lib, handle, config.model.path, vocab.n_vocab, vocab.type, vocab.chat_template)
    made = contexts.make(lib, handle, config, model, vocab)
    runner, kv = made.runner, made.kv
    plugins.apply_switches = _adapting(lib, made, plugins.apply_switches)
    n_ctx_slot = slot_context(llama.llama_n_ctx_seq(runner.context), model.n_ctx_train, config.context)

    def new_sampler(request: Request) -> Sampler:
        return Sampler(llama, lib.mg, vocab, request.sampling, request.prompt, n_ctx_slot)

    def close() -> None:
        if is_ours:
            llama.llama_model_free(handle)

    engine = assemble(
        config,
        plugins,
        runner,
        kv,
        vocab,
        model,
        n_ctx_slot=n_ctx_slot,
        new_sampler=new_sampler,
        close=close,
        layout=made.layout,
    )
    engine.cells = cells = _cells(lib, made)
    if cells is not None and not cells.reason:
        kv.empty = cells.empty
    kv.cells_are_positions = not is_unified(config.context)
    if config.plugins.guard_replay:
        engine.shadow = engine.scheduler.watcher = Shadow(
            config, llama, runner, kv, vocab, plugins, n_slots(config.context)
        )
    return engine


def _cells(lib: native.Library, made: contexts.Contexts) -> NativeCells | None:
    """What sequences keep in the contexts; None in a build from before there was a way to say so."""
    if not hasattr(lib.mg.lib, "mg_cells_planes"):
        return None
    addresses = [ctypes.cast(pointer, ctypes.c_void_p).value or 0 for pointer in made.pointers]

    def locate(seq_id: int) -> tuple[int, int]:
        return addresses[made.layout.context(seq_id)], made.layout.local(seq_id)

    return NativeCells(lib.mg, locate)


def _say(sentence: str) -> None:
    print(f"llamamg: {sentence}", file=sys.stderr, flush=True)


def _warn(sentence: str) -> None:
    print(f"llamamg: warning: {sentence}", file=sys.stderr, flush=True)


def spare_collector() -> None:
    """What exists now stays: Python's collector need not look at it again. A full look takes as long as a decode step or two.

    For whoever loads one engine and keeps it; cycles among what is there are never collected afterwards.
    """
    gc.collect()
    gc.freeze()


def assemble(
    config: Config,
    plugins: PluginSet,
    runner: Runner,
    kv: KVCache,
    vocab: Vocabulary,
    model: ModelInfo,
    *,
    n_ctx_slot: int,
    new_sampler: Callable[[Request], Any],
    close: Callable[[], None] = lambda: None,
    layout: Layout | None = None,
) -> Engine:
    """Put the parts of an engine together; tests pass runners and memories of their own."""
    c, g = config.context, config.generation
    layout = layout or one_context(n_slots(c))
    slots = [Slot(i, i, context=layout.context(i)) for i in range(n_slots(c))]
    stats = Stats()
    calls = HookCalls(plugins.hooks, plugins.quarantine)

    def finished(request: Request, timings: Timings) -> None:
        if calls.hooks.request_finished:
            calls.each("request_finished", request, timings)

    def take_state(slot: Slot) -> KeptState | None:
        return calls.first("take_state", slot, check=_not_a_state) if calls.hooks.take_state else None

    arranger = Arranger(slots, kv, calls, stats)
    policy = CheckpointPolicy(
        c.n_ctx_checkpoints,
        c.checkpoint_min_step,
        runner.n_batch,
        runner.n_ubatch,
        kv,
        take_state,
        arranger.is_settled,
    )
    completion = Completion(
        vocab,
        kv,
        stats,
        n_ctx_slot=n_ctx_slot,
        context_shift=g.context_shift,
        special=g.special,
        finished=finished,
    )
    admission = Admission(
        slots,
        kv,
        policy,
        calls,
        n_ctx_slot=n_ctx_slot,
        similarity=g.slot_prompt_similarity,
        n_batch=runner.n_batch,
        moves_prompts=bool(layout.prefill),
        is_settled=arranger.is_settled,
    )
    scheduler = Scheduler(
        slots,
        kv,
        calls,
        completion,
        admission,
        policy,
        arranger,
        stats,
        runner,
        layout,
        n_prompt_local=c.n_prompt_local,
        n_batch=runner.n_batch,
        n_ubatch=runner.n_ubatch,
        n_draft_max=c.n_draft_max,
        quarantine=plugins.quarantine,
    )
    return Engine(
        config,
        scheduler=scheduler,
        runner=runner,
        vocab=vocab,
        model=model,
        calls=calls,
        plugins=plugins,
        n_ctx_slot=n_ctx_slot,
        new_sampler=new_sampler,
        view=completion.view,
        close=close,
    )


def _not_a_state(kept: KeptState) -> str | None:
    return None if isinstance(kept, KeptState) else f"{kept!r} is not a KeptState"


def slot_context(n_ctx: int, n_ctx_train: int, context: ContextConfig) -> int:
    """Tokens a slot may hold: as llama-server, no more than the model was trained with, unless its positions are stretched."""
    stretched = context.rope_scaling not in (None, "none") or context.rope_scale or context.rope_freq_scale
    if stretched or context.rope_freq_base or not 0 < n_ctx_train < n_ctx:
        return n_ctx
    _warn(
        f"a slot has room for {n_ctx} tokens and the model was trained with {n_ctx_train}: requests stop there "
        f"(--rope-scaling and --rope-scale stretch its positions; else -c {n_ctx_train} for each slot is enough)"
    )
    return n_ctx_train


def _connect_switches(lib: native.Library, plugins: PluginSet, given: Mapping[str, bool]) -> None:
    """Let plugins set native switches, now and at each toggle; what nobody names has its default."""

    def apply(wanted: Mapping[str, int]) -> None:
        chosen = {**wanted, **given}  # the command line has the last word
        for switch in lib.mg.switches():
            lib.mg.set_switch(switch.name, int(chosen.get(switch.name, switch.default)))

    wanted = plugins.native_switches()
    known = {switch.name for switch in lib.mg.switches()}
    for name in (*wanted, *given):
        if name not in known:
            raise LoadError(
                f"the native switch {name} is not in this build: run `llamamg build`, or leave its plugin off"
            )
    apply(wanted)
    plugins.apply_switches = apply


def _adapting(
    lib: native.Library, made: contexts.Contexts, apply: Callable[[dict[str, int]], None] | None
) -> Callable[[dict[str, int]], None]:
    """Turn switches and make each context ready for them; where that is impossible, all is as before (PluginError)."""

    def adapt() -> list[str]:
        return [done for pointer in made.pointers if (done := lib.mg.adapt(pointer, main_memory()[0]))]

    def turn(wanted: dict[str, int]) -> None:
        made.runner.settle()  # nothing is turned while a context computes
        before = {switch.name: switch.value for switch in lib.mg.switches()}
        if apply is not None:
            apply(wanted)
        try:
            done = adapt()
        except NativeError as error:
            for name, value in before.items():
                lib.mg.set_switch(name, value)
            adapt()
            raise PluginError(f"this context cannot switch: {error}; restart with the switch as wanted") from error
        for sentence in done:
            print(f"llamamg: {sentence}", file=sys.stderr, flush=True)

    return turn
