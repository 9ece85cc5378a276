"""The HTTP routes of plugins, below /plugins/NAME/ of the server."""

from __future__ import annotations

from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from llamamg.plugins.pluginset import PluginSet


class PluginRoutes:
    """An ASGI app for the path `…/plugins/{name}/{path:path}`; `plugins` is asked per request, since loading takes a while.

    Raises HTTPException(404) for a plugin that is off or has no such route.
    """

    def __init__(self, plugins: Callable[[], PluginSet], prefix: str = "") -> None:
        self._plugins = plugins
        self._prefix = f"{prefix}/plugins/"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        plugins = self._plugins()
        name, _, rest = scope["path"].removeprefix(self._prefix).partition("/")
        if name not in plugins.routes or name not in plugins.enabled():
            raise HTTPException(404, f"plugin {name} is off, or has no routes")
        inner = {**scope, "path": f"/{rest}", "raw_path": f"/{rest}".encode(), "root_path": ""}
        await Router(plugins.routes[name], redirect_slashes=False)(inner, receive, send)
