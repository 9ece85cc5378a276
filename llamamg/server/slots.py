"""POST /slots/ID?action=save|restore|erase."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import orjson

from llamamg.server.errors import ApiError, bad_request, not_supported
from llamamg.server.http import Call
from llamamg.server.prepare import parse
from llamamg.server.service import Service
from llamamg.slotfile import NotCopied, SlotBusy, erase_slot, restore_slot, save_slot
from llamamg.statefile import StateFileError
from llamamg.statefile.write import confined, remove_leftovers

T = TypeVar("T")
RETRY_S = 0.02  # a busy slot is waited for, as llama-server does


class SlotActions:
    """Answers are llama-server's, and so are errors where it has them."""

    def __init__(self, service: Service) -> None:
        self._service = service
        folder = service.config.server.slot_save_path
        if folder is not None:
            remove_leftovers(folder)

    async def __call__(self, call: Call) -> None:
        folder = self._service.config.server.slot_save_path
        if folder is None:
            raise not_supported("This server does not support slots action. Start it with `--slot-save-path`")
        id_slot, action = self._slot(call.scope["path_params"]["id_slot"]), call.query("action")
        if action == "erase":
            n = await self._wait(lambda: erase_slot(self._service.ready(), id_slot))
            await call.answer(orjson.dumps({"id_slot": id_slot, "n_erased": n}))
            return
        if action not in ("save", "restore"):
            raise bad_request("Invalid action")
        name, path = await self._file(call, folder)
        act = save_slot if action == "save" else restore_slot
        started = time.perf_counter()
        try:
            n_tokens, n_bytes = await self._wait(lambda: act(self._service.ready(), id_slot, path))
        except NotCopied as error:
            raise not_supported(f"Slots of this model cannot be saved: {error}") from None
        except StateFileError as error:
            raise bad_request(f"Unable to restore slot from '{name}': {error}") from None
        except FileNotFoundError:
            raise bad_request(f"Unable to restore slot: there is no file '{name}'") from None
        except OSError as error:
            raise ApiError(500, f"Unable to {action} slot: {_sentence(error)}") from None
        except RuntimeError as error:
            raise ApiError(500, f"Unable to {action} slot: {error}") from None
        took = {f"{action}_ms": round(1e3 * (time.perf_counter() - started), 3)}
        done = {"n_saved": n_tokens, "n_written": n_bytes} if action == "save" else {}
        done |= {"n_restored": n_tokens, "n_read": n_bytes} if action == "restore" else {}
        await call.answer(orjson.dumps({"id_slot": id_slot, "filename": name, **done, "timings": took}))

    def _slot(self, text: str) -> int:
        is_number = text.isascii() and text.isdecimal() and len(text) < 10
        if not is_number or int(text) >= self._service.ready().n_slots:
            raise bad_request("Invalid slot ID")
        return int(text)

    async def _file(self, call: Call, folder: Path) -> tuple[str, Path]:
        body: dict[str, Any] = parse(b"".join(await call.body(self._service.config.server.timeout_s)))
        name = body.get("filename")
        if not isinstance(name, str):
            raise bad_request("Invalid filename")
        try:
            return name, confined(folder, name)
        except StateFileError as error:
            raise bad_request(str(error)) from None

    async def _wait(self, act: Callable[[], T]) -> T:
        """Do it on a thread, once the slot is idle."""
        until = time.monotonic() + self._service.config.server.timeout_s
        while True:
            try:
                return await asyncio.to_thread(act)
            except SlotBusy:
                if time.monotonic() > until:
                    raise ApiError(503, "the slot stayed busy for as long as a request may take") from None
                await asyncio.sleep(RETRY_S)


def _sentence(error: OSError) -> str:
    known = {
        errno.ENOSPC: "the disk is full: free some space, or choose another --slot-save-path",
        errno.EROFS: "the folder is read-only: choose another --slot-save-path",
        errno.EACCES: "the folder may not be written: change its permissions, or choose another --slot-save-path",
    }
    return known.get(error.errno or 0, error.strerror or str(error))
