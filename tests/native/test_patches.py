"""The patch queue: what `check` refuses, what `refresh` and `export` write, how the tree follows the series."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from llamamg import paths
from llamamg.native import check, export, ninja, patchdocs, patches, sdist, series, tree
from llamamg.native.series import PatchError

Queue = Callable[..., tuple[Path, Path]]


def problems(root: Path) -> str:
    return "\n".join(check.structure(root, root / "switches.def"))


def test_the_shipped_queue_is_sound() -> None:
    assert check.structure() == []
    assert check.application(patches.pristine(), series.read()) == []


def test_a_good_queue_has_no_problems(queue: Queue) -> None:
    source, root = queue()
    assert problems(root) == ""
    assert check.application(source, series.read(root)) == []


def test_files_and_series_must_agree(queue: Queue) -> None:
    _, root = queue()
    (root / "x" / "0003-stray.patch").write_text("")
    assert "x/0003-stray.patch is not in series" in problems(root)
    (root / "x" / "0001-first.patch").unlink()
    assert "series names x/0001-first.patch, which does not exist" in problems(root)
    with pytest.raises(PatchError, match="remove the line or restore the file"):
        series.read(root)


def test_a_patch_listed_twice(queue: Queue) -> None:
    _, root = queue(series="x/0001-first.patch\nx/0002-second.patch\nx/0002-second.patch\n")
    assert "series names x/0002-second.patch twice" in problems(root)


def test_header_fields_are_required_and_known(queue: Queue) -> None:
    _, root = queue()
    file = root / "x" / "0001-first.patch"
    good = file.read_text()
    file.write_text(good.replace("Dies-when: never\n", "Applied: yes\n").replace("Guard: exact", "Guard: maybe"))
    assert "lacks the header field Dies-when" in problems(root)
    assert "unknown header fields: Applied" in problems(root)
    assert "Guard must be one of" in problems(root)
    file.write_text("nonsense\n" + good)
    with pytest.raises(PatchError, match="cannot read the header line 'nonsense'"):
        series.read(root)


def test_numbers_follow_the_series(queue: Queue) -> None:
    _, root = queue(series="x/0002-second.patch\nx/0001-first.patch\n")
    assert "x/0002-second.patch is number 1 of the series" in problems(root)


def test_switches_belong_to_patches_and_the_other_way_round(queue: Queue) -> None:
    _, root = queue(**{"switches.def": 'MG_SWITCH(OTHER, "other", 0, "x")\n'})
    assert "names the switch be-loud, which switches.def lacks" in problems(root)
    assert "no patch header names the switch other" in problems(root)


def test_fuzz_is_refused(queue: Queue) -> None:
    source, root = queue()
    (source / "src" / "a.c").write_text("one\nTWO\nthree\nfour\n")
    assert "x/0001-first.patch does not apply" in check.application(source, series.read(root))[0]


def test_an_offset_is_not_minimal_and_refresh_repairs_it(queue: Queue) -> None:
    source, root = queue()
    (source / "src" / "a.c").write_text("zero\nzero\none\ntwo\nthree\nfour\n")
    assert "x/0001-first.patch is not in minimal form" in check.application(source, series.read(root))[0]
    fresh = patches.refreshed(source, series.read(root))
    assert "@@ -4,2 +4,3 @@" in fresh[0].diff
    assert fresh[0].header == series.read(root)[0].header
    for patch in fresh:
        (root / patch.name).write_text(patch.text())
    assert check.application(source, series.read(root)) == []


def test_too_much_context_is_not_minimal(queue: Queue) -> None:
    wide = "--- a/src/a.c\n+++ b/src/a.c\n@@ -1,4 +1,5 @@\n one\n two\n+two and a half\n three\n four\n"
    source, root = queue()
    file = root / "x" / "0001-first.patch"
    file.write_text(file.read_text().partition("--- a/")[0] + wide)
    assert "x/0001-first.patch is not in minimal form" in check.application(source, series.read(root))[0]


def test_a_later_prefix_that_fails_is_named(queue: Queue) -> None:
    source, root = queue()
    (source / "src" / "b.c").write_text("delta\n")
    found = check.application(source, series.read(root))
    assert len(found) == 1
    assert found[0].startswith("x/0002-second.patch does not apply: patch failed: src/b.c:1")


def test_the_tree_follows_the_series_and_keeps_times(queue: Queue, tmp_path: Path) -> None:
    source, root = queue()
    target, parsed = tmp_path / "patched", series.read(root)
    assert tree.sync(source, target, parsed) == ["src/a.c", "src/b.c"]
    assert (target / "src" / "b.c").read_text() == "alpha\nBETA\ngamma\n"
    assert (source / "src" / "b.c").read_text() == "alpha\nbeta\ngamma\n", "a hard link was written through"
    before = (target / "src" / "a.c").stat().st_mtime_ns
    assert tree.sync(source, target, parsed[:1]) == ["src/b.c"]
    assert (target / "src" / "b.c").read_text() == "alpha\nbeta\ngamma\n"
    assert (target / "src" / "a.c").stat().st_mtime_ns == before


def test_an_edit_by_hand_is_never_lost(queue: Queue, tmp_path: Path) -> None:
    source, root = queue()
    target = tmp_path / "patched"
    tree.sync(source, target, series.read(root))
    (target / "src" / "a.c").write_text("mine\n")
    with pytest.raises(PatchError, match=r"src/a\.c .*was edited by hand.*refresh NAME"):
        tree.sync(source, target, series.read(root))
    assert (target / "src" / "a.c").read_text() == "mine\n"


def test_refresh_takes_an_edit_into_the_named_patch(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, root = queue()
    target, parsed = tmp_path / "patched", series.read(root)
    tree.sync(source, target, parsed)
    monkeypatch.setattr(paths, "source", lambda flavour: target)
    with pytest.raises(PatchError, match="no patch 'third'"):
        patches.edited(source, parsed, "third", [])
    (target / "src" / "b.c").write_text("alpha\nBETA!\ngamma\n")
    fresh = patches.edited(source, parsed, "0002-second", [])
    assert fresh[0] == parsed[0]
    assert "+BETA!\n" in fresh[1].diff
    tree.adopt(source, target, fresh)
    assert tree.sync(source, target, fresh) == []


def test_a_patch_can_add_a_file(queue: Queue, tmp_path: Path) -> None:
    source, root = queue()
    file = root / "x" / "0002-second.patch"
    file.write_text(file.read_text().partition("--- a/")[0] + "--- /dev/null\n+++ b/src/new.c\n@@ -0,0 +1 @@\n+new\n")
    parsed, target = series.read(root), tmp_path / "patched"
    assert check.application(source, parsed) == []
    tree.sync(source, target, parsed)
    assert (target / "src" / "new.c").read_text() == "new\n"
    tree.sync(source, target, parsed[:1])
    assert not (target / "src" / "new.c").exists()


def test_the_export_is_taken_by_git_am(queue: Queue, tmp_path: Path) -> None:
    source, root = queue()
    mails = export.write(series.read(root), tmp_path / "mails")

    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost", "-C", str(source), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "base")
    git("am", "-q", *map(str, mails))
    assert git("log", "--format=%s").splitlines() == ["change b", "change a", "base"]
    assert "Switch: be-loud" in git("log", "-1", "--format=%b")
    assert (source / "src" / "b.c").read_text() == "alpha\nBETA\ngamma\n"


def test_docs_are_what_the_headers_say() -> None:
    root = paths.checkout()
    assert root is not None
    assert (root / "docs" / "patches.md").read_text() == patchdocs.render(series.read())


def test_every_prefix_compiles_what_it_touches() -> None:
    if not (paths.build("patched") / "build.ninja").is_file():
        pytest.skip("nothing is built here: run `llamamg build`")
    report = check.compilation(patches.pristine(), series.read())
    assert len(report) == len(series.names())
    assert all("compiled 0 objects" not in line for line in report), report


def test_a_prefix_that_does_not_compile_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not (paths.build("patched") / "build.ninja").is_file():
        pytest.skip("nothing is built here: run `llamamg build`")
    first = series.read()[0]
    diff = "--- a/src/llama-hparams.cpp\n+++ b/src/llama-hparams.cpp\n@@ -1 +1,2 @@\n+this is not C++\n"
    line = (patches.pristine() / "src" / "llama-hparams.cpp").read_text().splitlines()[0]
    broken = series.Patch("x/0001-broken.patch", first.header, f"{diff} {line}\n")
    with pytest.raises(sdist.SetupError, match=r"the compiler failed.*build\.log"):
        check.compilation(patches.pristine(), [broken])
    assert "llama-hparams.cpp" in capsys.readouterr().err
    assert ninja.environment()["NINJA_STATUS"]
