"""Time of every layer of a loaded model on the device that holds it.

libllama can ask about every node of a graph; at the nodes we want, it computes what is due on that device, waits, and tells
us. Wanting the last node of each layer gives the time of each layer without any patch. The waiting costs a few µs a layer
and keeps stages from overlapping, so these are times of stages, not of a step.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from llamamg.config import Config
from llamamg.devices.ggml import DeviceError, functions, touch
from llamamg.library import Library
from llamamg.model import CACHE_TYPES, FLASH_ATTN, default_threads

LAYER_END = re.compile(rb"l_(?:out|last)-(\d+)$")
NOISE_S = 20e-6  # between two questions with nothing computed: the question itself
N_WARM, N_STEPS, N_PROMPT = 4, 16, 512


@dataclass(slots=True)
class Times:
    """Seconds of one step, or medians of several."""

    layers: list[float]
    before: list[float]  # what came before each layer: input and hops
    head: float

    def json(self) -> dict[str, Any]:
        return {
            "layers_ms": [round(1e3 * s, 4) for s in self.layers],
            "before_ms": [round(1e3 * s, 4) for s in self.before],
            "head_ms": round(1e3 * self.head, 4),
        }


def _nothing(_: int) -> None:
    pass


@dataclass(slots=True)
class LayerClock:
    """Hears about every node. One step between `begin` and `end`."""

    n_layer: int
    name_of: Callable[[int], bytes]
    finish: Callable[[int], None] = _nothing  # where waiting is not enough
    clock: Callable[[], float] = time.perf_counter
    now: Times = field(init=False)
    _last: float = 0.0
    _pending: float = 0.0
    _wanted: int = -1

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.now = Times([0.0] * self.n_layer, [0.0] * self.n_layer, 0.0)
        self._pending = 0.0
        self._wanted = -1
        self._last = self.clock()

    def on_node(self, tensor: int, ask: bool) -> bool:
        """Whether we want this node; with `ask` off, it is computed and the time since the question was for its group."""
        if not ask:
            self.finish(tensor)
        gap = self.clock() - self._last
        if not ask:
            if self._wanted >= 0:
                self.now.layers[self._wanted] += gap
            want = True
        else:
            if gap > NOISE_S:
                self._pending += gap
            match = LAYER_END.match(self.name_of(tensor) or b"")
            layer = int(match.group(1)) if match else -1
            want = 0 <= layer < self.n_layer
            if want:
                self._wanted = layer
                self.now.before[layer] += self._pending
                self._pending = 0.0
        self._last = self.clock()
        return want

    def end(self) -> Times:
        """The step is over and waited for: the rest was the head."""
        self.now.head = self._pending + self.clock() - self._last
        return self.now


def middle(steps: Sequence[Times]) -> Times:
    """Medians."""
    return Times(
        [median(column) for column in zip(*(step.layers for step in steps), strict=True)],
        [median(column) for column in zip(*(step.before for step in steps), strict=True)],
        median(step.head for step in steps),
    )


def measure(
    library: Library, model: Any, config: Config, n_layer: int, told: Callable[[], None] = lambda: None
) -> dict[str, Times]:
    """`decode`: one token; `prefill`: a ubatch of the prompt. Raises DeviceError where the graph names no layers."""
    llama, c = library.llama, config.context
    g = functions(library.dir)
    remote = any(device.backend == "RPC" for device in library.mg.devices())
    clock = LayerClock(n_layer, g.ggml_get_name, (lambda tensor: touch(g, tensor)) if remote else _nothing)
    n_prompt = min(N_PROMPT, c.n_ubatch)
    callback = llama.ggml_backend_sched_eval_callback(lambda tensor, ask, _: clock.on_node(tensor, ask))
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_seq_max, params.n_outputs_max = 4 * n_prompt + 256, 1, 1
    params.n_batch = params.n_ubatch = n_prompt
    params.n_threads = c.n_threads if c.n_threads > 0 else default_threads()
    params.n_threads_batch = c.n_threads_batch if c.n_threads_batch > 0 else params.n_threads
    params.type_k, params.type_v = CACHE_TYPES[c.cache_type_k], CACHE_TYPES[c.cache_type_v]
    params.flash_attn_type, params.offload_kqv = FLASH_ATTN[c.flash_attn], c.offload_kqv
    params.op_offload, params.no_perf = c.op_offload, True
    params.cb_eval = callback
    context = llama.llama_init_from_model(model, params)
    if not context:
        raise DeviceError("no context for measuring the stages could be made: free some memory on the devices")
    n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    batch = llama.llama_batch_init(n_prompt, 0, 1)
    n_past = 0

    def step(n: int) -> Times:
        nonlocal n_past
        for i in range(n):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = (7919 * (n_past + i)) % n_vocab, n_past + i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, i == n - 1
        batch.n_tokens = n
        clock.begin()
        status = llama.llama_decode(context, batch)
        llama.llama_synchronize(context)
        if status != 0:
            raise DeviceError(f"llama_decode returned {status} while the stages were measured: see the log above")
        n_past += n
        told()
        return clock.end()

    try:
        prefill = [step(n_prompt) for _ in range(3)][1:]
        decode = [step(1) for _ in range(N_WARM + N_STEPS)][N_WARM:]
    finally:
        llama.llama_batch_free(batch)
        llama.llama_free(context)
    if not any(decode[0].layers):
        raise DeviceError("the graph of this architecture does not name its layers: their time cannot be measured")
    return {"decode": middle(decode), "prefill": middle(prefill)}
