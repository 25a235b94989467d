"""The comparison as a table of text, and as one HTML page with its plots drawn inline."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from loadtest.router.simulator import Outcome

Row = tuple[str, Outcome]
COLOURS = (
    "#c0392b",
    "#2980b9",
    "#27ae60",
    "#8e44ad",
    "#d35400",
    "#16a085",
    "#7f8c8d",
    "#f1c40f",
    "#2c3e50",
    "#e84393",
)
_HEADS = ("router", "TTFT mean", "p50", "p99 [s]", "hit rate", "of ideal", "skew", "used")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 640, 300, 50, 40


def cells(row: Row) -> list[str]:
    """A row's figures, as text."""
    name, one = row
    p50, p99 = np.percentile(one.ttft, (50, 99))
    return [
        name,
        f"{one.ttft.mean():.3f}",
        f"{p50:.3f}",
        f"{p99:.2f}",
        f"{one.hit_rate:.3f}",
        f"{one.hit_rate / one.ideal:.2f}",
        f"{one.skew:.3f}",
        f"{one.used:.2f}",
    ]


def line(texts: Iterable[str]) -> str:
    """One line of the table."""
    first, *rest = texts
    return f"{first:34s}" + "".join(f"{text:>11s}" for text in rest)


def head() -> str:
    return line(_HEADS)


def write_html(path: Path, sections: Sequence[tuple[str, Sequence[Row]]]) -> None:
    """Write the page. ``sections``: of each workload, its name and a row for each router."""
    parts = [
        "<!doctype html><meta charset=utf-8><title>Routers compared</title><style>body{font:14px sans-serif;margin:2em}"
        "table{border-collapse:collapse}td,th{padding:2px 10px;text-align:right}td:first-child{text-align:left}"
        "svg{margin-right:2em}</style><h1>Routers compared</h1>"
    ]
    for name, rows in sections:
        parts.append(f"<h2>{html.escape(name)}</h2><table><tr>{''.join(f'<th>{text}' for text in _HEADS)}</tr>")
        for row in rows:
            parts.append(f"<tr>{''.join(f'<td>{html.escape(text)}' for text in cells(row))}</tr>")
        parts.append("</table>" + _cdf(rows) + _bars(rows))
    path.write_text("".join(parts))


def _cdf(rows: Sequence[Row]) -> str:
    """Distribution of the time to first token, on a logarithmic axis from 10 ms to 100 s."""
    right, top = _WIDTH - 190, 10
    span_x, span_y = right - _LEFT, _HEIGHT - _BOTTOM - top

    def x(seconds: float) -> float:
        return _LEFT + span_x * (np.log10(min(max(seconds, 0.01), 100)) + 2) / 4

    parts = [f'<svg width="{_WIDTH}" height="{_HEIGHT}" font-size="11">']
    for power in range(-2, 3):
        at = x(10.0**power)
        parts.append(f'<path d="M{at:.0f} {top}V{top + span_y}" stroke="#ddd"/>')
        parts.append(f'<text x="{at:.0f}" y="{_HEIGHT - 22}" text-anchor="middle">{10.0**power:g} s</text>')
    for i, (name, one) in enumerate(rows):
        share = np.linspace(0, 1, 200)
        points = " ".join(
            f"{x(float(seconds)):.1f},{top + span_y * (1 - part):.1f}"
            for seconds, part in zip(np.quantile(one.ttft, share), share.tolist(), strict=True)
        )
        colour = COLOURS[i % len(COLOURS)]
        dash = ' stroke-dasharray="4 3"' if i >= len(COLOURS) else ""
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"{dash}/>')
        parts.append(f'<text x="{right + 10}" y="{top + 12 + 16 * i}" fill="{colour}">{html.escape(name)}</text>')
    parts.append(f'<text x="{_LEFT}" y="{_HEIGHT - 5}">share of requests with a first token by then</text></svg>')
    return "".join(parts)


def _bars(rows: Sequence[Row]) -> str:
    """Hit rate against the ideal (line), and skew."""
    height = 20 * len(rows) + 30
    parts = [f'<svg width="520" height="{height}" font-size="11"><text x="190" y="12">hit rate, | ideal</text>']
    parts.append('<text x="380" y="12">skew</text>')
    for i, (name, one) in enumerate(rows):
        y = 20 + 20 * i
        parts.append(f'<text x="0" y="{y + 11}">{html.escape(name)}</text>')
        parts.append(f'<rect x="190" y="{y}" width="{160 * one.hit_rate:.1f}" height="13" fill="#2980b9"/>')
        parts.append(f'<path d="M{190 + 160 * one.ideal:.1f} {y - 2}v17" stroke="#000"/>')
        parts.append(f'<rect x="380" y="{y}" width="{min(130.0, 130 * one.skew):.1f}" height="13" fill="#d35400"/>')
    return "".join(parts) + "</svg>"
