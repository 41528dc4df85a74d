"""Compute fairseq's label-smoothed cross-entropy without the logits of all tokens.

It is written for the documented interface of fairseq 0.12 (which cannot be installed on a current Python), and tested
with stand-ins for its models. Register it with the configuration and the metrics of fairseq's own criterion:

    @register_criterion("seqpar_cross_entropy", dataclass=LabelSmoothedCrossEntropyCriterionConfig)
    class Chunked(LabelSmoothedCrossEntropyCriterion):
        def __init__(self, task, sentence_avg, label_smoothing, ignore_prefix_size=0):
            super().__init__(task, sentence_avg, label_smoothing, ignore_prefix_size)
            self.chunked = ChunkedCrossEntropy(
                self.padding_idx, label_smoothing, sentence_avg=sentence_avg, ignore_prefix_size=ignore_prefix_size
            )

        def forward(self, model, sample, reduce=True):
            return self.chunked(model, sample, reduce)

fairseq passes only those settings that `__init__` names: one that is left out has no effect, without an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.distributed.vocab_parallel import check_whole
from seqpar.engine.module_calls import extra_in_call
from seqpar.linear.cross_entropy import linear_cross_entropy


class ChunkedCrossEntropy(nn.Module):
    """Compute what fairseq asks of a criterion: `(summed loss, sample size, logged numbers)` of a sample.

    Plain equivalent: fairseq's `label_smoothed_cross_entropy`, which divides the smoothing evenly among all classes but
    the target (eps/(V-1); eps/V in versions before 2021). fairseq's trainer divides by the sample sizes of all
    micro-batches and ranks, so the gradient is exact.

    Args:
        padding_idx: the target that is ignored.
        label_smoothing: eps in [0, 1).
        sentence_avg: whether the sample size is the number of sentences instead of tokens.
        ignore_prefix_size: the first target tokens of each sentence, such as a language tag, that are left out of the
            loss. As in fairseq, the sample size counts them.
        chunk_tokens: the most tokens whose logits exist at once; None chooses by bytes.
    """

    def __init__(
        self,
        padding_idx: int,
        label_smoothing: float = 0.0,
        *,
        sentence_avg: bool = False,
        ignore_prefix_size: int = 0,
        chunk_tokens: int | None = None,
    ) -> None:
        super().__init__()
        self.padding_idx = padding_idx
        self.label_smoothing = label_smoothing
        check_whole(ignore_prefix_size, "ignore_prefix_size", 0)
        self.sentence_avg = sentence_avg
        self.ignore_prefix_size = ignore_prefix_size
        self.chunk_tokens = chunk_tokens

    def forward(
        self, model: nn.Module, sample: Mapping[str, Any], reduce: bool = True
    ) -> tuple[Tensor, int, dict[str, object]]:
        """Return the loss of one sample.

        Args:
            model: a model that, called with `sample["net_input"]` and `features_only=True`, returns `(features,
                extra)`; it has `get_targets(sample, net_output)` and a `decoder` whose `output_projection` is an
                `nn.Linear`.
            sample: a dict with `net_input`, `target` (batch, time) and `ntokens`.
            reduce: must be True; `seqpar.token_scores` computes losses token by token.

        Raises:
            ValueError: `reduce=False`.
            TypeError: an output projection that is not a plain `nn.Linear`, such as an adaptive softmax, or a decoder
                whose `output_layer` does something else than project.
        """
        if not reduce:
            raise ValueError("reduce=False asks for the loss of every token; use seqpar.token_scores for that")
        # Features instead of logits: the projection is part of the loss
        net_output = model(**sample["net_input"], features_only=True)
        projection = _projection(model)
        _refuse_other_output(model, projection, net_output[0])
        prefix = self.ignore_prefix_size
        target = model.get_targets(sample, net_output)  # type: ignore[operator]
        loss = linear_cross_entropy(
            net_output[0][:, prefix:],
            projection.weight,
            target[:, prefix:],
            bias=projection.bias,
            ignore_index=self.padding_idx,
            label_smoothing=self.label_smoothing,
            # eps / (V - 1) on every class but the target
            smoothing_convention="fairseq",
            chunk_tokens=self.chunk_tokens,
        )
        sentences = sample["target"].size(0)
        # fairseq divides the gradient by the sum of the sample sizes of the step
        sample_size = sample["ntokens"]
        if self.sentence_avg:
            sample_size = sentences
        logged = {
            "loss": loss.total.detach(),
            "nll_loss": loss.nll,
            "n_correct": loss.correct,
            "total": loss.tokens,
            "ntokens": sample["ntokens"],
            "nsentences": sentences,
            "sample_size": sample_size,
        }
        return loss.total, sample_size, logged

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """Return True: fairseq may sum the logged numbers over ranks."""
        return True


def _projection(model: nn.Module) -> nn.Linear:
    """Return the decoder's output projection; raise TypeError unless it is a plain `nn.Linear`."""
    decoder = getattr(model, "decoder", None)
    projection = getattr(decoder, "output_projection", None)
    # A subclass with a forward of its own may compute anything
    if not isinstance(projection, nn.Linear) or type(projection).forward is not nn.Linear.forward:
        raise TypeError(
            f"the decoder's output_projection is a {type(projection).__name__}; the chunked loss needs an nn.Linear"
        )
    if extra := extra_in_call(projection):
        raise TypeError(f"the decoder's output_projection does more than multiply: {extra}; the chunked loss would not")
    return projection


def _refuse_other_output(model: nn.Module, projection: nn.Linear, features: Tensor) -> None:
    """Raise TypeError if the decoder's `output_layer` gives other scores than the projection, as copying models do."""
    output_layer = getattr(model.decoder, "output_layer", None)
    if output_layer is None:
        return
    few = features[:1, :2].detach()
    with torch.no_grad():
        try:
            same = torch.equal(output_layer(few).nan_to_num(), projection(few).nan_to_num())
        except (TypeError, AttributeError, KeyError):  # it needs more than the features
            same = False
    if not same:
        raise TypeError(
            f"{type(model.decoder).__name__}.output_layer does something else than call output_projection, which the "
            "chunked loss would leave out; use fairseq's own criterion for this model"
        )
