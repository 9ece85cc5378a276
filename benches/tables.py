"""Lines of tables. They are made from what was kept as JSON, from nothing else."""

from __future__ import annotations

from typing import Any


def metric_lines(metrics: dict[str, Any]) -> list[str]:
    """One line per metric."""
    return [
        f"{name:<12} {_middle(m['on']):9.2f} {_middle(m['off']):9.2f} {m['unit']:<4} {m['change_percent']:+7.1f} % "
        f"{m['change_interval'][0]:+8.1f} … {m['change_interval'][1]:+6.1f} %  {word(m['better'])}"
        for name, m in metrics.items()
    ]


def word(better: bool | None) -> str:
    """A verdict."""
    return "no difference" if better is None else "better" if better else "WORSE"


def _middle(values: list[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
