"""Compute fairseq's label-smoothed cross-entropy without the logits of all tokens.

Register it with the configuration and the metrics of fairseq's own criterion:

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

The model's own forward runs, and the loss is computed where it calls its projection, so inside any wrapper, such as
DDP. On the first call the model runs once more while its projection returns random scores of a few made-up tokens, to
find out whether it does something else with them.

It is tested with stand-ins, and with the models and the criterion of fairseq 0.12.2 where that is installed. With
omegaconf 2.4 and hydra-core 1.3, its source runs on Python 3.11 after two changes: in `dataclass/configs.py` and
`models/transformer/transformer_config.py` a default that is a configuration, such as `common: CommonConfig =
CommonConfig()`, becomes `field(default_factory=CommonConfig)`; and in `dataclass/initialize.py`, `hydra_init` reads the
defaults from an instance: `v = getattr(FairseqConfig(), k)`.

Shape suffixes: B batch, T time, D hidden, V vocabulary, W tokens of the window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.core.checks import check_integer
from seqpar.core.token_loss import TokenLoss
from seqpar.engine.module_calls import what_calls_run
from seqpar.integrations.made_up import (
    WINDOW,
    in_one_line,
    is_plain_linear,
    made_up_logits,
    same_logits,
    undisturbed,
)
from seqpar.linear.cross_entropy import linear_cross_entropy

PROJECTIONS = ("output_projection", "fc_out", "fc3")
"""The projections of fairseq's decoders, which are those of transformers, of `lstm` and of `fconv`."""

METHODS = (
    "forward",
    "extract_features",
    "output_layer",
    "get_normalized_probs",
    "get_normalized_probs_scriptable",
    "get_targets",
)
"""What a model or its decoder has that may change scores or targets."""

INSTEAD = "use fairseq's own criterion for this model"


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

    Example:
        >>> from seqpar.integrations.fairseq import ChunkedCrossEntropy
        >>> criterion = ChunkedCrossEntropy(padding_idx=0, label_smoothing=0.1)
        >>> loss, sample_size, logged = criterion(model, sample)  # a fairseq model, and a batch of its task
        >>> (loss / sample_size).backward()
        >>> sample_size == sample["ntokens"]
        True
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
        check_integer(ignore_prefix_size, "ignore_prefix_size", 0)
        self.sentence_avg = sentence_avg
        self.ignore_prefix_size = ignore_prefix_size
        self.chunk_tokens = chunk_tokens
        self._checked: set[tuple[object, ...]] = set()

    def forward(
        self, model: nn.Module, sample: Mapping[str, Any], reduce: bool = True
    ) -> tuple[Tensor, int, dict[str, object]]:
        """Return the loss of one sample.

        Args:
            model: a model, or a wrapper that passes on its attributes, with a `decoder` whose `output_projection`,
                `fc_out` or `fc3` is an `nn.Linear`: transformers, `transformer_align`, language models, `lstm` and
                `fconv`. Called with `sample["net_input"]`, it returns scores first.
            sample: a dict with `net_input`, `target` (batch, time) and `ntokens`.
            reduce: must be True; `seqpar.token_scores` computes losses token by token.

        Raises:
            ValueError: `reduce=False`.
            TypeError: no such projection (an adaptive softmax; `lightconv`, and `lstm` with shared embeddings, multiply
                by a weight without a module), or a model that does more than project: its `forward`,
                `get_normalized_probs` or `get_targets` changes scores or targets, as copying and masking models do.
        """
        if not reduce:
            raise ValueError("reduce=False asks for the loss of every token; use seqpar.token_scores for that")
        projection = _projection(model)
        self._check(model, projection, sample)
        losses: list[TokenLoss] = []

        def loss_as_scores(features_BTD: Tensor) -> Tensor:
            losses.append(self._token_loss(projection, features_BTD, sample["target"]))
            return losses[-1].total.reshape(1, 1, 1)

        # The loss leaves the model as its scores: DDP must find in them the parameters that were used
        with _called_as(projection, loss_as_scores):
            total = model(**sample["net_input"])[0].reshape(())
        (loss,) = losses
        sentences = sample["target"].size(0)
        # fairseq divides the gradient by the sum of the sample sizes of the step
        sample_size = sample["ntokens"]
        if self.sentence_avg:
            sample_size = sentences
        logged = {
            "loss": total.detach(),
            "nll_loss": loss.nll,
            "n_correct": loss.correct,
            "total": loss.tokens,
            "ntokens": sample["ntokens"],
            "nsentences": sentences,
            "sample_size": sample_size,
        }
        return total, sample_size, logged

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """Return True: fairseq may sum the logged numbers over ranks."""
        return True

    def _token_loss(self, projection: nn.Linear, features_BTD: Tensor, target_BT: Tensor) -> TokenLoss:
        prefix = self.ignore_prefix_size
        return linear_cross_entropy(
            features_BTD[:, prefix:],
            projection.weight,
            target_BT[:, prefix:],
            bias=projection.bias,
            ignore_index=self.padding_idx,
            label_smoothing=self.label_smoothing,
            # eps / (V - 1) on every class but the target
            smoothing_convention="fairseq",
            chunk_tokens=self.chunk_tokens,
        )

    def _check(self, model: nn.Module, projection: nn.Linear, sample: Mapping[str, Any]) -> None:
        """Check the model once for each mode, set of inputs and code that it runs."""
        # A flag among the inputs may choose another branch of the forward
        inputs = sorted((k, v if isinstance(v, bool | str) else type(v)) for k, v in sample["net_input"].items())
        settings = (projection, model.training, *_what_runs(model), *inputs)
        if settings not in self._checked:
            _refuse_more_than_projecting(model, projection, sample)
            self._checked.add(settings)


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return a model without wrappers."""
    while isinstance(inner := vars(model)["_modules"].get("module"), nn.Module):
        model = inner
    return model


def _name(model: nn.Module) -> str:
    """Return the class of a model, without wrappers."""
    return type(_unwrapped(model)).__name__


def _what_runs(model: nn.Module) -> Iterator[object]:
    """Yield what decides which code the model runs, for comparison with another time.

    A method may be replaced on the object, which `what_calls_run` sees, or on its class.
    """
    inner = _unwrapped(model)
    yield from what_calls_run(inner)
    for part in (model, inner, inner.decoder):
        for method in METHODS:
            bound = getattr(part, method, None)
            yield getattr(bound, "__func__", bound)


def _projection(model: nn.Module) -> nn.Linear:
    """Return the decoder's projection to the vocabulary; raise TypeError unless it is a plain `nn.Linear`."""
    decoder = getattr(model, "decoder", None)
    named = {name: getattr(decoder, name, None) for name in PROJECTIONS}
    name, projection = next((item for item in named.items() if item[1] is not None), (PROJECTIONS[0], None))
    where = f"{_name(model)}'s {type(decoder).__name__}"
    if projection is None:
        # With an adaptive softmax, or by a weight alone
        known = f"{', '.join(PROJECTIONS[:-1])} or {PROJECTIONS[-1]}"
        raise TypeError(f"{where} has no {known}: it projects onto the vocabulary in its own way; {INSTEAD}")
    if not is_plain_linear(projection):
        raise TypeError(f"{where}.{name} is a {type(projection).__name__}, and must be an nn.Linear; {INSTEAD}")
    if "forward" in vars(projection) or projection._backward_hooks or projection._backward_pre_hooks:
        raise TypeError(f"{where}.{name} has backward hooks or a forward set on the instance; {INSTEAD}")
    return projection


