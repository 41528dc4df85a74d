"""Distillation: a student learns from a teacher's translations of the training sentences, and from its predictions.

The former is sequence-level, the latter word-level distillation (Kim and Rush 2016). The student trains on the
teacher's translations, written as corpora of their own, so that from then on it is a run like any other: the same
commands resume, evaluate and export it.
"""

from __future__ import annotations

from pathlib import Path

import torch

from recipes.translation.processes.ranks import Ranks
from recipes.translation.run_folder.lock import sole_writer
from recipes.translation.run_folder.other_model import teacher_subwords
from recipes.translation.run_folder.resume import check_others_stay
from recipes.translation.settings.config import RunConfig
from recipes.translation.train import train
from recipes.translation.training.student_data import student_settings
from recipes.translation.training.summary import Summary


def distil(config: RunConfig, fresh: bool, ranks: Ranks) -> Summary:
    """Translate the training sentences by `config.training.teacher`, and train a student on the translations.

    Args:
        config: the student's settings, with the original training data.
        fresh: start the training over; translations made from the same sentences are kept.
        ranks: the processes, each of which calls this.
    """
    # Before the expense of translating
    ranks.run_on_main(lambda: check_others_stay(Path(config.run), config.training))
    ranks.run_on_main(lambda: teacher_subwords(config.training.teacher, config.subwords))
    if config.training.threads:
        torch.set_num_threads(config.training.threads)
    with ranks.enter_on_main(lambda: sole_writer(Path(config.run))):
        student = student_settings(config, ranks)
    return train(student, fresh=fresh, ranks=ranks)
