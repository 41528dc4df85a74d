"""The progress line of a training, and `metrics.jsonl` with the numbers of every step."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple, Self

import torch
from torch import Tensor

import seqpar
from recipes.translation.files.writing import add_to, adding_to, check_regular, replace_file, writing_to
from recipes.translation.processes.status_line import StatusLine, duration
from recipes.translation.run_folder.checkpoint import TrainingState
from recipes.translation.run_folder.step_records import record_of
from seqpar.core.device_facts import FACTS

if TYPE_CHECKING:
    from recipes.translation.training.trackers import Tracker
    from recipes.translation.training.validation import Validation


class StepNumbers(NamedTuple):
    """What is noted about a step."""

    loss: float
    """The mean over its tokens."""
    tokens: int
    norm: float
    """The norm of the gradient before clipping."""


def read_step(loss: seqpar.TokenLoss, norm: Tensor) -> StepNumbers:
    """Return the numbers of a step, read from the device all at once: each read waits for the device to finish."""
    # float64 holds each of them exactly
    exact = torch.float64 if FACTS[norm.device.type].has_float64 else torch.float32
    numbers = [t.detach().to(norm.device, exact).reshape(()) for t in (loss.total, loss.tokens, norm)]
    total, tokens, gradient = torch.stack(numbers).tolist()
    return StepNumbers(total / max(tokens, 1), int(tokens), gradient)


SLOW_STEPS = 10
"""How many of a run's first steps count as slow: they take longer than the others."""


class Progress(StatusLine):
    """A line with step, loss, tokens/s and time left: redrawn on a terminal, printed every ten seconds in a log.

    Tokens are target tokens without padding; loss and speed are those of the last hundred steps. It also counts the
    run's seconds, in `state`.
    """

    def __init__(
        self,
        state: TrainingState,
        steps: int,
        share_of_peak: float = 0.0,
        *,
        validate_every: int = 0,
        classes: int = sys.maxsize,
    ) -> None:
        """Begin after the steps of `state`.

        `share_of_peak` is that of one token a second, or 0 if unknown; `classes` is the number of target subwords.
        """
        super().__init__(sys.stdout)
        self.steps = steps
        self.share_of_peak = share_of_peak
        self.validate_every = validate_every
        self.classes = classes
        self.recent: deque[tuple[float, int, float]] = deque(maxlen=100)
        self.mark = time.monotonic()
        self.began = self.mark - state.seconds

    def show_step(self, state: TrainingState, *, loss: float, tokens: int) -> float:
        """Show the end of a step and return its seconds; `loss` is the mean over its tokens, `tokens` their number."""
        seconds = self._tick(state)
        state.train_seconds += seconds
        self.recent.append((seconds, tokens, loss))
        self.show(self.line(state.step))
        return seconds

    def show_skipped_step(self, state: TrainingState) -> float:
        """Say that a step was skipped, and return its seconds."""
        seconds = self._tick(state)
        state.train_seconds += seconds
        self.say(
            f"[train] step {state.step:,}: the gradient overflowed in float16: update skipped, loss scale reduced to "
            f"{state.loss_scale:g} ({state.skipped:,} skipped so far)"
        )
        return seconds

    def _step_seconds(self) -> float:
        """Return the mean seconds of recent steps, without the oldest, which may be the slow first ones of a run."""
        counted = list(self.recent)[SLOW_STEPS:] or list(self.recent)
        return sum(each[0] for each in counted) / max(len(counted), 1)

    def show_validation(self, state: TrainingState, found: Validation, of: str = "") -> None:
        """Show the result of a validation and that of each corpus; its seconds do not count as training.

        `of` names the model that a run starts from, if that is what was validated.
        """
        line = f"[valid] step {state.step:>6,}   {found}"
        if of:
            line += f"   {of}, before the first step"
        elif is_worse_than_guessing(found, self.classes):
            line += f"   worse than guessing: {guessing(self.classes)}"
        elif state.best_step == state.step:
            line += "   best so far"
        self.say(line, *(f"[valid]   {part}: {of_part}" for part, of_part in found.parts.items()))
        # The clock restarts, so that the next step is not charged for the validation
        seconds = self._tick(state)
        left = self.steps - state.step
        if self.validate_every and self.recent and left > 0:
            left_seconds = left * self._step_seconds() + -(-left // self.validate_every) * seconds
            whole = in_words(state.seconds + left_seconds)
            self.say(f"[train] the whole run, with validations, will take about {whole}")
        self.validate_every = 0  # it has been said

    def line(self, step: int) -> str:
        """Return the progress line of `step`."""
        seconds = max(sum(each[0] for each in self.recent), 1e-9)
        tokens = sum(each[1] for each in self.recent)
        # The mean over tokens, as in training: a step of few tokens counts less than one of many
        loss = sum(each[1] * each[2] for each in self.recent) / tokens
        left = (self.steps - step) * seconds / len(self.recent)
        speed = tokens / seconds
        used = ""
        if self.share_of_peak:
            used = f" ({speed * self.share_of_peak:.0%} of the peak)"
        return (
            f"[train] step {step:>6,}/{self.steps:,}   loss {loss:.3f}   "
            f"{speed:,.0f} tokens/s{used}   {duration(left)} left"
        )

    def _tick(self, state: TrainingState) -> float:
        """Return the seconds since the last tick."""
        before = self.mark
        self.mark = time.monotonic()
        state.seconds = self.mark - self.began
        return self.mark - before


def is_worse_than_guessing(found: Validation, classes: float) -> bool:
    """Return whether guessing that all target subwords are equally likely would be better."""
    return (found["perplexity"] or 0.0) > classes


def guessing(classes: int) -> str:
    """Return a phrase that says what the loss of guessing is."""
    return f"with all {classes:,} subwords equally likely, the loss is {math.log(classes):.2f}"


def in_words(seconds: float) -> str:
    """Return a time in words: 40 seconds, 12 minutes, 2.5 hours."""
    if seconds < 1.5:
        return "1 second"
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3_600:.1f} hours"


