"""Is every native kernel right, how fast is it, and how far from the time that moving its bytes alone would take?

Each kernel runs through the C ABI on arrays of the device (numpy on the CPU, cupy on a GPU), is compared with float64, and
timed against what stock llama.cpp does instead. The floor is the time in which the device copies as many bytes (read and
written together), measured at the same size.
Exit status 1: a kernel is wrong.
"""

from __future__ import annotations

import argparse
import difflib
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from llamamg import library as native

from . import record
from .arguments import add_results
from .errors import BenchError
from .kernels_case import Case, Prepared, registry
from .kernels_device import Device, cpu, cuda
from .kernels_ggml import Unsupported

NAME = "kernels"
HELP = "each native kernel: right or not, time, share of the copy speed, against stock llama.cpp"

N_TIMES = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command line."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to run (default cpu)")
    parser.add_argument(
        "--kernel", action="append", default=[], metavar="NAMES", help="kernels to run: a,b (default all)"
    )
    parser.add_argument(
        "-t", "--threads", type=int, default=1, help="threads of ggml's operations on the CPU (default 1)"
    )
    parser.add_argument("--list", action="store_true", help="list the kernels and leave")
    parser.add_argument("--times", type=int, default=N_TIMES, help=f"timed runs of each (default {N_TIMES})")
    parser.add_argument("--build", type=Path, metavar="DIR", help="native build to test (default: the patched one)")
    add_results(parser)


def run(args: argparse.Namespace) -> int:
    """Check, time, keep, print."""
    if args.times < 1:
        raise BenchError("--times must be at least 1")
    if args.threads < 1:
        raise BenchError("--threads must be at least 1")
    library = native.load(args.build)
    library.mg.set_log("error")
    device = cuda(library.build_info) if args.device == "cuda" else cpu(args.threads)
    cases = chosen(registry(device), args.kernel)
    if args.list:
        print(
            "\n".join(
                f"{case.name:<12} {case.size}" + (f"  ({case.unavailable})" if case.unavailable else "")
                for case in cases
            )
        )
        return 0
    with record.ResultFolder(f"kernels-{device.kind}", args.results) as folder:
        result: dict[str, Any] = {"bench": NAME, "device": device.name, "n_times": args.times}
        result["copy_bytes_per_s"] = device.copy_bytes_per_s()
        with tqdm(cases, desc="kernels", unit="kernel", disable=None) as bar:
            result["rows"] = [row_of(case, device, args.times) for case in bar]
        result["record"] = record.everything(build=record.build(library.dir))
        folder.write("result.json", result)
        folder.text("table.txt", table(result) + "\n")
    print(table(result))
    print(f"kept in {folder.final}", file=sys.stderr)
    return int(any(row["ok"] is False for row in result["rows"]))


def chosen(cases: list[Case], asked: list[str]) -> list[Case]:
    """The kernels asked for. Raises BenchError for an unknown one."""
    names = [name.strip() for word in asked for name in word.split(",") if name.strip()]
    known = list(dict.fromkeys(case.name for case in cases))
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known) or 'none on this device'}"
            raise BenchError(f"there is no kernel {name!r} here; {hint}")
    return [case for case in cases if not names or case.name in names]


def row_of(case: Case, device: Device, n_times: int) -> dict[str, Any]:
    """One kernel, checked and timed."""
    row: dict[str, Any] = {"kernel": case.name, "size": case.size, "n_bytes": case.n_bytes, "n_flops": case.n_flops}
    if case.unavailable:
        return {**row, "ok": None, "reason": case.unavailable}
    try:
        result, times = _measured(case.prepare, device, n_times, case.launches_per_run)
    except Unsupported as error:
        return {**row, "ok": None, "reason": str(error)}
    check = case.check(result)
    seconds, floor_s = statistics.median(times), device.copy_s(case.n_bytes, n_launches=case.launches_per_run)
    row |= {
        "ok": check.ok,
        "error": check.error,
        "error_of": check.what,
        "times_s": times,
        "bytes_per_s": case.n_bytes / seconds,
        "flops_per_s": case.n_flops / seconds,
        "floor_s": floor_s,
        "share_of_floor": floor_s / seconds,
        "upstream_times_s": None,
        "upstream_note": case.upstream_note,
    }
    if case.upstream is not None:
        try:
            other, row["upstream_times_s"] = _measured(case.upstream, device, n_times, case.launches_per_run)
        except Unsupported as error:
            return {**row, "upstream_note": f"stock cannot be run: {error}"}
        check = (case.upstream_check or case.check)(other)
        row["upstream_ok"], row["upstream_error"] = check.ok, check.error
    return row


def _measured(
    prepare: Callable[[], Prepared], device: Device, n_times: int, n_launches: int
) -> tuple[Any, list[float]]:
    prepared = prepare()
    try:
        result = device.own(prepared.run())
        return result, [t / n_launches for t in device.seconds(prepared.run, n_times)]
    finally:
        prepared.close()


def table(result: Mapping[str, Any]) -> str:
    """The result for people."""
    lines = [("kernel", "size", "right", "µs", "GB/s", "floor µs", "of floor", "stock µs", "times faster")]
    notes = []
    for row in result["rows"]:
        if row["ok"] is None:
            lines.append((row["kernel"], row["size"], "not run", "", "", "", "", "", ""))
            notes.append(f"{row['kernel']}: {row['reason']}")
            continue
        seconds = statistics.median(row["times_s"])
        stock = statistics.median(row["upstream_times_s"]) if row["upstream_times_s"] else None
        lines.append(
            (
                row["kernel"],
                row["size"],
                "yes" if row["ok"] else "NO",
                f"{1e6 * seconds:.1f}",
                f"{row['bytes_per_s'] / 1e9:.1f}",
                f"{1e6 * row['floor_s']:.1f}",
                f"{100 * row['share_of_floor']:.0f} %",
                f"{1e6 * stock:.1f}" if stock else "-",
                f"{stock / seconds:.2f}" if stock else "-",
            )
        )
        notes.append(f"{row['kernel']}, {row['size']}: {row['error_of']}: {row['error']:.2g}")
        if row["upstream_note"]:
            notes.append(f"{row['kernel']}: {row['upstream_note']}")
        if row.get("upstream_ok") is False:
            notes.append(
                f"{row['kernel']}, {row['size']}: stock is not right: {row['error_of']}: {row['upstream_error']:.2g}"
            )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    speed = result["copy_bytes_per_s"] / 1e9
    out = [
        f"{result['device']}: a large copy moves {speed:.1f} GB/s (read and written); floor: a copy of as many bytes",
        "",
    ]
    out += ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*out, "", *notes])


if __name__ == "__main__":
    from .program import alone

    sys.exit(alone(sys.modules[__name__]))