@contextmanager
def _called_as(projection: nn.Linear, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let the projection compute `forward` inside the block, between its hooks, such as those of weight norm."""
    vars(projection)["forward"] = forward
    try:
        yield
    finally:
        del vars(projection)["forward"]


def _refuse_more_than_projecting(model: nn.Module, projection: nn.Linear, sample: Mapping[str, Any]) -> None:
    """Raise TypeError unless the model's log-probabilities and targets are those of what its projection returns."""
    name = _name(model)
    made_up: list[Tensor] = []

    def scores(features_BTD: Tensor) -> Tensor:
        made_up.append(made_up_logits(features_BTD.new_empty(1, WINDOW), projection.weight[:, 0]))
        # A copy, because a model may change its scores in place
        return made_up[-1].clone()

    with undisturbed(model, projection.weight.device), torch.no_grad():
        try:
            with _called_as(projection, scores):
                output = model(**sample["net_input"])
            theirs_1WV = model.get_normalized_probs(output, log_probs=True)  # type: ignore[operator]
            target_BT = model.get_targets(sample, output)  # type: ignore[operator]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # Before its projection the model is as always, so the error is the batch's own
            if not made_up:
                raise
            raise TypeError(
                f"{name} fails with the scores of a few tokens ({in_one_line(error)}): it does more with them than "
                f"normalise; {INSTEAD}"
            ) from error
    if len(made_up) != 1:
        raise TypeError(f"{name} called its projection {len(made_up)} times in one forward; {INSTEAD}")
    if not same_logits(F.log_softmax(made_up[0], -1), theirs_1WV):
        raise TypeError(
            f"{name}'s log-probabilities are not log_softmax of what its projection returns: its forward or its "
            f"get_normalized_probs scales, masks or mixes the scores; {INSTEAD}"
        )
    if not (isinstance(target_BT, Tensor) and torch.equal(target_BT, sample["target"])):
        raise TypeError(f"{name}.get_targets does not return sample['target']; {INSTEAD}")
