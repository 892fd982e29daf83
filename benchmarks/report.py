"""What a run comes to: tables for people, and a plot.

python -m benchmarks.report RESULTS.json           prints the tables, and puts the plot beside the file
python -m benchmarks.report --readme RESULTS.json  also puts the tables into README.md, between their markers
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.results import BARE, OURS, PUBLISHED, RAW, Results, Row, load
from benchmarks.start import COMMAND, IMPORTS, RUNS

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"

#: What is held against the readings, each the most that it may be.
RAW_GOAL, FLAT_GOAL, MEMORY_GOAL, WAIT_GOAL, START_GOAL = 1.5, 1.5, 60.0, 250.0, 1.4


def markdown(results: Results) -> str:
    """Goal and reached, side by side."""
    tables = [_published(results), _plain(results), _growth(results), _others(results)]
    return "\n\n".join("\n".join(lines) for lines in [*map(list, tables), [_about(results)]] if lines)


def _published(results: Results) -> Iterator[str]:
    rows = [row for row in results.rows if row.ratio(PUBLISHED, OURS) is not None]
    if rows:
        yield f"| {results.tasks:,} tasks, SQLite | published package | tsg | published : tsg |"
        yield "|---|--:|--:|--:|"
    for row in rows:
        ratio = row.ratio(PUBLISHED, OURS)
        yield f"| {row.title} | {_shown(row, PUBLISHED)} | {_shown(row, OURS)} | **{_number(ratio)}** |"


def _plain(results: Results) -> Iterator[str]:
    rows = [row for row in results.rows if row.ratio(OURS, RAW) is not None or row.ratio(OURS, BARE) is not None]
    if rows:
        yield f"| {results.tasks:,} tasks | plain SQL | tsg | tsg : plain SQL | goal |"
        yield "|---|--:|--:|--:|--:|"
    for row in rows:
        for side, title, goal in (
            (RAW, row.title, RAW_GOAL),
            (BARE, f"{row.title}; without CHECKs and triggers", None),
        ):
            ratio = row.ratio(OURS, side)
            if ratio is not None:
                shown = f"{_shown(row, side)} | {_shown(row, OURS)}"
                yield f"| {title} | {shown} | {_judged(ratio, goal)} | {_goal(goal)} |"


def _growth(results: Results) -> Iterator[str]:
    flat, memory = results.part("flat"), results.part("memory")
    if not flat and not memory:
        return
    # Parts may have been measured apart, and up to other sizes.
    sizes = sorted({size for row in (*flat, *memory) for size in row.readings}, key=int)
    yield f"| as it grows | {' | '.join(f'{int(size):,}' for size in sizes)} | goal |"
    yield f"|---|{'--:|' * len(sizes)}--:|"
    for row in flat:
        first, *more = sizes
        grown = [_judged(row.ratio(size, first), FLAT_GOAL) for size in more]
        cells = [f"1 ({_shown(row, first)})", *grown]
        yield f"| {row.title}: 1,000 active among so many | {' | '.join(cells)} | {_goal(FLAT_GOAL)} |"
    for row in memory:
        cells = [_judged(row.median(size), MEMORY_GOAL, " MB") if size in row.readings else "" for size in sizes]
        yield f"| {row.title} of so many: memory grows by | {' | '.join(cells)} | {_goal(MEMORY_GOAL, ' MB')} |"


def _others(results: Results) -> Iterator[str]:
    busy, start = results.part("busy"), results.part("start")
    if not busy and not start:
        return
    yield "| | reached | goal |"
    yield "|---|--:|--:|"
    for row in busy:
        reached = row.median(OURS)
        if row.unit == "ms":
            goal = WAIT_GOAL if "99th" in row.title else None
            yield f"| beside a sweep in batches: {row.title} | {_judged(reached, goal, ' ms')} | {_goal(goal, ' ms')} |"
        elif row.title == "errors":
            total = sum(row.readings[OURS])
            yield f"| beside a sweep in batches: errors in all | {_judged(total, 0)} | 0 |"
    for row in start:
        ratio = row.ratio(COMMAND, IMPORTS)
        yield f"| `{row.title}` : `python -c '{IMPORTS}'` | {_judged(ratio, START_GOAL)} | {_goal(START_GOAL)} |"


def _about(results: Results) -> str:
    about = results.about
    packages = ("python", "sqlite", "postgresql", "sqlalchemy", "task-state-guard")
    versions = ", ".join(f"{package} {about[package]}" for package in packages if package in about)
    return (
        f"Medians of {results.rounds} in turns ({RUNS} for the command line), and ratios of medians, "
        f"on {about['date'][:10]}: {versions}; "
        f"{about['cpu']}, {about['cores']} cores, {about['memory']}. `{about['command']}`"
    )


def _judged(reached: float | None, goal: float | None, unit: str = "") -> str:
    if reached is None:
        return "not measured"
    missed = goal is not None and reached > goal
    return f"**{_number(reached)}{unit}**{', missed' if missed else ''}"


def _goal(goal: float | None, unit: str = "") -> str:
    return "" if goal is None else f"≤ {goal:g}{unit}"


def _number(value: float | None) -> str:
    assert value is not None
    return f"{value:.0f}" if value >= 100 or value == 0 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _shown(row: Row, side: str) -> str:
    value = row.median(side)
    if row.unit == "bytes":
        return f"{value:.0f} B"
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if value * factor >= 1:
            return f"{_number(value * factor)} {unit}"
    return f"{_number(value * 1e6)} µs"


def into_readme(block: str, readme: Path = README) -> None:
    """Put it between its markers, which must be there."""
    text = readme.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"{readme} has no {BEGIN} … {END}")
    readme.write_text(f"{before}{BEGIN}\n{block}\n{END}{after}")


def main() -> None:
    """Tell of a run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--readme", action="store_true", help="put the tables into README.md")
    asked = parser.parse_args()
    results = load(asked.results)
    picture = asked.results.with_suffix(".svg").absolute()

    # Only here is it needed.
    from benchmarks import plot

    plot.draw(results, picture)
    block = markdown(results)
    print(block)
    if asked.readme:
        address = Path(os.path.relpath(picture, README.parent)).as_posix()
        into_readme(f"![{plot.DESCRIPTION}]({address})\n\n{block}")


if __name__ == "__main__":
    main()
