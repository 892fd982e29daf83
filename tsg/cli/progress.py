"""How far a long piece of work is, on stderr, for people who ask for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO, cast

import click

from tsg.listing import Progress

__all__ = ["bar", "progress_option"]

progress_option = click.option("--progress", is_flag=True, help="Show a bar on stderr, for people.")


class _Tolerant:
    """A stream on which it does not matter whether a bar can be shown: the work goes on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            return self._stream.write(text)
        return 0

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()


@contextmanager
def bar(shown: bool, label: str) -> Iterator[Progress | None]:
    """What shows how far a piece of work is, if asked for."""
    if not shown or sys.stderr is None:
        yield None
        return
    stream = cast("TextIO", _Tolerant(sys.stderr))
    with click.progressbar(length=1, label=label, file=stream, show_pos=True) as shown_bar:

        def show(done: int, total: int) -> None:
            shown_bar.length = max(total, 1)
            shown_bar.update(done - shown_bar.pos)

        yield show