class Metrics:
    """`metrics.jsonl`: one JSON object per line, each with the step it belongs to."""

    def __init__(self, path: Path | None, *, after_step: int, trackers: Sequence[Tracker] = ()) -> None:
        """Append to `path`, or write nothing if it is None; each record also goes to the trackers.

        Records after `after_step`, from a process that ended before it saved these steps, are removed. Lines that are
        not records are moved to `metrics.odd.txt` in the same folder; an incomplete last line is dropped.
        """
        self.path = path
        self.trackers = trackers
        self.file: IO[bytes] | None = None
        if path is not None:
            check_regular(path)
            if path.exists():
                _remove_after(path, after_step)
            with writing_to(path):
                self.file = adding_to(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.file is not None:
            with suppress(OSError):  # a full disk was reported by `write`, and the buffer still cannot be written
                self.file.close()
        for tracker in self.trackers:
            tracker.close()

    def write(self, **values: object) -> None:
        """Append one record."""
        if self.file is None:
            return
        assert self.path is not None
        with writing_to(self.path):
            self.file.write(json.dumps(values).encode() + b"\n")
            self.file.flush()
        for tracker in self.trackers:
            tracker.log(values)

    def flush(self) -> None:
        """Flush the records to the disk, where they must be before a state that relies on them is saved."""
        if self.file is not None:
            os.fsync(self.file.fileno())


def _remove_after(path: Path, after_step: int) -> None:
    """Replace `path` with a file that has only the records up to a step."""
    before = path.read_bytes()
    *lines, cut_off = before.split(b"\n")
    # A process that is killed while writing may leave half a line, or a whole one without its line break
    if record_of(cut_off) is not None:
        lines.append(cut_off)
    records = [(line, record_of(line)) for line in lines if line.strip()]
    remaining = b"".join(
        line + b"\n" for line, record in records if record is not None and record["step"] <= after_step
    )
    odd = [line + b"\n" for line, record in records if record is None]
    if odd:
        aside = path.with_name(f"{path.stem}.odd.txt")
        add_to(aside, b"".join(odd))
        print(f"[train] {path}: {len(odd):,} lines that are not records of steps were moved to {aside}", flush=True)
    if remaining != before:
        replace_file(path, remaining)
