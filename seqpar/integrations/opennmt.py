"""Replace the `LossCompute` of OpenNMT-py 3 and Eole by one that never has the logits of all tokens.

It is written for the trainers' interface, and tested with stand-ins for them. It replaces the trainer's loss objects;
the backward remains the trainer's:

    from onmt.utils import Statistics
    trainer.train_loss = ChunkedLossCompute(
        model.generator, LabelSmoothing(0.1, "torch", ignore_index=pad), Statistics
    )

Eole 0.6 expects a third value, the loss of its quality estimation, and counts `n_tokens`:

    class ForEole(ChunkedLossCompute):
        def forward(self, batch, output, attns, estim=None, mtp_outputs=None):
            if estim is not None or mtp_outputs:
                raise NotImplementedError("quality estimation and multi-token prediction have losses of their own")
            loss, statistics = super().forward(batch, output)
            return loss, statistics, output.new_zeros(1)

    ForEole(..., lambda n_words, **counts: eole.utils.Statistics(n_tokens=n_words, **counts))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from seqpar.engine.loss_compute import LossCompute
from seqpar.rows.criteria import ignored_target


class ChunkedLossCompute(nn.Module):
    """A module that returns `(summed loss, statistics)` of a batch, as these trainers expect of their loss.

    Plain equivalent: `criterion(generator(output).flatten(0, 1), target.flatten())`, where target is `batch["tgt"]`
    from step `tgt_shift_index` on. The trainer divides by its normalization and runs the only backward.

    Args:
        generator: a module from hidden states to scores that treats every token independently.
        criterion: a criterion that sums, with an `ignore_index`, as for `seqpar.LossCompute`. The trainers' own is
            `seqpar.LabelSmoothing(eps, "torch", ignore_index=padding)`.
        statistics: the trainer's `Statistics`, called with `loss`, `n_batchs`, `n_sents`, `n_words` and `n_correct`.
        tgt_shift_index: 1 where `batch["tgt"]` begins with the start token (translation), 0 where it does not.
        chunk_tokens: the most tokens whose scores exist at once; None chooses by bytes.

    Copy attention, coverage and alignment losses, a language model as a prior and `zero_out_prompt_loss` are not
    supported; keep the trainer's own loss for those.

    Raises:
        TypeError: a criterion that does not count its correct predictions.
        All errors of `seqpar.LossCompute`.
    """

    def __init__(
        self,
        generator: nn.Module,
        criterion: nn.Module,
        statistics: Callable[..., object],
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
        # The trainers read it where they normalise by tokens
        self.padding_idx = ignored_target(criterion)
        self.statistics = statistics
        self.tgt_shift_index = tgt_shift_index

    def forward(
        self,
        batch: Mapping[str, Any],
        output: Tensor,
        attns: Mapping[str, Tensor] | None = None,
        trunc_start: int = 0,
        trunc_size: int | None = None,
    ) -> tuple[Tensor, object]:
        """Return the loss of one batch, or of some of its time steps, and its statistics.

        Args:
            batch: a dict with `tgt`, (batch, time) or (batch, time, 1), and `srclen`, one number per sentence.
            output: the decoder's output (batch, time, D).
            attns: not used.
            trunc_start, trunc_size: the time steps of truncated backpropagation; by default all of them.
        """
        target = batch["tgt"]
        # (batch, time, features): the words are the first feature
        if target.dim() == 3:
            target = target[..., 0]
        end = target.size(1)
        if trunc_size is not None:
            end = trunc_start + trunc_size
        # Output step t predicts target step t + tgt_shift_index
        loss = self.engine(output[:, trunc_start:end], target[:, trunc_start + self.tgt_shift_index : end])
        sentences = 0
        # A batch that is cut along time counts its sentences once, with its first steps
        if trunc_start == 0:
            sentences = len(batch["srclen"])
        statistics = self.statistics(
            loss=loss.total.item(),
            n_batchs=int(sentences > 0),
            n_sents=sentences,
            n_words=int(loss.tokens),
            n_correct=int(loss.correct),
        )
        return loss.total, statistics
