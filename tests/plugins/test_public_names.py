"""What `llamamg` offers plugins, and that it costs nothing until it is used."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import llamamg
from llamamg import api


def test_every_name_is_there() -> None:
    assert llamamg.__all__ == api.__all__
    assert all(getattr(llamamg, name) is getattr(api, name) for name in api.__all__)
    assert set(api.__all__) <= set(dir(llamamg))
    assert sorted(api.__all__, key=str.lower) == sorted(set(api.__all__), key=str.lower)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Batches'"):
        llamamg.Batches  # noqa: B018
    assert not hasattr(llamamg, "import_module")


def test_nothing_is_imported_before_its_use() -> None:
    code = (
        "import json, sys, llamamg\n"
        "before = 'llamamg.api' in sys.modules\n"
        "from llamamg import plugin\n"
        "print(json.dumps([before, 'llamamg.api' in sys.modules, plugin.__module__]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == [False, True, "llamamg.plugins.declaration"]


def test_a_star_imports_all_of_it() -> None:
    code = "from llamamg import *; print(Batch.__module__, hookimpl is not None)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["llamamg.batch", "True"]


@pytest.mark.parametrize(
    "module", ["llamamg.plugins", "llamamg.hookspecs", "llamamg.readmedocs", "llamamg.options.docs"]
)
def test_a_module_may_be_the_first_import(module: str) -> None:
    subprocess.run([sys.executable, "-c", f"import {module}"], timeout=60, check=True)
