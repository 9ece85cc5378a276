"""Pictures of results, drawn by matplotlib from the JSON alone."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from .grid_cells import depth_name
from .grid_table import BEST, SAME, select

COLORS = ("#0b7a75", "#e07a1f", "#7b4fa3", "#3a6ea5", "#b23a48", "#6b705c")
DASHES = ("-", "--", ":", "-.")
STYLE: Any = {
    "font.family": "DejaVu Sans", "font.size": 10, "svg.fonttype": "path", "svg.hashsalt": "llamamg",
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#dddddd", "axes.axisbelow": True,
}  # fmt: skip
WIDE = 100  # percent; bars beyond that would hide the others on a plain axis
FACTOR_TICKS = (-99, -97, -90, -75, -50, 0, 100, 300, 900, 2900, 9900, 29900)
PANELS = (
    ("prefill", "prefill, tokens/s together", lambda row: row["prefill"] and row["prefill"]["tps"]),
    ("generate", "generation, tokens/s together", lambda row: row["generate"]["tps"]),
    ("itl", "ms between tokens (median; dots: p99)", lambda row: row["generate"]["itl_ms"]["p50"]),
)


def svg(figure: Figure) -> str:
    """The drawing as an element that can stand in HTML; the same figure gives the same text."""
    out = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def grid_figures(result: Mapping[str, Any]) -> dict[str, Figure]:
    """One picture of curves over depth for each number of sessions, by a file name."""
    rows = select(result["rows"], kind=SAME)
    return {f"grid-{n}-sessions": _curves(result, n) for n in sorted({row["n_sessions"] for row in rows})}


def _curves(result: Mapping[str, Any], n_sessions: int) -> Figure:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 3.4), layout="constrained")
        axes = figure.subplots(1, len(PANELS))
        for axis, (_, title, value) in zip(axes, PANELS, strict=True):
            for i, side in enumerate(result["sides"]):
                for kind, dashes in ((SAME, "-"), (BEST, ":")):
                    rows = select(result["rows"], kind=kind, side=side["name"], n_sessions=n_sessions)
                    if rows := [row for row in rows if value(row) is not None]:  # copied sessions have no prefill
                        label = side["label"] + ("" if kind == SAME else ", best -ub")
                        _curve(axis, rows, value, COLORS[i % len(COLORS)], dashes, label)
            axis.set_title(title, loc="left", fontsize=10)
            axis.set_xlabel("tokens in each session")
            axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: depth_name(round(x))))
            axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
        itl = axes[-1]
        for i, side in enumerate(result["sides"]):
            rows = select(result["rows"], kind=SAME, side=side["name"], n_sessions=n_sessions)
            itl.plot([r["depth"] for r in rows], [r["generate"]["itl_ms"]["p99"] for r in rows], ".",
                     color=COLORS[i % len(COLORS)], alpha=0.6)  # fmt: skip
        axes[0].legend(frameon=False, fontsize=8.5)
        figure.suptitle(f"{n_sessions} session{'s' * (n_sessions > 1)}", x=0.01, ha="left", fontweight="bold")
        return figure


def _curve(axis: Any, rows: Sequence[Mapping[str, Any]], value: Any, color: str, style: str, label: str) -> None:
    depths = sorted({row["depth"] for row in rows})
    values = [[value(row) for row in rows if row["depth"] == depth] for depth in depths]
    axis.plot(depths, [float(np.median(v)) for v in values], style, marker="o", ms=4, color=color, label=label)
    axis.vlines(depths, [min(v) for v in values], [max(v) for v in values], color=color, lw=1)


def mixed_figure(result: Mapping[str, Any]) -> Figure:
    """Latency of decoding sessions against the rate of arriving prompts: a curve for each side and number of decoders."""
    panels = (("itl_p99_ms", "ms between tokens, p99"), ("itl_max_ms", "largest gap, ms"))
    labels = {side["name"]: side["label"] for side in result["sides"]}
    names, counts = list(labels), sorted({row["n_decoders"] for row in result["rows"]})
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 3.8), layout="constrained")
        for axis, (key, title) in zip(figure.subplots(1, len(panels)), panels, strict=True):
            for i, name in enumerate(names):
                for n in counts:
                    rows = select(result["rows"], side=name, n_decoders=n)
                    rows = sorted(rows, key=lambda row: row["n_prompts"])
                    at = [row["median"]["prefill_tps"] for row in rows], [row["median"][key] for row in rows]
                    dashes = DASHES[counts.index(n) % len(DASHES)]
                    axis.plot(
                        *at,
                        dashes,
                        marker="o",
                        ms=4,
                        color=COLORS[i % len(COLORS)],
                        label=f"{labels[name]}, {n} decode",
                    )
                    for row, x, y in zip(rows, *at, strict=True):
                        axis.annotate(str(row["n_prompts"]), (x, y), (4, 3), textcoords="offset points", fontsize=7)
            axis.set_yscale("log")
            axis.set_title(title, loc="left", fontsize=10)
            axis.set_xlabel("prefill of the arriving prompts, tokens/s (numbers: how many prompts)")
        figure.axes[0].legend(frameon=False, fontsize=8)
        return figure


def depth_figure(result: Mapping[str, Any], labels: Mapping[str, str]) -> Figure:
    """Prefill and decoding of one session over depth, a curve for each side."""
    panels = (("prefill_tps", "prefill, tokens/s"), ("decode_tps", "decoding, tokens/s"))
    measured = [row for row in result["rows"] if row.get("n_sessions") == 1]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 3.4), layout="constrained")
        for axis, (key, title) in zip(figure.subplots(1, len(panels)), panels, strict=True):
            for i, side in enumerate(result["sides"]):
                rows = select(measured, side=side)
                _curve(axis, rows, lambda row, key=key: row[key], COLORS[i % len(COLORS)], "-", labels[side])
            axis.set_title(title, loc="left", fontsize=10)
            axis.set_xlabel("depth in tokens")
            axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: depth_name(round(x))))
            axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
        figure.axes[0].legend(frameon=False, fontsize=8.5)
        return figure


def bars_figure(title: str, bars: Sequence[tuple[str, float, float, float, bool]], lower_is_better: bool) -> Figure:
    """Horizontal bars: (name, change in %, low, high, claimed). A gain is green, a loss red; what is not claimed is pale."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 0.9 + 0.34 * max(1, len(bars))), layout="constrained")
        axis = figure.subplots()
        names = [bar[0] for bar in bars]
        at = np.arange(len(bars))
        changes = np.array([bar[1] for bar in bars])
        spread = np.array([[bar[1] - bar[2] for bar in bars], [bar[3] - bar[1] for bar in bars]])
        colors = [COLORS[0] if (bar[1] < 0) == lower_is_better else COLORS[4] for bar in bars]
        drawn = axis.barh(at, changes, color=colors, xerr=np.maximum(spread, 0), ecolor="#555555", capsize=2)
        for patch, bar in zip(drawn, bars, strict=True):
            patch.set_alpha(1.0 if bar[4] else 0.25)
        axis.axvline(0, color="#333333", lw=0.8)
        axis.set_yticks(at, names)
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
        low, high = min(0.0, *(bar[2] for bar in bars)), max(0.0, *(bar[3] for bar in bars))
        if high > WIDE or low < -50:
            _by_factors(axis, low, high)
        axis.set_xlabel(
            "change with the plugin, %\n(line: 99 % interval; green: gain, red: loss, pale: no difference claimed)"
        )
        axis.set_title(title, loc="left", fontsize=10, fontweight="bold")
        return figure


def _by_factors(axis: Any, low: float, high: float) -> None:
    """An axis from `low` to `high` percent on which a half lies as far left as a double lies right: small changes show, too."""

    def factor(percent: Any) -> Any:
        return np.log(np.maximum(1 + np.asarray(percent) / 100, 1e-4))

    def percent(factor: Any) -> Any:
        return 100 * np.expm1(factor)

    room = 0.03 * (factor(high) - factor(low))
    axis.set_xscale("function", functions=(factor, percent))
    axis.set_xlim(percent(factor(low) - room), percent(factor(high) + room))
    axis.set_xticks([tick for tick in FACTOR_TICKS if low <= tick <= high])
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:+.0f}" if x else "0"))
    axis.xaxis.set_minor_locator(NullLocator())
