"""The run on several GPUs, row by row: `python -m benches.multi_gpu --rows all --out FOLDER -m MODEL [flags of llamamg serve]`.

Each row is a bench of its own process with a limit of time. A finished row is written to FOLDER/rows.jsonl at once, and all
results so far to FOLDER/results.tgz, which unpacks over benches/results. Rows that rows.jsonl has as done are not measured
again, so an interrupted run goes on where it ended. `benches/multi_gpu.sh` does this on a machine without a network.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import multi_gpu_rows as rows
from . import record
from .errors import BenchError
from .flags import model_path, take_models
from .program import alone

NAME = "multi-gpu"
HELP = "everything that several GPUs are measured with, row by row, within a limit of time"
SERVE_FLAGS = True
END_S = 8.0  # kept free at the end
GRACE_S = 10.0  # between asking a row to end and killing it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command line."""
    add = parser.add_argument
    add("--rows", default="all", metavar="LIST", help=f"which, in this order: all, or of {', '.join(rows.ROWS)}")
    add("--out", type=Path, required=True, metavar="FOLDER", help="gets rows.jsonl and results.tgz")
    add("--minutes", type=float, default=9.0, metavar="N", help="everything together (default 9)")
    add("--elapsed", type=float, default=0.0, metavar="S", help="seconds of these that are gone already")
    add("--soak", type=float, default=300.0, metavar="S",
        help="seconds of the row soak (default 300, less where time is short)")  # fmt: skip
    add("--results", type=Path, metavar="FOLDER", help="where the results are kept (default: FOLDER of --out/results)")
    add("--synthetic", metavar="TEXT", help="how the model was generated, recorded in place of a hash of the file")
    add("--ours", default=os.environ.get("MULTI_OURS", ""), metavar="FLAGS",
        help="further flags of ours, with groups on and off alike (default: $MULTI_OURS)")  # fmt: skip
    add("--done", type=Path, metavar="FILE", help="a rows.jsonl of before: its finished rows are left out")
    add("--tiny", action="store_true", help="sizes for a small model on a CPU: tries the run, measures nothing")


def run(args: argparse.Namespace) -> int:
    """All rows; exit status 1 when one of them failed."""
    names = rows.parse(args.rows)
    models, flags = take_models(args.flags)
    if len(models) != 1:
        raise BenchError("give one model with -m")
    args.out.mkdir(parents=True, exist_ok=True)
    results = args.results or args.out / "results"
    results.mkdir(parents=True, exist_ok=True)
    book = Book(args.out, results, args.done)
    deadline = time.monotonic() + 60 * args.minutes - args.elapsed - END_S
    env = dict(os.environ)
    if args.synthetic:
        env["LLAMAMG_SYNTHETIC"] = args.synthetic
    survey = results / "devices.json"
    present = tuple(f"CUDA{i}" for i in range(len(record.machine()["gpus"])))  # should doctor fail
    n_failed = 0
    for name in names:
        if name in book.done:
            say(f"{name}: done before")
            continue
        left = deadline - time.monotonic()
        if survey.is_file():
            env["LLAMAMG_SURVEY"] = str(survey)
        with tempfile.TemporaryDirectory(prefix=f"{name}-") as scratch:
            setting = rows.Setting(
                model_path(models[0]),
                tuple(flags),
                devices_of(survey) or present,
                rows.TINY if args.tiny else rows.FULL,
                Path(scratch),
                args.synthetic,
                min(args.soak, max(0.0, left - 100)),
                args.ours,
            )
            try:
                row = rows.ROWS[name](setting)
            except rows.Left as why:
                book.write({"row": name, "status": "left out", "why": str(why)})
                continue
            if left < row.least_s:
                book.write({"row": name, "status": "left out", "why": f"{left:.0f} s were left"})
                continue
            entry = measure(row, min(row.limit_s, left), env, survey, book)
        book.write(entry)
        n_failed += entry["status"] != "done"
    return 1 if n_failed else 0


