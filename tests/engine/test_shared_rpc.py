"""Several contexts on one rpc-server are refused where the library would mix their graphs up."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamamg import contexts, facts
from llamamg import library as native_library
from llamamg.config import Config, ContextConfig, ModelConfig
from llamamg.errors import LoadError


def test_a_library_that_mixes_graphs_up_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by the name of the patch, which the patched build has and upstream lacks."""
    name = contexts.SHARED_RPC
    assert list((Path(__file__).parents[2] / "native" / "patches").glob(f"*/*-{name}.patch"))
    library = native_library.load()
    assert facts.has_patch(name) == library.patched
    model = ModelConfig(Path("none.gguf"), rpc=("a:1",))
    config = Config(model, ContextConfig(n_ctx=512, n_parallel=2, n_groups=2))
    monkeypatch.setitem(library.build_info, "patches", [])
    with pytest.raises(LoadError, match="llamamg build"):
        contexts.make(library, None, config, None, None)  # type: ignore[arg-type]
