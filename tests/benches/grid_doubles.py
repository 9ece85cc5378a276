"""What stands in for a server, a clock and a progress bar in tests of the grid."""

from __future__ import annotations

from typing import Any

from llamamg_benches.sides import Server


class Clock:
    """Time that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Bar:
    def update(self, n: int) -> None: ...
    def set_postfix_str(self, text: str) -> None: ...


class FakeServer(Server):
    """Answers from a dictionary."""

    def __init__(self, name: str, n_ctx: int = 4096, n_slots: int = 5, **meta: int) -> None:
        super().__init__(name, "http://127.0.0.1:1")
        self.answers: dict[str, Any] = {
            "/health": {"status": "ok"},
            "/props": {"default_generation_settings": {"n_ctx": n_ctx}, "total_slots": n_slots},
            "/v1/models": {"data": [{"meta": {"n_vocab": 1000, **meta}}]},
        }

    def get(self, path: str) -> Any:
        return self.answers[path]
