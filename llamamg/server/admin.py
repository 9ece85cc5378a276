"""The endpoints that tell about the server, and the one that switches plugins."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from typing import Any

import orjson

from llamamg.server.contract import EngineLike
from llamamg.server.errors import ApiError, bad_field, bad_request, not_supported
from llamamg.server.http import Call
from llamamg.server.metrics import CONTENT_TYPE, Metrics
from llamamg.server.prepare import parse
from llamamg.server.sampling import settings_json
from llamamg.server.service import Service


class Admin:
    """Handlers of the GET endpoints and of PATCH /plugins; each is called only while the engine is there."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._metrics: Metrics | None = None
        self._media_marker = f"<__media_{secrets.token_urlsafe(24)}__>"

    async def health(self, call: Call) -> None:
        """GET /health."""
        await call.answer(b'{"status":"ok"}')

    async def models(self, call: Call) -> None:
        """GET /v1/models: an Ollama-like list and OpenAI's."""
        service, engine = self._service, self._service.ready()
        name, server, model = service.model_name, service.config.server, engine.model
        entry = {
            "name": name,
            "model": name,
            "modified_at": "",
            "size": "",
            "digest": "",
            "type": "model",
            "description": "",
            "tags": [""],
            "capabilities": ["completion"],
            "parameters": "",
            "details": {
                "parent_model": "",
                "format": "gguf",
                "family": "",
                "families": [""],
                "parameter_size": "",
                "quantization_level": "",
            },
        }
        meta = {
            "vocab_type": model.vocab_type,
            "n_vocab": model.n_vocab,
            "n_ctx": engine.n_ctx_slot,
            "n_ctx_train": model.n_ctx_train,
            "n_embd": model.n_embd,
            "n_params": model.n_params,
            "size": model.size_bytes,
            "ftype": model.ftype,
        }
        data = {
            "id": name,
            "aliases": list(server.alias),
            "tags": list(server.tags),
            "object": "model",
            "created": int(time.time()),
            "owned_by": "llamacpp",
            "meta": meta,
        }
        await call.answer(orjson.dumps({"models": [entry], "object": "list", "data": [data]}))

    async def props(self, call: Call) -> None:
        """GET /props."""
        service, engine = self._service, self._service.ready()
        server, generation, model = service.config.server, service.config.generation, engine.model
        more = {
            "n_predict": generation.n_predict,
            "n_keep": generation.n_keep,
            "speculative_types": service.speculative_types(),  # llama-server says none here, whatever it drafts
        }
        out: dict[str, Any] = {
            "default_generation_settings": {
                "params": settings_json(generation.sampling, more, brief=True),
                "n_ctx": engine.n_ctx_slot,
            },
            "total_slots": engine.n_slots,
            "model_alias": service.model_name,
            "model_ftype": model.ftype,
            "model_path": str(model.path),
            "modalities": {"vision": False, "video": False, "audio": False},
            "media_marker": self._media_marker,
            "endpoint_slots": server.endpoint_slots,
            "endpoint_props": server.endpoint_props,
            "endpoint_metrics": server.endpoint_metrics,
            "ui": server.static_path is not None,
            "ui_settings": {},
            "chat_template": service.context.chat.source,
            "chat_template_caps": service.context.chat.caps,
            "bos_token": engine.vocab.bos_piece,
            "eos_token": engine.vocab.eos_piece,
            "build_info": service.fingerprint,
            "is_sleeping": False,
            "cors_proxy_enabled": False,
        }
        await call.answer(orjson.dumps(out))

    async def change_props(self, call: Call) -> None:
        """POST /props: llama-server has nothing to change there, but answers."""
        if not self._service.config.server.endpoint_props:
            raise not_supported("This server does not support changing global properties. Start it with `--props`")
        await call.answer(b'{"success":true}')

    async def slots(self, call: Call) -> None:
        """GET /slots; with ?fail_on_no_slot=1 a 503 when none is idle."""
        if not self._service.config.server.endpoint_slots:
            raise not_supported("This server does not support slots endpoint. Start it with `--slots`")
        views = self._service.ready().slot_views()
        if call.query("fail_on_no_slot") and all(view.is_processing for view in views):
            raise ApiError(503, "no slot available")
        speculative = self._service.speculative_types() != "none"
        await call.answer(orjson.dumps([_slot(view, speculative) for view in views]))

    async def metrics(self, call: Call) -> None:
        """GET /metrics."""
        engine = self._service.ready()
        if not self._service.config.server.endpoint_metrics:
            raise not_supported("This server does not support metrics endpoint. Start it with `--metrics`")
        if self._metrics is None:
            self._metrics = Metrics(engine)
        started = (b"process-start-time-unix", str(self._metrics.t_start).encode())
        await call.answer(self._metrics.text(), content_type=CONTENT_TYPE, headers=[started])

    async def plugins(self, call: Call) -> None:
        """GET /plugins."""
        await call.answer(orjson.dumps([_plugin(view) for view in self._service.ready().plugins.views()], default=str))

    async def switch_plugin(self, call: Call) -> None:
        """PATCH /plugins/NAME with {"enabled": bool}: takes effect between two steps, answers with the plugin's state."""
        engine = self._service.ready()
        name: str = call.scope["path_params"]["name"]
        body = parse(b"".join(await call.body(self._service.config.server.timeout_s)))
        enabled = body.get("enabled")
        if enabled is None:
            raise bad_request('Nothing to change: send {"enabled": true} or {"enabled": false}')
        if type(enabled) is not bool:
            raise bad_field("enabled", "must be true or false")
        if len(body) > 1:
            more = ", ".join(sorted(set(body) - {"enabled"}))
            raise bad_request(
                f"Only `enabled` can be changed in a running server, not {more}: options are set at the start"
            )
        if name not in {view.name for view in engine.plugins.views()}:
            known = ", ".join(sorted(view.name for view in engine.plugins.views())) or "none"
            raise ApiError(404, f"There is no plugin '{name}'. Known plugins: {known}")
        await _toggle(engine, name, enabled)
        view = next(view for view in engine.plugins.views() if view.name == name)
        await call.answer(orjson.dumps(_plugin(view), default=str))


async def _toggle(engine: EngineLike, name: str, enabled: bool) -> None:
    from llamamg.plugins import PluginError

    try:
        await asyncio.wrap_future(engine.call(lambda e: e.plugins.toggle(name, enabled)))
    except PluginError as error:
        raise ApiError(409, str(error)) from None


def _plugin(view: Any) -> dict[str, Any]:
    out = dataclasses.asdict(view)
    if hasattr(view, "state"):
        out["state"] = view.state
    return out


def _slot(view: Any, speculative: bool) -> dict[str, Any]:
    out: dict[str, Any] = {
        "id": view.id,
        "n_ctx": view.n_ctx,
        "speculative": speculative,
        "is_processing": view.is_processing,
    }
    if view.id_task >= 0:
        out |= {
            "id_task": view.id_task,
            "n_prompt_tokens": view.n_prompt_tokens,
            "n_prompt_tokens_processed": view.n_prompt_processed,
            "n_prompt_tokens_cache": view.n_prompt_cached,
            "params": view.params,
            "next_token": [
                {
                    "has_next_token": view.has_next_token,
                    "has_new_line": view.has_new_line,
                    "n_remain": view.n_remain,
                    "n_decoded": view.n_decoded,
                }
            ],
        }
    return out
