"""What a training reports: its numbers, the machine, sample translations, the report and its progress."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from recipes.translation.files.writing import replace_file
from recipes.translation.processes.ranks import Ranks
from recipes.translation.run_folder.checkpoint import TrainingState
from recipes.translation.settings.config import TrainingConfig
from recipes.translation.training.layout import Layout
from recipes.translation.training.machine import hardware, peak_memory, software
from recipes.translation.training.progress import Metrics, Progress, StepNumbers
from recipes.translation.training.trackers import Tracker
from recipes.translation.training.validation import Validation
from seqpar.distributed.collectives import gather_objects

SHARE = 0.01
"""The largest share of the time between two drawings of the report that drawing may take."""
SAMPLES = 6
"""Number of sentences whose translations are kept at every validation."""


class Journal:
    """Tell everything that observes a training about its steps and validations.

    The observers are the run's `metrics.jsonl` with the trackers, `resources.jsonl`, `samples.jsonl`, `validation.json`
    and `report.html`, which only rank 0 writes, and the progress line.
    """

    def __init__(
        self,
        run: Path,
        settings: TrainingConfig,
        began: Mapping[str, object],
        layout: Layout,
        ranks: Ranks,
        resumed_at: int | None,
        trackers: Sequence[Tracker],
        progress: Progress,
    ) -> None:
        """Note how training begins, or continues after step `resumed_at`; `began` is what only the caller knows."""
        self.run = run
        self.settings = settings
        self.devices = layout.devices
        self.progress = progress
        self.ranks = ranks
        self.next_drawing = 0.0
        self.drawn = True
        after = -1  # a run that starts afresh keeps nothing from an earlier one
        if resumed_at is not None:
            after = resumed_at
        elif ranks.is_main:
            for name in ("validation.json", "report.html"):
                (self.run / name).unlink(missing_ok=True)
        with ExitStack() as held:
            metrics = Metrics(self._path("metrics.jsonl"), after_step=after, trackers=trackers)
            self.metrics = held.enter_context(metrics)
            self.machine = held.enter_context(Metrics(self._path("resources.jsonl"), after_step=after))
            self.samples = held.enter_context(Metrics(self._path("samples.jsonl"), after_step=after))
            known = {
                "command": shlex.join(sys.orig_argv),
                "time": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
                "steps": progress.steps,
                "layout": str(layout),
                "hardware": hardware(self.devices, ranks.world),
                "software": software(),
            }
            self.machine.write(step=resumed_at or 0, began={**known, **began})
            self.files = held.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Draw the report one last time, even after an error, which its curves may explain."""
        if kind is not KeyboardInterrupt and not self.drawn:
            self._draw()
        self.files.close()

    def note_step(self, state: TrainingState, done: StepNumbers, rate: float) -> None:
        """Note a step, which `state` already counts, and its learning rate."""
        loss, tokens, norm = done
        seconds = self.progress.show_step(state, loss=loss, tokens=tokens)
        self.metrics.write(
            step=state.step, loss=loss, learning_rate=rate, gradient_norm=norm, tokens=tokens, **self._scale(state)
        )
        self.machine.write(step=state.step, seconds=round(seconds, 6))
        self.drawn = False

    def note_skipped_step(self, state: TrainingState) -> None:
        """Note a step without an update, which `state` already counts."""
        seconds = self.progress.show_skipped_step(state)
        self.metrics.write(step=state.step, **self._scale(state))
        self.machine.write(step=state.step, seconds=round(seconds, 6))

    def _scale(self, state: TrainingState) -> dict[str, float]:
        """Return what is noted about the loss scale: that of the next step, and how many steps have been skipped."""
        if self.settings.precision != "fp16":
            return {}
        return {"loss_scale": state.loss_scale, "skipped": state.skipped}

    def keep(self, found: Validation) -> None:
        """Write a validation, its translations and samples of them, and all records so far, to the disk.

        Call this before the state is saved.
        """
        self.metrics.write(**found.as_dict())
        if self.ranks.is_main and found.translations:
            pairs = found.sentences
            samples = [
                {"source": pairs[row].source, "reference": pairs[row].target, "translation": found.translations[row]}
                for row in sample_rows(len(pairs))
            ]
            self.samples.write(step=found.step, samples=samples)
            newest = {
                "sources": [pair.source for pair in pairs],
                "references": [pair.target for pair in pairs],
                "translations": found.translations,
            }
            text = json.dumps({"step": found.step, **newest}, ensure_ascii=False) + "\n"
            replace_file(self.run / "validation.json", text.encode())
        self.flush()

    def flush(self) -> None:
        """Flush all records so far to the disk."""
        for records in (self.metrics, self.machine, self.samples):
            records.flush()

    def announce_validation(self, state: TrainingState, found: Validation) -> None:
        """Announce a validation whose state is being saved, and note the peak memory so far; every rank calls this."""
        everyone = gather_objects(peak_memory(self.devices), self.ranks.for_steps().group)
        memory = {
            f"rank {rank} {name}" if len(everyone) > 1 else name: size
            for rank, own in enumerate(everyone)
            for name, size in own.items()
        }
        self.machine.write(step=state.step, memory=memory)
        if time.monotonic() >= self.next_drawing:
            self._draw()
        self.progress.show_validation(state, found)

    def note_start(self, state: TrainingState, found: Validation, of: str) -> None:
        """Note and announce the validation of the model that a run starts from."""
        self.metrics.write(**found.as_dict())
        self.progress.show_validation(state, found, of)

    def _draw(self) -> None:
        """Draw the report, and set the time to draw it again."""
        if not (self.settings.report and self.ranks.is_main):
            return
        began = time.monotonic()
        draw_report(self.run)
        now = time.monotonic()
        self.next_drawing = now + (now - began) / SHARE
        self.drawn = True

    def _path(self, name: str) -> Path | None:
        if self.ranks.is_main:
            return self.run / name
        return None


def sample_rows(sentences: int) -> list[int]:
    """Return the indices of the sentences to keep: evenly spaced, so that they are not all from one document."""
    kept = min(SAMPLES, sentences)
    return [sentences * number // kept for number in range(kept)]


def draw_report(run: Path) -> None:
    """Draw a run's report; an error is reported in one line and does not end the training."""
    output = run / "report.html"
    try:
        from recipes.translation.report.draw import write_report

        write_report(run, output)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"[train] {output} could not be drawn: {reason}", flush=True)
