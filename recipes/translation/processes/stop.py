"""Reasons to stop training early: a signal, numbers that are no longer finite, or another process that failed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Self

Handler = Callable[[int, FrameType | None], object] | int | None
"""What `signal.signal` accepts and returns: a function, SIG_DFL or SIG_IGN; None for a handler set outside Python."""


class StopSignals:
    """Within the block, note the first Ctrl-C or SIGTERM in `signal`; a second one ends the process.

    With several processes a second one is ignored: the terminal sends a signal to every process, and the launcher then
    sends it again. The launcher itself ends processes that do not stop.
    """

    def __init__(self, several: bool) -> None:
        self.signal: signal.Signals | None = None
        self.several = several
        self._before: dict[signal.Signals, Handler] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self._restore()
        # After an error the launcher sends SIGTERM, which must not cut off the error message
        if kind is not None and self.several:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            return
        self.signal = signal.Signals(number)
        note = f"\n[train] {self.signal.name}: stopping after this step and saving"
        if self.several:
            print(note, flush=True)
            return
        print(f"{note}; send it again to stop at once", flush=True)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
