"""What a training tells of itself: everything that observes it is told of a step, and of a validation, in one place."""

from __future__ import annotations

from dataclasses import dataclass

import seqpar
from recipes.translation.run_folder.checkpoint import TrainingState, Translator
from recipes.translation.training.journal import Journal
from recipes.translation.training.outliers import Outliers
from recipes.translation.training.progress import Metrics, Progress
from recipes.translation.training.validation import Validation


@dataclass(frozen=True)
class TrainingRecord:
    """`metrics.jsonl` with the trackers, the journal with the report, the progress line, and the outliers."""

    metrics: Metrics
    journal: Journal
    progress: Progress
    outliers: Outliers

    def step_done(self, state: TrainingState, loss: seqpar.TokenLoss, rate: float, norm: float) -> None:
        """Note a step, which `state` counts already, its learning rate and its gradient norm."""
        mean = float(loss.mean)
        tokens = int(loss.tokens)
        seconds = self.progress.step_done(state, loss=mean, tokens=tokens)
        self.outliers.judge(loss=mean, gradient_norm=norm)
        self.progress.say(*self.outliers.lines(state.step))
        record = {"loss": mean, "learning_rate": rate, "gradient_norm": norm, "tokens": tokens}
        self.metrics.write(step=state.step, **record, **self.outliers.record())
        self.journal.step_done(state.step, seconds)

    def keep(self, translator: Translator, found: Validation) -> None:
        """Write a validation and its translations to the disk, before the state is saved."""
        self.metrics.write(**found.as_dict())
        self.metrics.flush()
        self.journal.keep(translator, found)

    def validated(self, state: TrainingState, found: Validation) -> None:
        """Say a validation whose state is saved; every rank calls this."""
        self.journal.validated(state.step)
        self.progress.validated(state, found, found.parts)
