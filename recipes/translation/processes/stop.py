"""Why training ends before its time: a person who wants it to, or numbers that are no longer finite."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any, Self


class TrainingError(Exception):
    """Training cannot go on; the message says what to try."""


class OtherRankError(Exception):
    """Another process of the run failed first; the message says which, and why."""


class StopSignals:
    """Within the block, the first Ctrl-C or SIGTERM is only noted in `signal`; a second one ends the process.

    One of several processes leaves that to the launcher, which passes a signal on that the terminal has sent already.
    """

    def __init__(self, several: bool = False) -> None:
        self.signal: signal.Signals | None = None
        self.several = several
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self._restore()
        if kind is not None and self.several:  # the launcher's follows, and must not cut the last words short
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            return
        self.signal = signal.Signals(number)
        more = "" if self.several else "; once more to stop at once"
        print(f"\n[train] {self.signal.name}: stopping after this step and saving{more}", flush=True)
        if not self.several:
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
