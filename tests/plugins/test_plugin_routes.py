"""Routes and metrics of a plugin's own, over HTTP."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client import Counter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from llamamg.plugins import PluginSet
from llamamg.plugins.routes import PluginRoutes
from llamamg.server.metrics import Metrics
from llamamg.testing import ask, fake_engine, run


async def depth(request: Request) -> PlainTextResponse:
    return PlainTextResponse(f"depth {request.path_params['n']}")


def get(plugins: PluginSet, path: str) -> tuple[int, str]:
    app = Starlette(routes=[Route("/api/plugins/{name}/{path:path}", PluginRoutes(lambda: plugins, "/api"))])

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as client:
            return await client.get(path)

    response = asyncio.run(ask())
    return response.status_code, response.text


def test_routes_answer_while_the_plugin_is_on(make: Any) -> None:
    with_routes = make.plugin("a", {"register_routes": lambda self: [Route("/depth/{n:int}", depth)]})
    plugins = make.on(with_routes, make.plugin("b"))
    plugins.start(SimpleNamespace(slots=[]))
    assert get(plugins, "/api/plugins/a/depth/3") == (200, "depth 3")
    assert get(plugins, "/api/plugins/a/nothing")[0] == 404
    assert get(plugins, "/api/plugins/b/depth/3")[0] == 404
    assert get(plugins, "/api/plugins/c/depth/3")[0] == 404
    plugins.toggle("a", False)
    assert get(plugins, "/api/plugins/a/depth/3")[0] == 404


def test_metrics_have_a_plugins_own_counters_and_its_time(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def register(self: Any, metrics: Any) -> None:
        Counter("llamamg:a_hits", "hits", registry=metrics).inc(3)

    monkeypatch.setenv("LLAMAMG_TRACE_HOOKS", "1")
    plugins = make.on(make.plugin("a", {"register_metrics": register, "idle": lambda self: None}))
    engine, _, _ = fake_engine(2, plugins=plugins)
    plugins.start(engine)
    engine.submit(ask("hello", n_predict=2))
    run(engine)
    page = Metrics(engine).text().decode()
    assert "llamamg:a_hits_total 3.0" in page
    assert 'llamamg:plugin_enabled{plugin="a"} 1.0' in page
    assert 'llamamg:hook_seconds_total{hook="idle",plugin="a"}' in page
