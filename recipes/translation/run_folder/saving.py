"""Saving in the background: the tensors are copied in memory, and a thread writes the copy during the next steps."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor

from recipes.translation.files.atomic_folder import whole_folder
from recipes.translation.files.tensors import AskedOnce
from recipes.translation.run_folder.checkpoint import TrainingState, write_model, write_state
from recipes.translation.run_folder.numbered import model_at, point_at, state_of
from recipes.translation.run_folder.translator import Translator
from recipes.translation.settings.training import TrainingConfig, save_interval


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies in CPU memory."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


class Saver:
    """Writes a run's checkpoints, one after another, in a thread of its own.

    An error in the thread is raised by the next call of `check`, `wait` or `save`, or at the end of the block, which
    waits for the thread.
    """

    def __init__(
        self,
        run: Path,
        settings: TrainingConfig,
        saved_step: int | None,
        *,
        writes: bool = True,
        main_says: Callable[[bool], bool] = bool,
        copied: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = copies,
    ) -> None:
        """Save for the run that was resumed from `saved_step`, if this is the process that `writes`.

        If there are several processes, all call `is_due` and `save` at the same steps; `main_says` gives all of them
        rank 0's answer. `copied` copies a process's own tensors and returns the whole ones, each of which is asked for
        once; only rank 0 gets usable tensors, but the other processes must ask as well.
        """
        self.run = run
        self.writes = writes
        self._main_says = main_says
        self._copied = copied
        self.keep = settings.keep_checkpoints
        self.saved_step = saved_step
        """The step whose checkpoint was last passed to `save`, or resumed from."""
        self._interval = save_interval(settings.save_every)
        self._saved_at = time.monotonic()
        self._saves: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._error: BaseException | None = None
        # Now: if memory for it is lacking later on, starting a thread waits forever. A daemon, so that it does not hold
        # up a process that is told to end at once
        threading.Thread(target=self._work, name="saving", daemon=True).start()

    def is_due(self, step: int) -> bool:
        """Return whether `training.save_every` asks for a checkpoint at this step; all ranks get the same answer."""
        if step == self.saved_step:
            return False
        if self._interval.seconds:  # the ranks' clocks differ
            return self._main_says(time.monotonic() - self._saved_at >= self._interval.seconds)
        return self._interval.steps > 0 and step % self._interval.steps == 0

    def save(
        self,
        translator: Translator,
        facts: Mapping[str, object],
        weights: Mapping[str, Tensor],
        moments: Mapping[str, Tensor],
        state: TrainingState,
        *,
        validated: bool = False,
        better: bool = False,
    ) -> None:
        """Start saving what training needs to resume, once the previous save has ended.

        Weights and moments are copied before this returns. From `translator`, its settings and subwords are saved.
        """
        self.saved_step = state.step
        self.wait()
        weights = self._copied(weights)
        moments = self._copied(moments)
        state = replace(state)
        facts = dict(facts)
        keep = self.keep if validated else 0

        def write() -> None:
            if not self.writes:
                return
            model = model_at(self.run, state.step)
            digest = write_model(model, translator, weights, facts)
            write_state(state_of(model), digest, moments, state)
            point_at(self.run, state.step, better=better, keep=keep)

        self._saved_at = time.monotonic()
        self._saves.put(lambda: self._run(write, (weights, moments)))

    def _work(self) -> None:
        """Carry out the saves that are put into the queue, until a None."""
        while (save := self._saves.get()) is not None:
            save()
            save = None  # which frees the copies
            self._saves.task_done()
        self._saves.task_done()

    def _run(self, write: Callable[[], None], tensors: Sequence[Mapping[str, Tensor]]) -> None:
        try:
            try:
                write()
            finally:
                # Ask for the tensors that were not written: other processes are waiting to send them
                for each in tensors:
                    if isinstance(each, AskedOnce):
                        each.finish()
        except BaseException as error:
            self._error = error

    def check(self) -> None:
        """Raise the error of a failed save."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Wait until the current save is on the disk; raise its error."""
        self._saves.join()
        self.check()

    def last(self) -> Path | None:
        """Return `<run>/last` if it exists once the current save has ended, successfully or not."""
        self._saves.join()
        last = self.run / "last"
        return last if whole_folder(last) else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except Exception as failed:
            if kind is None:
                raise
            print(f"[train] {failed}", file=sys.stderr)  # in addition to the error that ends the run
        finally:
            self._saves.put(None)
