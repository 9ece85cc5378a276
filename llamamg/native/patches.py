"""`llamamg patches`: apply, check, refresh, export and document the patch queue."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from llamamg import paths
from llamamg.native import check, export, patchdocs, sdist, series, tree
from llamamg.native.sdist import SetupError
from llamamg.native.series import Patch, PatchError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Subcommands of `llamamg patches`."""
    sub = parser.add_subparsers(dest="patches_command", required=True, metavar="apply|check|refresh|export|docs")
    sub.add_parser("apply", help="make the patched source tree equal the series")
    checking = sub.add_parser("check", help="series, headers, every prefix applies and compiles what it touches")
    depth = checking.add_mutually_exclusive_group()
    depth.add_argument("--fast", action="store_true", help="compile nothing")
    depth.add_argument("--full", action="store_true", help="build every prefix completely")
    refreshing = sub.add_parser("refresh", help="rewrite patches with minimal context and current line numbers")
    refreshing.add_argument("name", nargs="?", help="take this patch's new content from the edited patched tree")
    refreshing.add_argument(
        "--add", action="append", default=[], metavar="FILE", help="a file NAME did not touch before"
    )
    exporting = sub.add_parser("export", help="write the series as git format-patch would")
    exporting.add_argument("target", type=Path, help="folder for the mails")
    docs = sub.add_parser("docs", help="write docs/patches.md from the patch headers")
    docs.add_argument("--check", action="store_true", help="only say whether it is current")


def pristine() -> Path:
    """The unpatched tree, downloaded and unpacked when it is not there."""
    upstream = sdist.read_upstream()
    target = paths.source("upstream")
    if not (target / ".llamamg-sdist").is_file():
        sdist.unpack(sdist.fetch(upstream), upstream, target)
    return target


def run(args: argparse.Namespace) -> int:
    """`llamamg patches`. Returns the exit status; failures are sentences on stderr."""
    commands = {"apply": _apply, "check": _check, "refresh": _refresh, "export": _export, "docs": _docs}
    try:
        return commands[args.patches_command](args)
    except (SetupError, PatchError) as error:
        print(f"llamamg patches: {error}", file=sys.stderr)
        return 1


def _apply(_args: argparse.Namespace) -> int:
    target = paths.source("patched")
    written = tree.sync(pristine(), target, series.read())
    print(f"{len(written)} files written in {target}")
    return 0


def _check(args: argparse.Namespace) -> int:
    problems = check.structure()
    if not problems:
        problems = check.application(pristine(), series.read())
    for problem in problems:
        print(f"llamamg patches: {problem}", file=sys.stderr)
    if problems:
        return 1
    parsed = series.read()
    print(f"{len(parsed)} patches: series, headers and every prefix are fine")
    if not args.fast:
        print("\n".join(check.compilation(pristine(), parsed, full=args.full)))
    return 0


def _refresh(args: argparse.Namespace) -> int:
    old = series.read()
    new = refreshed(pristine(), old) if args.name is None else edited(pristine(), old, args.name, args.add)
    for before, after in zip(old, new, strict=True):
        if before.text() != after.text():
            (series.folder() / after.name).write_text(after.text())
            print(f"rewritten: {after.name}")
    if args.name is not None:
        tree.adopt(pristine(), paths.source("patched"), new)
    return 0


def refreshed(tree_root: Path, old: list[Patch]) -> list[Patch]:
    """The series with minimal context and this tree's line numbers; one matching context line places a hunk."""
    states = series.states(tree_root, old, context=1)
    return [
        Patch(patch.name, patch.header, series.unified_diff(before, after))
        for patch, before, after in zip(old, states, states[1:], strict=False)
    ]


def edited(tree_root: Path, old: list[Patch], name: str, added: list[str]) -> list[Patch]:
    """The series with one patch's content taken from the edited patched tree. Raises PatchError."""
    names = [patch.name for patch in old]
    matches = [
        i for i, known in enumerate(names) if known == name or Path(known).stem == name or Path(known).name == name
    ]
    if len(matches) != 1:
        raise PatchError(f"there is no patch '{name}'; known: {', '.join(names)}")
    i = matches[0]
    files = sorted({*old[i].files, *added})
    later = sorted({path for patch in old[i + 1 :] for path in patch.files if path in files})
    if later:
        raise PatchError(
            f"a later patch also touches {', '.join(later)}: edit the last patch that touches it, or by hand"
        )
    before = series.states(tree_root, old[:i])[-1]
    for path in files:
        if path not in before and (tree_root / path).is_file():
            before[path] = (tree_root / path).read_text()
    after = tree.current(paths.source("patched"), files)
    diff = series.unified_diff({p: t for p, t in before.items() if p in files}, after)
    if not diff:
        raise PatchError(f"nothing differs from the state before {names[i]}; edit {paths.source('patched')} first")
    return [*old[:i], Patch(old[i].name, old[i].header, diff), *old[i + 1 :]]


def _export(args: argparse.Namespace) -> int:
    for file in export.write(series.read(), args.target):
        print(file)
    return 0


def _docs(args: argparse.Namespace) -> int:
    root = paths.checkout()
    if not root:
        raise PatchError("docs/patches.md belongs to a checkout; this is an installed copy")
    file = root / "docs" / "patches.md"
    wanted = patchdocs.render(series.read())
    if args.check:
        if not file.is_file() or file.read_text() != wanted:
            raise PatchError("docs/patches.md is not what the patch headers say; run `llamamg patches docs`")
        return 0
    file.parent.mkdir(exist_ok=True)
    file.write_text(wanted)
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="llamamg patches", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
