"""The comparison as a table of text, and as one HTML page with its plots drawn inline."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from loadtest.autoscale.simulator import Outcome
from loadtest.router.report import COLOURS

Row = tuple[str, Outcome]
HEADS = ("scaler", "lost [min]", "of", "replica-h", "events", "wrong way", "TTFT p50", "p90 [s]")
_WIDTH, _HEIGHT, _LEFT, _TOP = 640, 220, 50, 10


def cells(row: Row) -> list[str]:
    """A row's figures, as text."""
    name, one = row
    p50, p90 = np.percentile(one.ttft, (50, 90)) if len(one.ttft) else (0.0, 0.0)
    return [
        name,
        f"{one.lost_minutes:.1f}",
        f"{one.minutes:.1f}",
        f"{one.replica_hours:.2f}",
        str(one.events),
        str(one.wrong_way),
        f"{p50:.2f}",
        f"{p90:.2f}",
    ]


def write_html(path: Path, sections: Sequence[tuple[str, float, Sequence[Row]]]) -> None:
    """Write the page. ``sections``: of each workload, its name, its length in seconds and a row for each scaler."""
    parts = [
        "<!doctype html><meta charset=utf-8><title>Scalers compared</title><style>body{font:14px sans-serif;margin:2em}"
        "table{border-collapse:collapse}td,th{padding:2px 10px;text-align:right}td:first-child{text-align:left}"
        "svg{margin-right:2em}</style><h1>Scalers compared</h1>"
    ]
    for name, seconds, rows in sections:
        parts.append(f"<h2>{html.escape(name)}</h2><table><tr>{''.join(f'<th>{text}' for text in HEADS)}</tr>")
        for row in rows:
            parts.append(f"<tr>{''.join(f'<td>{html.escape(text)}' for text in cells(row))}</tr>")
        parts.append("</table>" + _counts(rows, seconds) + _trade(rows))
    path.write_text("".join(parts))


def _counts(rows: Sequence[Row], seconds: float) -> str:
    """Replicas ordered, over time."""
    most = max(count for _, one in rows for _, count in one.counts)

    def at(time: float, count: int) -> str:
        return f"{_LEFT + (_WIDTH - _LEFT) * time / seconds:.1f},{_TOP + _HEIGHT * (1 - count / most):.1f}"

    parts = [f'<svg width="{_WIDTH + 10}" height="{_HEIGHT + 40}" font-size="11">']
    parts.append(f'<text x="0" y="{_TOP + 10}">{most}</text><text x="0" y="{_TOP + _HEIGHT}">0</text>')
    for i, (_, one) in enumerate(rows):
        ends = [*(time for time, _ in one.counts[1:]), seconds]
        points = " ".join(
            f"{at(time, count)} {at(end, count)}" for (time, count), end in zip(one.counts, ends, strict=True)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[i % len(COLOURS)]}"/>')
    parts.append(f'<text x="{_LEFT}" y="{_HEIGHT + 30}">replicas ordered, over {seconds / 60:.0f} minutes</text></svg>')
    return "".join(parts)


def _trade(rows: Sequence[Row]) -> str:
    """What each costs against what each loses: the nearer to the corner, the better."""
    hours = max(one.replica_hours for _, one in rows) or 1.0
    lost = max(one.lost_minutes for _, one in rows) or 1.0
    parts = [f'<svg width="560" height="{_HEIGHT + 40}" font-size="11">']
    parts.append(f'<path d="M{_LEFT} {_TOP}V{_TOP + _HEIGHT}H400" stroke="#999" fill="none"/>')
    for i, (name, one) in enumerate(rows):
        x, y = _LEFT + 340 * one.replica_hours / hours, _TOP + _HEIGHT * (1 - one.lost_minutes / lost)
        colour = COLOURS[i % len(COLOURS)]
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 7:.1f}" y="{y + 4:.1f}" fill="{colour}">{html.escape(name)}</text>')
    parts.append(f'<text x="{_LEFT}" y="{_HEIGHT + 30}">replica-hours (to {hours:.1f}) and, upwards, ')
    parts.append(f"minutes lost (to {lost:.1f})</text></svg>")
    return "".join(parts)
