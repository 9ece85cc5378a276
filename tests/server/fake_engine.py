"""An engine without a model: a script per request says which events come, a thread delivers them as the real one does."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llamamg.config import Config, GenerationConfig, ModelConfig, ServerConfig
from llamamg.hooks import Hooks
from llamamg.plugins import PluginError
from llamamg.request import Delta, Event, Failed, Finished, FinishReason, Progress, Request, Started, Timings, TokenProb
from llamamg.server.prepare import PrepareContext
from llamamg.slot import SlotView
from llamamg.stats import Stats

SPECIALS = ("<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class FakeVocab:
    """A token per byte, and two special ones."""

    n_vocab = 256 + len(SPECIALS)
    bos = -1
    eos = 257
    add_bos = False
    bos_piece = ""
    eos_piece = SPECIALS[1]
    chat_template: str | None = TEMPLATE

    def tokenize(self, text: str | bytes, add_special: bool, parse_special: bool) -> Any:
        data = text.encode() if isinstance(text, str) else text
        out: list[int] = []
        while data:
            for i, special in enumerate(SPECIALS):
                if parse_special and data.startswith(special.encode()):
                    out.append(256 + i)
                    data = data[len(special) :]
                    break
            else:
                out.append(data[0])
                data = data[1:]
        return np.array(out, np.int32)

    def piece(self, token: int, special: bool = True) -> bytes:
        if token < 256:
            return bytes([token])
        return SPECIALS[token - 256].encode() if special else b""

    def detokenize(self, tokens: Any) -> str:
        return b"".join(self.piece(int(t)) for t in tokens).decode("utf-8", "replace")


class FakeChat:
    """The template above in Python, so that most tests need no native library."""

    source = TEMPLATE
    tool_syntax: str | None = None
    caps = dict.fromkeys(
        (
            "supports_object_arguments",
            "supports_parallel_tool_calls",
            "supports_preserve_reasoning",
            "supports_reasoning_effort",
            "supports_string_content",
            "supports_system_role",
            "supports_tool_calls",
            "supports_tools",
            "supports_typed_content",
        ),
        False,
    )

    def render(self, messages: Any, tools: Any = None, add_generation_prompt: bool = True, kwargs: Any = None) -> str:
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")


@dataclass
class FakeModel:
    name: str = "fake"
    path: str = "models/fake.gguf"
    architecture: str = "llama"
    ftype: str = "Q4_1"
    n_params: int = 1000
    size_bytes: int = 2000
    n_ctx_train: int = 8192
    n_embd: int = 64
    n_layer: int = 1
    n_vocab: int = FakeVocab.n_vocab
    vocab_type: int = 2


@dataclass
class FakePluginView:
    name: str
    enabled: bool = True
    effect: int = 3
    toggle: str = "step"


class FakePlugins:
    """Two plugins: `gate` can be switched, `fixed` cannot."""

    def __init__(self) -> None:
        self._views = {"gate": FakePluginView("gate"), "fixed": FakePluginView("fixed", toggle="restart")}
        self.hooks = Hooks()
        self.toggled_on: set[str] = set()  # names of the threads that toggled

    def views(self) -> list[FakePluginView]:
        return list(self._views.values())

    def toggle(self, name: str, enabled: bool) -> None:
        self.toggled_on.add(threading.current_thread().name)
        if name == "fixed":
            raise PluginError("fixed can only be switched by a restart: start with --disable fixed")
        self._views[name].enabled = enabled


Step = list[Event] | threading.Event | float
Script = Callable[[Request], Iterator[Step]]


def finished(request: Request, text: str, **more: Any) -> Finished:
    """A Finished with plausible numbers for a text of one token per byte."""
    n = len(text.encode())
    values: dict[str, Any] = {
        "reason": FinishReason.LIMIT,
        "text": text,
        "tail": "",
        "tokens": tuple(text.encode()) if request.return_tokens else (),
        "n_prompt": len(request.prompt),
        "n_decoded": n,
        "n_cached_slot": len(request.prompt) + n - 1,
        "id_slot": 0,
        "timings": Timings(cache_n=1, prompt_n=len(request.prompt) - 1, prompt_ms=2.0, predicted_n=n, predicted_ms=3.0),
    }
    return Finished(**{**values, **more})


def speak(text: str = "hello") -> Script:
    """One step per character, then the end; what the request asks for (progress, probabilities) is there."""

    def script(request: Request) -> Iterator[Step]:
        n_prompt = len(request.prompt)
        n_probs = request.sampling.n_probs

        def probs(character: str) -> tuple[TokenProb, ...]:
            token = character.encode()[0]
            top = tuple((token if i == 0 else (token + i) % 256, -0.5 - i) for i in range(n_probs))
            return (TokenProb(token, -0.5, top),) if n_probs else ()

        first: list[Event] = [Started(0, 1)]
        if request.return_progress:
            timings = Timings(cache_n=1) if request.timings_per_token else None
            first += [Progress(n_prompt, 1, 1, 0.0, timings), Progress(n_prompt, 1, n_prompt, 1.7, timings)]
        yield first
        shown = text if request.n_predict < 0 else text[: max(request.n_predict, 1)]
        if request.stream:
            for i, c in enumerate(shown):
                timings = Timings(predicted_n=i + 1) if request.timings_per_token else None
                yield [Delta(c, tuple(c.encode()), i + 1, probs(c), timings)]
        every = tuple(p for c in shown for p in probs(c))
        yield [finished(request, shown, probs=every)]

    return script


def refuse(failed: Failed) -> Script:
    """Fail before a slot was found."""

    def script(request: Request) -> Iterator[Step]:
        yield [failed]

    return script


@dataclass
class _Running:
    request: Request
    steps: Iterator[Step]
    waiting: threading.Event | None = None


class FakeEngine:
    """Runs the scripts of all requests side by side, a step of each per round; `n_slots` at a time, the rest waits."""

    def __init__(self, n_slots: int = 2, n_ctx_slot: int = 512) -> None:
        self.n_slots, self.n_ctx_slot = n_slots, n_ctx_slot
        self.vocab, self.model, self.stats, self.plugins = FakeVocab(), FakeModel(), Stats(), FakePlugins()
        self.deliver: Callable[[list[tuple[int, Event]]], None] = lambda pairs: None
        self.script: Script = speak()
        self.requests: list[Request] = []  # as submitted
        self.begun: list[int] = []  # ids that got a slot
        self.cancelled: list[int] = []
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._queue: list[_Running] = []
        self._running: list[_Running] = []
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def idle(self) -> bool:
        return not self._running and not self._queue

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, timeout_s: float = 5.0) -> None:
        self._inbox.put(None)
        self._thread.join(timeout_s)

    def submit(self, request: Request) -> None:
        self.requests.append(request)
        self._inbox.put(lambda: self._queue.append(_Running(request, self.script(request))))

    def cancel(self, request_id: int) -> None:
        def cancel() -> None:
            self.cancelled.append(request_id)
            self._queue = [r for r in self._queue if r.request.id != request_id]
            self._running = [r for r in self._running if r.request.id != request_id]

        self._inbox.put(cancel)

    def call(self, fn: Callable[[Any], Any]) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(fn(self))
            except Exception as error:
                future.set_exception(error)

        self._inbox.put(run)
        return future

    def slot_views(self) -> list[SlotView]:
        views = [SlotView(i, self.n_ctx_slot, is_processing=i < len(self._running)) for i in range(self.n_slots)]
        for view, request in zip(views, self.requests, strict=False):
            view.id_task, view.params = request.id, request.echo_settings
        return views

    def _run(self) -> None:
        while True:
            try:
                message = self._inbox.get(timeout=0.002)
                if message is None:
                    return
                message()
                continue
            except queue.Empty:
                pass
            while self._queue and len(self._running) < self.n_slots:
                running = self._queue.pop(0)
                self.begun.append(running.request.id)
                self._running.append(running)
            pairs: list[tuple[int, Event]] = []
            for running in list(self._running):
                self._step(running, pairs)
            if pairs:
                self.deliver(pairs)

    def _step(self, running: _Running, pairs: list[tuple[int, Event]]) -> None:
        if running.waiting is not None and not running.waiting.is_set():
            return
        step = next(running.steps, None)
        running.waiting = step if isinstance(step, threading.Event) else None
        if isinstance(step, list):
            pairs += [(running.request.id, event) for event in step]
        if step is None or (isinstance(step, list) and isinstance(step[-1], Finished | Failed)):
            self._running.remove(running)


def fake_config(**server: Any) -> Config:
    """A configuration around a model file that is never opened."""
    return Config(model=ModelConfig(Path("models/fake.gguf")), server=ServerConfig(**{"alias": ("smol",), **server}))


def fake_context(n_ctx_slot: int = 512, n_slots: int = 2, generation: GenerationConfig | None = None) -> PrepareContext:
    """What `prepare` needs, from the fakes."""
    return PrepareContext(FakeVocab(), FakeChat(), generation or GenerationConfig(), n_ctx_slot, n_slots, 30.0)  # type: ignore[arg-type]
