"""OpenNMT-py 3 and Eole: their `LossCompute` without the logits of all tokens.

Written against the documented interface of both (neither installs beside a current torch), and tested with stand-ins.
It takes the place of the trainer's loss objects, and never runs a backward:

    from onmt.utils import Statistics
    trainer.train_loss = ChunkedLossCompute(
        model.generator, LabelSmoothing(0.1, "torch", ignore_index=pad), Statistics
    )

Eole's trainer expects a third value, the loss of its quality estimation, and newer ones count `n_tokens`:

    class ForEole(ChunkedLossCompute):
        def forward(self, batch, output, attns, trunc_start=0, trunc_size=None, estim=None):
            loss, statistics = super().forward(batch, output, attns, trunc_start, trunc_size)
            return loss, statistics, output.new_zeros(1)

    ForEole(..., lambda n_words, **counts: eole.utils.Statistics(n_tokens=n_words, **counts))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from seqpar.engine.loss_compute import LossCompute


class ChunkedLossCompute(nn.Module):
    """`(summed loss, statistics)` of a batch, as those trainers ask their loss for it.

    Plain equivalent: `criterion(generator(output).flatten(0, 1), target.flatten())`, where target is `batch["tgt"]`
    from step `tgt_shift_index` on. The trainer divides by its normalization and runs the one backward.

    Args:
        generator: from hidden states to scores, a module that treats every token alone.
        criterion: one that sums, with its `ignore_index`; `seqpar.criteria` says what is asked of it. The trainers' own
            is `seqpar.LabelSmoothing(eps, "torch", ignore_index=padding)`.
        statistics: the trainer's `Statistics`, called with `loss`, `n_batchs`, `n_sents`, `n_words` and `n_correct`.
        tgt_shift_index: 1 where `batch["tgt"]` begins with the start token (translation), 0 where it does not.
        chunk_tokens: the most tokens whose scores exist at once; None chooses by bytes.

    Copy attention, coverage and alignment losses are not known here; keep the trainer's own for those.

    Raises:
        TypeError: a criterion that does not count its correct predictions.
        Everything that `seqpar.LossCompute` raises.
    """

    def __init__(
        self,
        generator: nn.Module,
        criterion: nn.Module,
        statistics: Callable[..., Any],
        *,
        tgt_shift_index: int = 1,
        chunk_tokens: int | None = None,
    ) -> None:
        super().__init__()
        if not hasattr(criterion, "token_loss"):
            raise TypeError(
                f"statistics count correct predictions, and {type(criterion).__name__} has no token_loss to count "
                "them; use seqpar.LabelSmoothing or seqpar.CrossEntropy"
            )
        self.engine = LossCompute(generator, criterion, chunk_tokens=chunk_tokens)
        self.statistics = statistics
        self.tgt_shift_index = tgt_shift_index

    def forward(
        self,
        batch: Mapping[str, Any],
        output: Tensor,
        attns: Mapping[str, Tensor] | None = None,
        trunc_start: int = 0,
        trunc_size: int | None = None,
    ) -> tuple[Tensor, Any]:
        """The loss of one batch, or of some of its time steps.

        Args:
            batch: with `tgt`, (batch, time) or (batch, time, 1), and `srclen`, one number for each sentence.
            output: the decoder's, (batch, time, D).
            attns: not used.
            trunc_start, trunc_size: the time steps of truncated backpropagation; all of them unless given.
        """
        target = batch["tgt"]
        target = target[..., 0] if target.dim() == 3 else target
        size = target.size(1) - trunc_start if trunc_size is None else trunc_size
        end = trunc_start + size
        loss = self.engine(output[:, trunc_start:end], target[:, trunc_start + self.tgt_shift_index : end])
        sentences = len(batch["srclen"]) if trunc_start == 0 else 0  # each counts once
        statistics = self.statistics(
            loss=loss.total.item(),
            n_batchs=int(sentences > 0),
            n_sents=sentences,
            n_words=int(loss.tokens),
            n_correct=int(loss.correct),
        )
        return loss.total, statistics
