"""The ASGI app: CORS, loading state and keys before anything else, then the routes. Errors of handlers become JSON here.

`Server: llamamg` and the CORS headers are on every answer. Unknown paths and methods get llama-server's 404.
"""

from __future__ import annotations

import hmac
import traceback
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Mount, Route, Router
from starlette.staticfiles import StaticFiles

from llamamg.config import Config, ServerConfig
from llamamg.plugins.routes import PluginRoutes
from llamamg.server.admin import Admin
from llamamg.server.errors import ApiError, not_supported
from llamamg.server.generate import post
from llamamg.server.http import Call, ClientGone, Headers, Receive, Scope
from llamamg.server.prepare import Kind
from llamamg.server.service import Service
from llamamg.server.slots import SlotActions

Handler = Callable[[Call], Awaitable[None]]
PUBLIC = ("/health", "/v1/health")
GENERATION: dict[str, Kind] = {
    "/completion": "completion",
    "/completions": "completion",
    "/v1/completions": "oai_completion",
    "/chat/completions": "chat",
    "/v1/chat/completions": "chat",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
    "/apply-template": "apply_template",
}
# llama-server has these; saying so is better than a 404 that looks like a typing mistake.
NOT_YET = {
    "embeddings": ("/embedding", "/embeddings", "/v1/embeddings"),
    "reranking": ("/rerank", "/reranking", "/v1/rerank", "/v1/reranking"),
    "infill": ("/infill",),
    "the Anthropic messages API": ("/v1/messages", "/v1/messages/count_tokens"),
    "the OpenAI responses API": (
        "/responses",
        "/v1/responses",
        "/responses/input_tokens",
        "/v1/responses/input_tokens",
    ),
    "counting the tokens of a chat": ("/chat/completions/input_tokens", "/v1/chat/completions/input_tokens"),
    "LoRA adapters": ("/lora-adapters",),
}


def build_app(config: Config) -> App:
    """The app without an engine: it answers 503 until `app.state.service.attach(engine, …)` was called on its loop."""
    return App(config)


class Endpoint:
    """The handlers of one path by method."""

    def __init__(self, handlers: dict[str, Handler]) -> None:
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Any) -> None:
        method = "GET" if scope["method"] == "HEAD" else scope["method"]  # uvicorn leaves the body out
        handler = self._handlers.get(method)
        if handler is None:
            raise file_not_found()
        await handler(scope["llamamg.call"])


class App:
    """ASGI callable. `state.service` is shared by all endpoints."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.service = Service(config)
        self.state = SimpleNamespace(service=self.service)
        self._prefix = config.server.api_prefix.rstrip("/")
        self._router = Router(self._routes(), redirect_slashes=False, default=_default)
        self._keys = [key.encode() for key in config.server.api_keys]

    def _routes(self) -> list[BaseRoute]:
        admin, service = Admin(self.service), self.service
        paths: dict[str, dict[str, Handler]] = {
            "/health": {"GET": admin.health},
            "/v1/health": {"GET": admin.health},
            "/models": {"GET": admin.models},
            "/v1/models": {"GET": admin.models},
            "/props": {"GET": admin.props, "POST": admin.change_props},
            "/slots": {"GET": admin.slots},
            "/slots/{id_slot}": {"POST": SlotActions(service)},
            "/metrics": {"GET": admin.metrics},
            "/plugins": {"GET": admin.plugins},
            "/plugins/{name}": {"PATCH": admin.switch_plugin},
        }
        for path, kind in GENERATION.items():
            paths[path] = {"POST": _generation(service, kind)}
        for what, missing in NOT_YET.items():
            for path in missing:
                paths[path] = {"GET": _missing(what), "POST": _missing(what)}
        routes: list[BaseRoute] = [Route(self._prefix + path, Endpoint(handlers)) for path, handlers in paths.items()]
        of_plugins = PluginRoutes(lambda: service.ready().plugins, self._prefix)
        routes.append(Route(self._prefix + "/plugins/{name}/{path:path}", of_plugins))
        if self.config.server.static_path is not None:
            files = StaticFiles(directory=self.config.server.static_path, html=True)
            routes.append(Mount(self._prefix or "/", app=files))
        return routes

    async def __call__(self, scope: Scope, receive: Receive, send: Any) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(self.service, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1000})
            return
        call = Call(scope, receive, send, [(b"server", b"llamamg"), *cors_headers(self.config.server, scope)])
        scope["llamamg.call"] = call
        if scope["method"] == "OPTIONS":
            await _preflight(call, self.config.server)
            return
        try:
            self.service.ready()
            self._check_key(call)
            await self._router(scope, receive, send)
        except ApiError as error:
            await call.error(error)
        except ClientGone:
            return
        except HTTPException:  # from the static files
            await call.error(file_not_found())
        except Exception:
            traceback.print_exc()
            await call.error(ApiError(500, "The server failed to answer; its log has the details."))

    def _check_key(self, call: Call) -> None:
        if not self._keys or call.scope["path"].removeprefix(self._prefix) in PUBLIC:
            return
        given = call.header(b"authorization") or call.header(b"x-api-key")
        key = given.removeprefix("Bearer ").encode()
        matches = [hmac.compare_digest(key, known) for known in self._keys]  # all of them: no early exit to measure
        if True not in matches:
            raise ApiError(401, "Invalid API Key")


def file_not_found() -> ApiError:
    """What llama-server says for a path it does not know."""
    return ApiError(404, "File Not Found")


async def _default(scope: Scope, receive: Receive, send: Any) -> None:
    raise file_not_found()


def _generation(service: Service, kind: Kind) -> Handler:
    async def handler(call: Call) -> None:
        await post(service, call, kind)

    return handler


def _missing(what: str) -> Handler:
    async def handler(call: Call) -> None:
        raise not_supported(f"This server does not support {what}")

    return handler


def cors_headers(server: ServerConfig, scope: Scope) -> Headers:
    """Access-Control-Allow-Origin as llama-server sets it."""
    origin = next((value for name, value in scope["headers"] if name == b"origin"), b"")
    if server.cors_origins == "*" and server.cors_credentials:
        return [(b"access-control-allow-origin", origin)]  # "*" would forbid credentials
    if server.cors_origins == "localhost":
        return [(b"access-control-allow-origin", origin)] if _is_localhost(origin) else []
    return [(b"access-control-allow-origin", server.cors_origins.encode())]


def _is_localhost(origin: bytes) -> bool:
    try:
        host = urlsplit(origin.decode("latin-1")).hostname
    except ValueError:
        return False
    return host in ("localhost", "127.0.0.1", "::1")


async def _preflight(call: Call, server: ServerConfig) -> None:
    fields: Headers = [
        (b"access-control-allow-credentials", b"true" if server.cors_credentials else b"false"),
        (b"access-control-allow-methods", server.cors_methods.encode()),
        (b"access-control-allow-headers", server.cors_headers.encode()),
    ]
    await call.answer(b"", content_type=b"text/html", headers=fields)


async def _lifespan(service: Service, receive: Receive, send: Any) -> None:
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        else:
            service.close()
            await send({"type": "lifespan.shutdown.complete"})
            return
