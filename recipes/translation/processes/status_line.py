"""What is printed while work goes on: text that a terminal does not obey, and a line that shows the progress."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f]")
"""All control characters except the tab and the line break: a terminal would obey those in names or translations."""
PLAIN_SECONDS = 10.0
"""Seconds between two lines if the output is not a terminal."""


class StatusLine:
    """The last line of a stream, which changes while the work goes on and is gone at its end.

    It is redrawn on a terminal, and printed every ten seconds elsewhere.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.live: Live | None = None
        self.redraws = redraws(stream)
        self.next_line = time.monotonic() + PLAIN_SECONDS

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.live:
            self.live.stop()

    def show(self, line: str) -> None:
        """Show the line in place of the previous one; if it cannot be redrawn, print it if the last is old enough."""
        if self.redraws:
            if self.live is None:
                # What is printed elsewhere meanwhile goes above the line, but never to a stream it was not meant for
                redirected = self.stream is sys.stdout
                self.live = Live(console=Console(file=self.stream), transient=True, redirect_stdout=redirected)
                self.live.start()
            self.live.update(Text(line))
        elif time.monotonic() >= self.next_line:
            self.say(line)
            self.next_line = time.monotonic() + PLAIN_SECONDS

    def say(self, *lines: str) -> None:
        """Print lines that stay."""
        for line in map(escape, lines):
            if self.live:
                self.live.console.print(Text(line))
            else:
                print(line, file=self.stream, flush=True)


class SentenceProgress(StatusLine):
    """On stderr, how many sentences are done, how fast, and how long the rest will take.

    Args:
        label: the command, which starts the line; without one, nothing is shown.
        lengths: the subwords of each sentence, in the order of the work: the time left is in proportion to them.
        total: the sentences of all processes that share the work, which this one speaks for; None for only its own.
    """

    def __init__(self, label: str, lengths: Sequence[int], total: int | None = None) -> None:
        super().__init__(sys.stderr)
        self.label = label
        self.lengths = lengths
        self.total = len(lengths) if total is None else total
        self.sentences = 0
        self.began = time.monotonic()

    def advance(self, sentences: int) -> None:
        """Count further sentences, and show the line unless they were the last."""
        self.sentences += sentences
        if self.label and self.sentences < len(self.lengths):
            self.show(self.line())

    def line(self) -> str:
        """Return the line."""
        seconds = max(time.monotonic() - self.began, 1e-9)
        subwords = sum(self.lengths[: self.sentences])
        left = seconds * sum(self.lengths[self.sentences :]) / subwords
        done = self.sentences * self.total // len(self.lengths)
        return (
            f"[{self.label}] {done:,}/{self.total:,} sentences   "
            f"{done / seconds:,.1f} sentences/s   {duration(left)} left"
        )


def redraws(stream: TextIO) -> bool:
    """Return whether lines on this stream can be redrawn: on a terminal, unless its settings ask for plain text."""
    if not stream.isatty():
        return False
    if os.environ.get("NO_COLOR") or os.environ.get("CI"):
        return False
    return os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def duration(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds: 0:07, 12:30, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours == 0:
        return f"{minutes}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}"


def escape(text: str) -> str:
    r"""Return a text with its control characters written as in Python: \x1b."""
    return CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def print_text(text: str, *, flush: bool = False) -> None:
    """Print a text: escaped on a terminal, and unchanged to a file or a pipe."""
    if sys.stdout.isatty():
        text = escape(text)
    print(text, flush=flush)
