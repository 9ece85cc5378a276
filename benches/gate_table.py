"""The table of `llamamg bench gate`, made from its result alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

WHERE = {"one": "one context", "separate": "a context for the prompts"}
RATIOS = (2, 3, 5, 7)
WIDTHS = (7, 8, 8, 8, 6, 6, 6, 6, 10)


def bound(part: Mapping[str, Any], ratio: float) -> tuple[int, float]:
    """The largest c with which a gap is at most `ratio` of one without a prompt, and the prompt's share of its solo rate there."""
    case = part["cases"][0]
    fitting = [step for step in case["steps"] if step["t_ms"] <= ratio * case["alone_ms"]["p50"]]
    if not fitting:
        return 0, 0.0
    best = max(fitting, key=lambda step: step["chunk"])
    return best["chunk"], best["tps"] / part["solo_tps"]


def table(result: Mapping[str, Any]) -> str:
    """What is printed; pieces that are not measured yet are left out."""
    lines = []
    for part in result["contexts"]:
        lines += [*_part(result["sizes"], part), ""]
    return "\n".join(lines).rstrip()


def _part(sizes: Mapping[str, Any], part: Mapping[str, Any]) -> Iterator[str]:
    yield f"{WHERE[part['contexts']]}: sessions at {sizes['depth']} tokens, prompts of {sizes['prompt']}"
    if "solo_tps" not in part:
        return
    yield f"prompt alone {part['solo_tps']:.0f} t/s"
    for key, what in (("prefill_only", "prompts only"), ("decode_only", "sessions only")):
        if key in part:
            block = part[key]
            blocks = f"blocks {_list(block['on_s'])} / {_list(block['off_s'])} s"
            yield f"{what}, time with the gate on / off: {block['ratio']:.3f} ({blocks})"
    for case in part["cases"]:
        alone = case["alone_ms"]
        yield ""
        yield (
            f"{case['decoders']} sessions alone: {alone['p50']:.2f} ms between tokens "
            f"(p99 {alone['p99']:.2f}, largest {alone['max']:.2f})"
        )
        if case.get("steps"):
            yield from _steps(part, case)
        if case["rows"]:
            yield from _rows(case)


def _steps(part: Mapping[str, Any], case: Mapping[str, Any]) -> Iterator[str]:
    yield f"{'c':>5} {'t(c) ms':>9} {'p99':>8} {'x alone':>8} {'prompt t/s':>11} {'of solo':>8}"
    for step in case["steps"]:
        yield (
            f"{step['chunk']:>5} {step['t_ms']:>9.2f} {step['p99_ms']:>8.2f} {step['t_ms'] / case['alone_ms']['p50']:>8.2f} "
            f"{step['tps']:>11.0f} {100 * step['tps'] / part['solo_tps']:>7.0f}%"
        )
    for ratio in RATIOS:
        chunk, share = bound(part, ratio)
        yield f"bound: a gap of at most {ratio}x alone takes c = {chunk}, the prompt {100 * share:.0f} % of solo"


def _rows(case: Mapping[str, Any]) -> Iterator[str]:
    heads = ("alone", "p50 ms", "p99 ms", "largest", "p99 x", "max x", "share", "gaps", "short ttft")
    title = f"{case['prompts']} prompt(s) beside {case['decoders']} sessions"
    yield _line(title, heads)
    for row in case["rows"]:
        itl, short = row["itl_ms"], row.get("short_ttft_ms")
        times = [f"{value:.1f}" for value in (row["alone_ms"], itl["p50"], itl["p99"], itl["max"])]
        ratios = [f"{row['p99_ratio']:.2f}", f"{row['max_ratio']:.2f}", f"{100 * row['prefill_share']:.0f}%"]
        yield _line(row["policy"], (*times, *ratios, str(row["n_gaps_least"]), f"{short:.0f} ms" if short else "-"))
    for row in case["rows"]:
        worst = row["worst"][0] if row["worst"] else None
        if worst:
            sizes = "+".join(map(str, worst["chunks"])) or "none"
            when = f"{worst['ms']:.1f} ms after {worst['at_s']:.1f} s"
            yield f"  largest of {row['policy']}: {when}, prompt tokens meanwhile: {sizes}"
        if "prefill_sms" in row:
            n = row["n_limited"]
            yield f"  ubatches of {row['policy']} on {row['prefill_sms']} SMs at most: {n or 'none, it has no effect here'}"
        if "outliers" in row:
            yield f"  {_outliers(row)}"


def _outliers(row: Mapping[str, Any]) -> str:
    """How many, and how many of them with what."""
    found = row["outliers"]
    causes = {
        "a new size": sum(gap["size_changed"] for gap in found),
        "the second step of a size": sum(gap["second_of_size"] for gap in found),
    }
    for gap in found:
        for event in gap["events"]:
            causes[f"a {event}"] = causes.get(f"a {event}", 0) + 1
    causes["none of these"] = sum(not (gap["size_changed"] or gap["second_of_size"] or gap["events"]) for gap in found)
    told = ", ".join(f"{n} with {cause}" for cause, n in causes.items() if n)
    return f"gaps above 1.5x the median: {len(found)}{' (' + told + ')' if told else ''}"


def _line(title: str, cells: Iterable[str]) -> str:
    return title.ljust(36) + "".join(f" {cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True))


def _list(values: list[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)