def measure(row: rows.Row, limit_s: float, env: Mapping[str, str], survey: Path, book: Book) -> dict[str, Any]:
    """One row in a process of its own; what is to be written of it."""
    say(f"{row.name}: at most {limit_s:.0f} s")
    scratch = Path(row.argv[row.argv.index("--results") + 1]) if "--results" in row.argv else None
    begin = time.monotonic()
    status, output = command(row.argv, {**env, **row.env}, limit_s)
    entry: dict[str, Any] = {
        "row": row.name,
        "status": {0: "done", None: "out of time"}.get(status, "failed"),
        "seconds": round(time.monotonic() - begin, 1),
        "command": record.without_paths(row.argv[1:]),
        "env": dict(row.env),
    }
    if row.name.startswith("doctor"):
        with contextlib.suppress(ValueError):
            found, _ = json.JSONDecoder().raw_decode(output, output.index("\n{\n") + 1 if output[:2] != "{\n" else 0)
            entry["summary"] = record.scrubbed(found["survey"])
            book.keep_text(row.name, "devices.json", json.dumps(record.scrubbed(found), indent=1))
            if row.name == "doctor":
                survey.write_text(json.dumps(found))
    elif scratch is not None:
        entry["summary"] = book.keep(row.name, scratch)
    if status != 0:
        entry["exit"] = status
        entry["output"] = record.scrubbed(output if len(output) < 5000 else f"{output[:2000]}\n[…]\n{output[-3000:]}")
    return entry


def command(argv: Sequence[str], env: Mapping[str, str], limit_s: float) -> tuple[int | None, str]:
    """Exit status (None: it ran out of time) and what it printed. Whatever it started ends with it."""
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        child = subprocess.Popen(
            argv, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
        status: int | None = None
        try:
            status = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(GRACE_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        log.seek(0)
        return status, log.read()


def devices_of(survey: Path) -> tuple[str, ...]:
    """Names of the GPUs that doctor found, in order; () before it did."""
    try:
        found = json.loads(survey.read_text())["survey"]["devices"]
    except (OSError, ValueError, KeyError):
        return ()
    return tuple(device["name"] for device in found if device["type"] == "gpu")


class Book:
    """What is done: rows.jsonl, and the results as an archive that is replaced after every row."""

    def __init__(self, out: Path, results: Path, before: Path | None) -> None:
        self.path, self._out, self._results = out / "rows.jsonl", out, results
        self.entries: list[dict[str, Any]] = []
        for path in (before, self.path):
            if path is not None and path.is_file():
                self.entries += [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        self._machine = record.machine_name(record.machine())
        self._day = time.strftime("%Y-%m-%d", time.gmtime())

    @property
    def done(self) -> set[str]:
        """Rows that need not be measured again."""
        return {entry["row"] for entry in self.entries if entry["status"] == "done"}

    def write(self, entry: dict[str, Any]) -> None:
        """A row is over."""
        self.entries.append(entry)
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        say(f"{entry['row']}: {entry['status']} {entry.get('why', '')} {json.dumps(entry.get('summary', ''))[:600]}")
        part = self._out / ".results.tgz"
        with tarfile.open(part, "w:gz") as archive:
            for folder in sorted(self._results.iterdir()):
                if folder.is_dir():
                    archive.add(folder, folder.name)
        part.replace(self._out / "results.tgz")

    def keep(self, row: str, scratch: Path) -> dict[str, Any]:
        """Move what a bench kept to the place it has under benches/results; its figures at a glance."""
        found: dict[str, Any] = {}
        for folder in sorted(scratch.glob("*/*")):
            if folder.is_dir() and not folder.name.startswith("."):
                found |= rows.summary(folder)
                shutil.move(str(folder), self._place(row, folder.parent.name))
        return found

    def keep_text(self, row: str, name: str, text: str) -> None:
        """A file of a row that has no result folder."""
        folder = self._place(row, self._machine)
        folder.mkdir(parents=True)
        (folder / name).write_text(text + "\n")

    def _place(self, row: str, machine: str) -> Path:
        root = self._results / machine
        root.mkdir(parents=True, exist_ok=True)
        name, n = f"{self._day}-multi-{row}", 1
        while (root / (name if n == 1 else f"{name}-{n}")).exists():
            n += 1
        return root / (name if n == 1 else f"{name}-{n}")


def say(text: str) -> None:
    """Progress."""
    print(f"[{time.strftime('%T')}] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(alone(sys.modules[__name__]))
