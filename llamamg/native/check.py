"""Is the series consistent, does every prefix apply, and does every prefix compile?"""

from __future__ import annotations

import json
import re
from pathlib import Path

from llamamg import paths
from llamamg.native import build, ninja, series, toolchain, tree
from llamamg.native.series import FIELDS, GUARDS, Patch, PatchError


def structure(patches: Path | None = None, switches: Path | None = None) -> list[str]:
    """Sentences about what is wrong with series, files and headers; empty when all is well. Needs no source tree."""
    root = patches or series.folder()
    listed = series.names(root)
    on_disk = {str(file.relative_to(root)) for file in root.rglob("*.patch")}
    problems = [f"series names {name} twice; remove one line" for name in sorted(set(listed)) if listed.count(name) > 1]
    problems += [f"{name} is not in series; add it or delete the file" for name in sorted(on_disk - set(listed))]
    missing = [name for name in listed if name not in on_disk]
    if missing:
        return problems + [f"series names {name}, which does not exist; remove the line" for name in missing]
    parsed = series.read(root)
    for position, patch in enumerate(parsed, 1):
        problems += _header(patch, position)
    return problems + _switches(parsed, switches or paths.native() / "src" / "mg_switch.def")


def _header(patch: Patch, position: int) -> list[str]:
    problems = [f"{patch.name} lacks the header field {field}" for field in FIELDS if not patch.header.get(field)]
    unknown = sorted(set(patch.header) - set(FIELDS))
    if unknown:
        problems.append(f"{patch.name} has unknown header fields: {', '.join(unknown)}")
    if patch.header.get("Origin") not in (None, "llamamg"):
        problems.append(f"{patch.name}: Origin must be llamamg")
    if patch.header.get("Guard") not in (None, *GUARDS):
        problems.append(f"{patch.name}: Guard must be one of {', '.join(GUARDS)}")
    number = re.match(r"(\d{4})-", Path(patch.name).name)
    if not number or int(number[1]) != position:
        problems.append(f"{patch.name} is number {position} of the series; name it {position:04d}-...")
    return problems


def declared_switches(definition: Path) -> list[str]:
    """Names in mg_switch.def."""
    return re.findall(r'^MG_SWITCH\(\w+,\s*"([^"]+)"', definition.read_text(), re.M)


def _switches(parsed: list[Patch], definition: Path) -> list[str]:
    declared = declared_switches(definition)
    used = [name for patch in parsed for name in patch.switches]
    problems = [
        f"a patch names the switch {name}, which {definition.name} lacks" for name in used if name not in declared
    ]
    return problems + [
        f"no patch header names the switch {name}; add a Switch field" for name in declared if name not in used
    ]


def application(pristine: Path, parsed: list[Patch]) -> list[str]:
    """Does every prefix apply without fuzz, and is every diff as small as `refresh` would write it?"""
    try:
        states = series.states(pristine, parsed)
    except PatchError as error:
        return [str(error)]
    return [
        f"{patch.name} is not in minimal form; run `llamamg patches refresh`"
        for patch, before, after in zip(parsed, states, states[1:], strict=False)
        if series.unified_diff(before, after) != patch.diff
    ]


def compilation(pristine: Path, parsed: list[Patch], *, full: bool = False) -> list[str]:
    """Compile, prefix by prefix, the objects each patch touches (full: everything). Raises SetupError on a failure."""
    root = paths.home() / "check"
    source, folder = root / "src", root / "build"
    folder.mkdir(parents=True, exist_ok=True)
    literal = folder / "mg_build_info.inc"
    literal.write_text('R"MGJSON({})MGJSON"\n')
    wanted = build.plan(build.parse(["--no-cuda"]))
    flags = [*wanted.flags, f"-DLLAMAMG_TREE={source}", f"-DLLAMAMG_BUILD_INFO={literal}"]
    report = []
    before: dict[str, str] = {}
    for n_applied in range(len(parsed) + 1):
        tree.sync(pristine, source, parsed[:n_applied])
        ninja.configure(folder, flags)
        objects = _objects(folder)
        if n_applied:
            patch = parsed[n_applied - 1]
            targets = wanted.targets if full else _touched(objects, before, source, patch)
            if targets:
                ninja.compile(folder, targets, toolchain.jobs(), label=f"prefix {n_applied}")
            report.append(f"{patch.name}: {_outcome(patch, len(targets), full)}")
        before = objects
    return report


def _outcome(patch: Patch, n_objects: int, full: bool) -> str:
    if not full and not n_objects and all(path.startswith("ggml/src/ggml-cuda/") for path in patch.files):
        return "only CUDA sources, not compiled here"
    return "compiled all targets" if full else f"compiled {n_objects} objects"


def _objects(folder: Path) -> dict[str, str]:
    """Source file -> object file, as CMake planned it."""
    entries = json.loads((folder / "compile_commands.json").read_text())
    outputs = (re.search(r" -o (\S+)", entry["command"]) for entry in entries)
    return {entry["file"]: output[1] for entry, output in zip(entries, outputs, strict=True) if output}


def _touched(objects: dict[str, str], before: dict[str, str], source: Path, patch: Patch) -> list[str]:
    """Objects that are new since the last prefix, or whose source is patched or includes a patched header."""
    targets = {output for file, output in objects.items() if file not in before}
    headers = []
    for path in patch.files:
        if str(source / path) in objects:
            targets.add(objects[str(source / path)])
        elif path.endswith((".h", ".hpp", ".cuh", ".cpp")):  # a source that is no object is included by a unity build
            headers.append(re.escape(Path(path).name))
    if headers:
        include = re.compile(rf'^\s*#\s*include\s+["<](?:[^">]*/)?(?:{"|".join(headers)})[">]', re.M)
        targets |= {
            output for file, output in objects.items() if include.search(Path(file).read_text(errors="replace"))
        }
    return sorted(targets)
