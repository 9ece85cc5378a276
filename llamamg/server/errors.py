"""The one error shape clients see: `{"error": {"code", "message", "type"}}`, as llama-server sends it."""

from __future__ import annotations

from typing import Any

import orjson

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "invalid_request_error",
    409: "invalid_request_error",
    413: "invalid_request_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
}


class ApiError(Exception):
    """A request that gets an error answer. `type` follows from `code` unless given; `extra` is added to the object."""

    def __init__(self, code: int, message: str, type: str | None = None, extra: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.type = type or TYPES[code]
        self.extra = extra or {}

    def __reduce__(self) -> tuple[Any, ...]:
        return ApiError, (self.code, self.message, self.type, self.extra)

    def object(self) -> dict[str, Any]:
        """The value of `error`."""
        return {"code": self.code, "message": self.message, "type": self.type, **self.extra}

    def body(self) -> bytes:
        """The whole JSON answer."""
        return orjson.dumps({"error": self.object()})


def bad_request(message: str) -> ApiError:
    """400 with a sentence."""
    return ApiError(400, message)


def bad_field(name: str, problem: str) -> ApiError:
    """400 that names the field."""
    return ApiError(400, f"Field '{name}': {problem}")


def not_supported(message: str) -> ApiError:
    """501 with a sentence."""
    return ApiError(501, message)


def context_exceeded(n_prompt: int, n_ctx: int) -> ApiError:
    """The prompt has more tokens than a slot can hold."""
    message = f"request ({n_prompt} tokens) exceeds the available context size ({n_ctx} tokens), try increasing it"
    return ApiError(400, message, "exceed_context_size_error", {"n_prompt_tokens": n_prompt, "n_ctx": n_ctx})
