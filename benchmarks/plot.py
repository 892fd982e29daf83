"""The plot of a run: how many times as fast as the published package, and what stays flat."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, NullFormatter

from benchmarks.report import FLAT_GOAL
from benchmarks.results import OURS, PUBLISHED, Results
from benchmarks.sample import ACTIVE

DESCRIPTION = "Times as fast as the published package, and the time of a sweep as history grows"

_INK, _BAR, _GOAL = "#1f2328", "#2f6f9f", "#b35900"
_LINES = {"SQLite": "#2f6f9f", "PostgreSQL": "#7a4fa3"}
# The same bytes for the same readings, text that stays text, and a ground of its own for dark pages.
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tsg",
    "font.family": "sans-serif",
    "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans", "sans-serif"],
    "font.size": 9.5,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw(results: Results, path: Path) -> None:
    """Draw it as SVG."""
    with mpl.rc_context(_STYLE):
        figure, (bars, lines) = plt.subplots(
            1, 2, figsize=(11, 5), layout="constrained", gridspec_kw={"width_ratios": (4, 3)}
        )
        _draw_bars(bars, results)
        _draw_lines(lines, results)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(figure)


def _draw_bars(axes: Any, results: Results) -> None:
    found = [(row.title, row.ratio(PUBLISHED, OURS)) for row in results.rows if row.unit == "s"]
    rows = [(title, ratio) for title, ratio in found if ratio is not None][::-1]
    if not rows:
        axes.set_axis_off()
        return
    titles, ratios = zip(*rows, strict=True)
    drawn = axes.barh(range(len(rows)), [ratio - 1 for ratio in ratios], left=1, color=_BAR, height=0.62)
    axes.set_yticks(range(len(rows)), [fill(title, 36) for title in titles], linespacing=0.95)
    axes.set_xscale("log")
    axes.set_xlim(min(1, *ratios), max(10, *ratios) * 1.6)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.bar_label(drawn, [f"{ratio:.1f}" if ratio < 100 else f"{ratio:.0f}" for ratio in ratios], padding=3)
    axes.axvline(1, color=_INK, linewidth=0.8)
    axes.tick_params(axis="y", length=0)
    axes.set_title(
        f"Times as fast as the published package\n{results.tasks:,} tasks, SQLite", loc="left", fontsize=10.5
    )


def _draw_lines(axes: Any, results: Results) -> None:
    rows = results.part("flat")
    if not rows:
        axes.set_axis_off()
        return
    sizes = sorted({int(size) for row in rows for size in row.readings})
    highest = FLAT_GOAL
    for row in rows:
        work, _, database = row.title.partition(", ")
        own = [size for size in sizes if str(size) in row.readings]
        grown = [row.median(size) / row.median(own[0]) for size in own]
        highest = max(highest, *grown)
        style = "-" if work == "apply" else "--"
        axes.plot(own, grown, style, marker="o", markersize=4, color=_LINES[database], label=row.title)
    axes.axhline(FLAT_GOAL, color=_GOAL, linewidth=1, linestyle=":")
    axes.text(sizes[0], FLAT_GOAL + 0.03, f"goal: at most {FLAT_GOAL:g}", color=_GOAL)
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(0, highest * 1.15)
    axes.legend(loc="lower right", frameon=False)
    axes.set_title(
        f"Flat from {sizes[0]:,} to {sizes[-1]:,}\n{ACTIVE:,} active tasks; time relative to the first",
        loc="left",
        fontsize=10.5,
    )
    axes.set_xlabel("finished tasks beside them")
