"""Train with OpenNMT-py 3 or Eole without ever holding the logits of all tokens at once.

    trainer = build_trainer(...)
    apply_seqpar_loss(trainer)
    trainer.train(...)

The trainer keeps its own `LossCompute`, whose code runs unchanged; only its generator and its criterion are replaced.
The generator then passes the hidden states on, and the criterion projects them in chunks. So `zero_out_prompt_loss`,
truncated backpropagation, and the losses of coverage, alignment, quality estimation and multi-token prediction are the
trainer's own, and so are its statistics.

It is tested with stand-ins, and with OpenNMT-py 3.5 and Eole 0.6.4 if they are installed.

Shape suffixes: N tokens, D hidden.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from seqpar.core.token_loss import TokenLoss
from seqpar.engine.loss_compute import LossCompute
from seqpar.rows.criteria import LabelSmoothing

INSTEAD = "train it without apply_seqpar_loss"


def apply_seqpar_loss(trainer: Any, *, chunk_tokens: int | None = None) -> None:
    """Make a trainer of OpenNMT-py or Eole compute its loss, in training and validation, in chunks.

    Plain equivalent: the trainer itself. Its loss, its gradients and its statistics keep their values; sums are in
    float32, or wider for a wider model.

    Args:
        trainer: a trainer whose `train_loss` and `valid_loss` are `LossCompute` objects of OpenNMT-py or Eole, with
            a generator that treats every token independently and torch's cross-entropy.
        chunk_tokens: the maximum number of tokens whose scores exist at once; None chooses it by size in bytes.

    Raises:
        TypeError: a loss that needs the scores of all tokens: copy attention, sparsemax, or a language model as a
            prior; or one that has been applied before.
        RuntimeError: after the second training forward of `trainer.model`, if the trainer has not asked for the loss,
            as in reinforcement-learning trainers, which have their own loss.
        Exception: whatever `seqpar.LossCompute` raises.

    Example:
        >>> from seqpar.integrations.opennmt import apply_seqpar_loss
        >>> plain, _ = trainer.train_loss(batch, *trainer.model(batch["src"], batch["tgt"]))
        >>> apply_seqpar_loss(trainer)
        >>> chunked, _ = trainer.train_loss(batch, *trainer.model(batch["src"], batch["tgt"]))
        >>> torch.allclose(chunked, plain)
        True
    """
    losses = dict.fromkeys([trainer.train_loss, trainer.valid_loss])
    criteria = {loss: ChunkedCriterion(loss, chunk_tokens) for loss in losses}
    for loss, criterion in criteria.items():
        loss.generator = HiddenStates()
        loss.criterion = criterion
    _verify(trainer, criteria[trainer.train_loss])


class UnprojectedScores:
    """Hidden states that stand in for their scores and offer what the trainers use of scores."""

    def __init__(self, hidden_ND: Tensor) -> None:
        self.hidden_ND = hidden_ND
        self.predicted_N: Tensor | None = None

    def to(self, dtype: torch.dtype) -> UnprojectedScores:
        """Return self: the criterion computes in float32 or wider."""
        return self

    def max(self, dim: int) -> tuple[None, Tensor | None]:
        """Return predictions (N,) of which as many equal their targets as the model's own do: trainers count these."""
        return None, self.predicted_N

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse everything else."""
        raise TypeError(f"the trainer's loss reads .{name} of the scores, which do not exist in chunks; {INSTEAD}")


class HiddenStates(nn.Module):
    """A generator that leaves the projection to the criterion."""

    def forward(self, hidden_ND: Tensor) -> UnprojectedScores:
        """Return the hidden states in place of their scores."""
        return UnprojectedScores(hidden_ND)


class ChunkedCriterion(nn.Module):
    """A criterion for hidden states: the generator and the criterion of a `LossCompute`, computed in chunks."""

    def __init__(self, loss: Any, chunk_tokens: int | None) -> None:
        super().__init__()
        own = loss.criterion
        for name in ("lm_generator", "lm_prior_model"):
            if getattr(loss, name, None) is not None:
                raise TypeError(f"the loss has a language model as a prior ({name}), which needs all scores; {INSTEAD}")
        if getattr(loss, "copy_attn", False) or type(own) is not nn.CrossEntropyLoss or loss.generator is None:
            computed = f"{type(own).__name__} of {type(loss.generator).__name__}"
            raise TypeError(f"the loss computes {computed} (copy attention, sparsemax or no generator); {INSTEAD}")
        if own.reduction != "sum" or own.weight is not None:
            raise TypeError(f"the loss's CrossEntropyLoss has class weights or reduction={own.reduction!r}; {INSTEAD}")
        # The trainers normalise by it
        self.ignore_index = own.ignore_index
        criterion = LabelSmoothing(own.label_smoothing, "torch", ignore_index=own.ignore_index)
        self.engine = LossCompute(loss.generator, criterion, chunk_tokens=chunk_tokens)
        self.called = False

    def forward(self, scores: UnprojectedScores, target_N: Tensor) -> Tensor:
        """Return the summed loss."""
        self.called = True
        loss: TokenLoss = self.engine(scores.hidden_ND, target_N)
        assert loss.correct is not None
        kept_N = target_N != self.ignore_index
        scores.predicted_N = target_N.where(kept_N & (kept_N.cumsum(0) <= loss.correct), -1)
        return loss.total


def _verify(trainer: Any, criterion: ChunkedCriterion) -> None:
    """Make the model's second training forward raise RuntimeError if the loss was not called after the first."""
    forwards = 0

    def after_forward(model: nn.Module, args: object, output: object) -> None:
        nonlocal forwards
        if criterion.called:
            hook.remove()
        elif model.training and torch.is_grad_enabled():
            forwards += 1
        if forwards > 1:
            kind = type(trainer.train_loss).__name__
            twice = f"{type(trainer).__name__} has run its model twice without calling its train_loss, a {kind}"
            raise RuntimeError(f"{twice}: it trains with another loss, which is not chunked; {INSTEAD}")

    hook = trainer.model.register_forward_hook(after_forward)
