"""Why training ends before its time: a person who wants it to, or numbers that are no longer finite."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any, Self


class TrainingError(Exception):
    """Training cannot go on; the message says what to try."""


class StopSignals:
    """Within the block, the first Ctrl-C or SIGTERM is only noted in `signal`; a second one ends the process."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        print(
            f"\n[train] {self.signal.name}: stopping after this step and saving; once more to stop at once", flush=True
        )
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
