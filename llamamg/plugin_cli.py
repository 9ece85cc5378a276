"""`llamamg plugins`: what is installed, or, with --url, what a running server does with it."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import textwrap
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from llamamg.config import PluginsConfig
from llamamg.plugins import PluginSet, PluginView

TIMEOUT_S = 10.0
COLUMNS = ("NAME", "STATE", "TOGGLE", "GUARD", "EFFECT", "TIME")
FIELDS = {field.name for field in fields(PluginView)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `llamamg plugins`."""
    parser.add_argument("--url", help="ask the server running there, e.g. http://127.0.0.1:8080")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("LLAMA_API_KEY", "").split(",")[0],
        help="key of the server asked with --url (default: the first of LLAMA_API_KEY)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the list; 1 and a sentence on stderr if the server cannot be asked."""
    try:
        views = fetch(args.url, args.api_key) if args.url else PluginSet.discover(PluginsConfig()).views()
    except OSError as error:
        print(f"llamamg plugins: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps([view.json() for view in views], indent=2, ensure_ascii=False))
    else:
        parts = (table(views, shutil.get_terminal_size((100, 24)).columns), legend(views))
        print("\n".join(part for part in parts if part))
    return 0


def fetch(url: str, api_key: str = "") -> list[PluginView]:
    """The plugins of a running server. Raises OSError with a sentence."""
    address = url.rstrip("/") + "/plugins"
    if not address.startswith(("http://", "https://")):
        raise OSError(f"--url {url!r} must begin with http:// or https://")
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            body = json.load(response)
    except urllib.error.HTTPError as error:
        hint = "; give its key with --api-key" if error.code == 401 else ""
        raise OSError(f"{address} answered {error.code} {error.reason}{hint}") from error
    except (urllib.error.URLError, TimeoutError) as error:
        reason = getattr(error, "reason", error)
        raise OSError(f"no server answers at {address} ({reason}); is `llamamg serve` running there?") from error
    except ValueError as error:
        raise OSError(f"{address} did not answer with JSON; is it a llamamg server?") from error
    try:
        entries = body["plugins"] if isinstance(body, dict) else body
        return [view_of(entry) for entry in entries]
    except (KeyError, TypeError) as error:
        raise OSError(f"{address} did not answer with a list of plugins; is it a llamamg server?") from error


def view_of(entry: dict[str, Any]) -> PluginView:
    """A view from its JSON; fields of another version are left out."""
    return PluginView(**{name: value for name, value in entry.items() if name in FIELDS})


def table(views: Iterable[PluginView], width: int) -> str:
    """One line of state per plugin, and below it what it is for."""
    entries = list(views)
    rows = [COLUMNS, *(_row(view) for view in entries)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = [_line(COLUMNS, widths)]
    for view, row in zip(entries, rows[1:], strict=True):
        lines.append(_line(row, widths))
        for label, text in _details(view):
            lines += textwrap.wrap(label + text, max(width, 40), initial_indent=" " * 4, subsequent_indent=" " * 8)
    return "\n".join(lines) if entries else "no plugins are installed"


def legend(views: Iterable[PluginView]) -> str:
    """What the table does not say itself."""
    entries = list(views)
    lines = []
    if any(view.state == "auto" for view in entries):
        lines.append("auto: on where it applies; `llamamg serve` decides when it knows the model")
    if entries and all(view.hook_ms is None for view in entries):
        lines.append("TIME is not measured; LLAMAMG_TRACE_HOOKS=1 in the server's environment times every hook")
    return "\n".join(lines)


def _row(view: PluginView) -> tuple[str, ...]:
    effect = f"{view.effect} {view.effect_unit}".strip() if view.effect_unit else "-"
    spent = "-" if view.hook_ms is None else f"{view.hook_ms:.1f} ms"
    return (view.name, view.state, view.toggle or "-", view.guard or "-", effect, spent)


def _details(view: PluginView) -> list[tuple[str, str]]:
    options = ", ".join(f"{name}={value}" for name, value in view.options.items())
    details = [
        ("", view.summary),
        ("helps: ", view.helps),
        ("hurts: ", view.hurts),
        (f"options (--{view.name}-OPTION VALUE): ", options) if options else ("", ""),
        ("now: ", view.note),
        ("off because: ", view.reason or ""),
        ("switched off by an error: ", view.quarantined or ""),
    ]
    return [(label, text) for label, text in details if text]


def _line(row: Iterable[str], widths: Iterable[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
