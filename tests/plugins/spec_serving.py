"""spec in an engine without a model: stand-in models that repeat themselves or never do, and what is served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from llamamg.config import Config, ContextConfig, ModelConfig, PluginsConfig
from llamamg.plugins import PluginSet
from llamamg.request import Finished
from llamamg.testing import fake_engine, run
from llamamg_plugins.spec import Spec

PHRASE = b"the quick brown fox jumps over the lazy dog; "


def repeating(sequence: Any, so_far: list[int]) -> int:
    """A model that writes a phrase again and again, from wherever the prompt left off."""
    return PHRASE[(len(so_far) - sequence.n_prompt) % len(PHRASE)]


def counting(sequence: Any, so_far: list[int]) -> int:
    """A model that never says the same twice in a row of 12."""
    n = len(so_far)
    return 33 + (n * n * 7 + n // 5) % 90


class Serving:
    """An engine with the plugin on; `finish` answers requests sent together."""

    def __init__(
        self,
        n_slots: int = 1,
        *,
        model: Any = repeating,
        slow: dict[int, float] | None = None,
        by_token: Callable[[int], float] | None = None,
        n_batch: int = 512,
        **options: Any,
    ) -> None:
        given = {"type": "ngram-map-k4v"} | {key.replace("_", "-"): str(value) for key, value in options.items()}
        plugins_config = PluginsConfig(enable=("spec",), only=True, options={"spec": given})
        plugins = PluginSet.discover(plugins_config)
        config = Config(ModelConfig(Path("fake.gguf")), ContextConfig(n_parallel=n_slots), plugins=plugins_config)
        config = plugins.configure(config, [])
        self.engine, self.runner, self.events = fake_engine(
            n_slots, plugins=plugins, config=config, next_token=model, n_ctx_slot=2048, n_batch=n_batch
        )
        self.taken_s: list[float] = []  # by each step, where `by_token` says so
        self.plugin: Spec = plugins._members["spec"].instance
        if slow is not None or by_token is not None:
            collect = self.runner.collect

            def slowly() -> Any:
                done = collect()
                if done is not None and by_token is not None:
                    done.elapsed_s = by_token(done.batch.n_tokens)
                    self.taken_s.append(done.elapsed_s)
                elif done is not None and slow is not None:
                    done.elapsed_s = slow.get(sum(row.n_logits for row in done.batch.rows), max(slow.values()))
                return done

            self.engine.runner = _Runner(self.runner, slowly)  # type: ignore[assignment]

    def finish(self, *requests: Any) -> list[Finished]:
        for request in requests:
            self.engine.submit(request)
        run(self.engine)
        ends = {id_: event for id_, event in self.events if isinstance(event, Finished)}
        return [ends[request.id] for request in requests]

    @property
    def widest(self) -> int:
        """Drafted tokens of the widest row."""
        return max(n_logits - 1 for batch in self.runner.batches for *_, n_logits in batch if n_logits)


class _Runner:
    def __init__(self, runner: Any, collect: Callable[[], Any]) -> None:
        self._runner, self.collect = runner, collect

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def plain(request: Any, model: Any) -> Finished:
    engine, _, events = fake_engine(1, next_token=model, n_ctx_slot=2048, n_batch=512)
    engine.submit(replace(request, id=10**9))
    run(engine)
    return next(event for _, event in events if isinstance(event, Finished))


def request_of(served: Serving) -> Any:
    """The sequence that runs."""
    return served.engine.scheduler.running[0]
