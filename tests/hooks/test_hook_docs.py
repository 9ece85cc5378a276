"""The hooks' documentation is the hookspecs', word for word."""

from __future__ import annotations

import inspect
import re
import sys

import pytest

from llamamg import hookdocs, hookspecs
from llamamg.hooks import COMPILED, ONCE


def specs() -> set[str]:
    return {name for name, value in vars(hookspecs).items() if hasattr(value, "llamamg_spec")}


def test_every_spec_is_either_compiled_or_called_once() -> None:
    assert specs() == set(ONCE) | set(COMPILED)
    assert not set(ONCE) & set(COMPILED)


def test_the_page_is_up_to_date() -> None:
    if not hookdocs.PAGE.exists():
        pytest.fail("docs/hooks.md is missing: run `python -m llamamg.hookdocs`")
    assert hookdocs.PAGE.read_text(encoding="utf-8") == hookdocs.render(), "run `python -m llamamg.hookdocs`"


def test_a_stale_page_is_noticed(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = hookdocs.Path(str(tmp_path)) / "hooks.md"
    monkeypatch.setattr(hookdocs, "PAGE", page)
    monkeypatch.setattr(sys, "argv", ["hookdocs"])
    assert hookdocs.main() == 0
    monkeypatch.setattr(sys, "argv", ["hookdocs", "--check"])
    assert hookdocs.main() == 0
    page.write_text(page.read_text(encoding="utf-8") + "more", encoding="utf-8")
    assert hookdocs.main() == 1
    assert "python -m llamamg.hookdocs" in capsys.readouterr().err


def test_the_page_has_each_signature_as_in_the_source() -> None:
    page = hookdocs.PAGE.read_text(encoding="utf-8")
    for name in specs():
        source = " ".join(inspect.getsource(getattr(hookspecs, name)).split())
        signature = re.search(rf"def ({name}\(.*?\) -> .*?):(?: \"\"\")", source)
        assert signature is not None
        assert f"### `{signature[1]}`" in page


def test_every_contract_says_when_and_what_is_answered() -> None:
    for name in specs():
        text = inspect.getdoc(getattr(hookspecs, name)) or ""
        spec = getattr(hookspecs, name)
        assert "When:" in text, name
        assert ("first result" in text) == bool(spec.llamamg_spec["firstresult"]), name
        assert ("Result:" in text) or inspect.signature(spec).return_annotation in ("None", "Config | None"), name
