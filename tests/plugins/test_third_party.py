"""The package in docs/write-a-plugin.md, installed as written into an environment of its own, is listed and acts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "write-a-plugin.md"

ACT = """
import json, sys
from pathlib import Path
from llamamg.config import Config, ContextConfig, ModelConfig, PluginsConfig
from llamamg.plugins import PluginSet
from llamamg.testing import ask, fake_engine, run

plugins = PluginSet.discover(PluginsConfig(enable=("itl-target",), options={"itl-target": {"target-ms": "1e6"}}))
config = plugins.configure(Config(ModelConfig(Path("fake.gguf")), ContextConfig(n_parallel=2)))
engine, runner, events = fake_engine(2, plugins=plugins, config=config, n_ctx_slot=4096, n_batch=1024)
engine.submit(ask("a", n_predict=20))
engine.step()
engine.submit(ask("b" * 2000, n_predict=1))
run(engine)
chunks = [n for batch in runner.batches for _, _, n, _ in batch if n > 1]
print(json.dumps({"chunks": chunks, "views": [view.json() for view in plugins.views()]}))
"""


def blocks(language: str) -> list[str]:
    """The code blocks of a language on the page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a new environment that sees this one's packages, with the page's package installed."""
    root = tmp_path_factory.mktemp("third-party")
    package = root / "itl-target"
    package.mkdir()
    (pyproject,), (module,) = blocks("toml"), blocks("python")
    (package / "pyproject.toml").write_text(pyproject, encoding="utf-8")
    (package / "llamamg_itl.py").write_text(module, encoding="utf-8")
    venv.create(root / "venv", symlinks=os.name != "nt")
    python = root / "venv" / "bin" / "python"
    seen = sysconfig.get_paths(vars={"base": str(root / "venv"), "platbase": str(root / "venv")})["purelib"]
    ours = [path for path in sys.path if path.endswith("-packages")]
    lines = "".join(f"import site; site.addsitedir({path!r})\n" for path in ours)
    (Path(seen) / "ours.pth").write_text(lines, encoding="utf-8")
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check", str(package)]
    done = subprocess.run(install, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    return python


def output(python: Path, *argv: str) -> Any:
    done = subprocess.run([str(python), *argv], capture_output=True, text=True, cwd=python.parent)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_module_is_about_thirty_lines() -> None:
    (module,) = blocks("python")
    assert 20 <= len([line for line in module.splitlines() if line.strip()]) <= 40


def test_it_is_not_installed_here() -> None:
    from llamamg.plugins import discover

    assert "itl-target" not in discover()


def test_listed_and_off_until_named(scratch: Path) -> None:
    code = "import sys; from llamamg.cli import main; sys.argv = ['llamamg', 'plugins', '--json']; sys.exit(main())"
    views = {view["name"]: view for view in output(scratch, "-c", code)}
    assert {"itl-target", "prefill-gate", "seq-compact"} <= set(views)
    view = views["itl-target"]
    assert (view["state"], view["auto"], view["guard"], view["toggle"]) == ("off", False, "same-tokens", "step")
    assert view["options"] == {"target-ms": 60.0}


def test_the_example_test_of_the_page_passes(scratch: Path) -> None:
    (example,) = blocks("py")
    done = subprocess.run([str(scratch), "-c", example], capture_output=True, text=True, cwd=scratch.parent)
    assert done.returncode == 0, done.stderr


def test_named_it_acts_and_the_automatic_one_gives_way(scratch: Path) -> None:
    found = output(scratch, "-c", ACT)
    views = {view["name"]: view for view in found["views"]}
    assert views["itl-target"]["state"] == "on"
    assert views["itl-target"]["options"] == {"target-ms": 1e6}
    assert views["prefill-gate"]["reason"] == "conflicts with itl-target"
    # No gap comes near the target, so the chunk grows by 32 from 256 in each step until the prompt is done.
    assert found["chunks"] == [288, 320, 352, 384, 416, 240]
    assert views["itl-target"]["effect"] == 6
