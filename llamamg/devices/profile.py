"""Measured times of a model's layers, kept from `llamamg doctor --devices -m MODEL` until a server wants a split."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamamg import paths
from llamamg.abi import Device
from llamamg.modelfile import ModelHeader


@dataclass(frozen=True, slots=True)
class Profile:
    """Seconds of every item for one token, and the device each was measured on (its place in the list of devices)."""

    seconds: tuple[float, ...]
    where: tuple[int, ...]


def save(header: ModelHeader, devices: Sequence[Device], profile: Profile) -> Path:
    """Keep it; the file. Raises OSError."""
    path = _path(header, devices)
    path.parent.mkdir(parents=True, exist_ok=True)
    value = {
        "model": header.paths[0].name,
        "devices": [device.name for device in devices],
        "seconds": profile.seconds,
        "where": profile.where,
    }
    path.write_text(json.dumps(value) + "\n")
    return path


def load(header: ModelHeader, devices: Sequence[Device], n_items: int) -> Profile | None:
    """What was measured with this model on these devices in this order; None when nothing was."""
    try:
        value: Any = json.loads(_path(header, devices).read_text())
        profile = Profile(tuple(map(float, value["seconds"])), tuple(map(int, value["where"])))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    if len(profile.seconds) != n_items or len(profile.where) != n_items:
        return None
    if min(profile.seconds) <= 0 or not all(0 <= device < len(devices) for device in profile.where):
        return None
    return profile


def _path(header: ModelHeader, devices: Sequence[Device]) -> Path:
    known = [header.paths[0].name, header.n_bytes, [[device.name, device.description] for device in devices]]
    key = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]
    return paths.home() / "devices" / f"{key}.json"
