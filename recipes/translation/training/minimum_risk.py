"""Minimum-risk training: the model's own translations are made likelier as they are better than one another.

With y_1 .. y_N sampled from p_T(y | x), whose logits are divided by a temperature T, and u_i the sentence-BLEU of y_i
between 0 and 1, the loss of a sentence is

    (1 - w) CE  +  w / N sum_i (1 - u_i)

with the usual loss CE of its tokens, and a weight w. The second part estimates the risk E[1 - u(y)] (Shen et al. 2016,
equation 9); the gradient of this expectation is estimated, without bias, by that of

    - w / N sum_i A_i log p_T(y_i | x)     with     A_i = u_i - 1 / (N - 1) sum_{j != i} u_j

(Williams 1992; the mean of the other samples as the baseline: Kool et al. 2019, section 3). The factors A_i are known
before any logit of the samples is computed for a gradient, so this is a cross-entropy with token weights, and the
logits exist for one chunk of tokens at a time.

Shape suffixes: B batch, R rows of samples, S source time, T target time, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import seqpar
from models import EncoderDecoder, default_limit, sample
from recipes.translation.data.batches import padded
from recipes.translation.scores.statistics import sentence_bleu
from recipes.translation.settings.config import DataConfig
from recipes.translation.text.bleu_tokenizers import tokenizer_for
from recipes.translation.text.subwords import EOS, PAD, Subwords
from recipes.translation.training.by_device import summed_by_device

Ids = list[int]
Utility = Callable[[Sequence[Ids], Sequence[Ids]], Tensor]
"""Subwords of translations, and of a reference for each, -> how good each translation is, from 0 to 1."""


class SentenceBleu:
    """sacreBLEU's sentence-BLEU of subwords joined to text, from 0 to 1, by the tokeniser of the settings.

    Where these leave it to the script, each reference decides for itself, whatever the others of its batch are.
    """

    def __init__(self, subwords: Subwords, data: DataConfig) -> None:
        self.subwords = subwords
        self.data = data

    def __call__(self, translations: Sequence[Ids], references: Sequence[Ids]) -> Tensor:
        """Return the score of each translation in float64."""
        texts = self.subwords.decode(list(translations))
        wanted = self.subwords.decode(list(references))
        names = [self.tokenizer_of(reference) for reference in wanted]
        scores = torch.empty(len(texts), dtype=torch.float64)
        for name in dict.fromkeys(names):
            rows = [row for row, own in enumerate(names) if own == name]
            found = sentence_bleu([texts[row] for row in rows], [wanted[row] for row in rows], name)
            scores[rows] = torch.from_numpy(found) / 100
        return scores

    def tokenizer_of(self, reference: str) -> str:
        """Return the tokeniser of a reference; characters stand in for one that no check before training has seen."""
        checked = tokenizer_for(self.data.tokenize, self.data.target, [])
        name = tokenizer_for(self.data.tokenize, self.data.target, [reference])
        if name != checked and name not in ("13a", "zh"):
            return "char"
        return name


class WithSamples(nn.Module):
    """A model's hidden states of a batch, and those of translations that it samples of the same sentences.

    Args:
        model: the model in training, whole.
        utility: how good a sample is.
        samples: N, at least 2.
        temperature: T, above 0.
        start: the symbols before a target.
        max_length: the most subwords of a sample, as of any translation.
    """

    def __init__(
        self,
        model: EncoderDecoder,
        utility: Utility,
        samples: int,
        temperature: float,
        start: tuple[int, ...],
        max_length: int,
    ) -> None:
        super().__init__()
        self.model = model
        self.utility = utility
        self.samples = samples
        self.temperature = temperature
        self.start = start
        self.max_length = max_length

    def forward(self, src: Tensor, tgt: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the hidden states of the targets `tgt` (B, T), and of the samples: states, targets, factors, risks."""
        drawn, ended = self.drawn(src)
        references = [[token for token in row[len(self.start) :] if token != PAD] for row in tgt.tolist()]
        repeated = [reference for reference in references for _ in range(self.samples)]
        utility = self.utility(drawn, repeated)
        rows = Rows.of(drawn, ended, advantages(utility, self.samples) / self.samples, self.samples)
        inputs, targets = rows.tensors(self.start)
        # With dropout, like every pass of training; the samples were drawn without it
        hidden_RTD = self.model(src[rows.sentences], inputs.to(src.device))
        wide = torch.promote_types(self.model.generator.weight.dtype, torch.float32)
        return self.model(src, tgt), {
            "sampled": hidden_RTD,
            "sampled_target": targets.to(src.device),
            "factor": torch.tensor(rows.factors, device=src.device, dtype=wide),
            "risk": (1 - utility).view(-1, self.samples).mean(1).sum().to(src.device, wide),
        }

    def drawn(self, src: Tensor) -> tuple[list[Ids], list[bool]]:
        """Return N samples of each sentence, and of each whether it has ended within the limit of a translation."""
        limits = [min(default_limit(length), self.max_length) for length in (src != PAD).sum(1).tolist()]
        seeds = torch.randint(2**62, (len(src),)).tolist()
        # As in `translate`, whatever the precision of training
        with torch.autocast(src.device.type, enabled=False):
            found = sample(
                self.model,
                src,
                bos=self.start,
                eos=EOS,
                seeds=seeds,
                samples=self.samples,
                temperature=self.temperature,
                max_length=limits,
            )
        ended = [len(each.tokens) < limit for limit, row in zip(limits, found, strict=True) for each in row]
        return [each.tokens for row in found for each in row], ended


def advantages(utility: Tensor, samples: int) -> Tensor:
    """Return how much better each sample is than the mean of the others of its sentence: u_i - mean of u_j, j != i."""
    # u_i - (sum - u_i) / (N - 1) = N / (N - 1) (u_i - mean)
    above_mean: Tensor = seqpar.objectives.group_advantages(utility, samples, divide_by_std=False)
    return above_mean * (samples / (samples - 1))


class Rows:
    """The different samples of each sentence: what occurs twice is computed once, with the sum of both factors."""

    def __init__(self) -> None:
        self.sentences: list[int] = []
        self.targets: list[Ids] = []
        self.factors: list[float] = []

    @classmethod
    def of(cls, drawn: Sequence[Ids], ended: Sequence[bool], factors: Tensor, samples: int) -> Rows:
        """Collect the samples, `samples` of each sentence one after the other."""
        rows = cls()
        place: dict[tuple[int, ...], int] = {}
        for number, (ids, end, factor) in enumerate(zip(drawn, ended, factors.tolist(), strict=True)):
            target = list(ids)
            if end:  # a translation that was cut off did not draw an end
                target.append(EOS)
            row = place.setdefault((number // samples, *target), len(rows.targets))
            if row == len(rows.targets):
                rows.sentences.append(number // samples)
                rows.targets.append(target)
                rows.factors.append(0.0)
            rows.factors[row] += factor
        return rows

    def tensors(self, start: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return inputs and targets (R, T) of the decoder; start symbols are not predicted, as they are not drawn."""
        inputs = [[*start, *target[:-1]] for target in self.targets]
        targets = [[*(PAD for _ in start[1:]), *target] for target in self.targets]
        return padded(inputs), padded(targets)


class RiskLoss(nn.Module):
    """The summed loss of a batch and of the samples of its sentences.

    The value is (1 - w) times the usual loss plus w times the mean risk of each sentence's samples. The gradient is
    that of the plain equivalent, with `log_p` the log-probability (R,) of each different sample under
    the logits divided by T:

        (1 - w) * usual - w * (factor * log_p).sum()

    Args:
        usual: the loss CE, of the same generator.
        generator: the projection.
        weight: w, from above 0 to 1, where CE is not computed and `nll` and `correct` are None.
        temperature: T, that of the samples.
        chunk_tokens: the most tokens whose logits exist at once; None chooses by bytes.
    """

    def __init__(
        self,
        usual: seqpar.LossCompute,
        generator: nn.Linear,
        *,
        weight: float,
        temperature: float,
        chunk_tokens: int | None = None,
    ) -> None:
        super().__init__()
        self.usual = usual
        self.generator = generator
        self.weight = weight
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens

    def forward(
        self, hidden: Tensor | list[Tensor], target: Tensor, **samples: Tensor | list[Tensor]
    ) -> seqpar.TokenLoss:
        """Return the loss of hidden states (B, T, D), or of a list with those of each replica, on the first device.

        `samples` has what `WithSamples` returns, or a list of it for each replica.
        """
        by_replica = [samples[name] for name in ("sampled", "sampled_target", "factor", "risk")]
        if isinstance(hidden, Tensor):
            surrogate = self._surrogate(self.generator, *by_replica)  # type: ignore[arg-type]
        else:
            shares = list(zip(*by_replica, strict=True))
            surrogate = summed_by_device(self._surrogate, self.generator, shares)
        if self.weight == 1:
            return seqpar.TokenLoss(surrogate.total, (target != PAD).sum().to(surrogate.total.device))
        usual: seqpar.TokenLoss = self.usual(hidden, target)
        return usual._replace(total=(1 - self.weight) * usual.total + self.weight * surrogate.total)

    def _surrogate(
        self, generator: nn.Linear, hidden_RTD: Tensor, target_RT: Tensor, factor_R: Tensor, risk: Tensor
    ) -> seqpar.TokenLoss:
        """Return the risk, with the gradient of the cross-entropy in which each sample has its factor."""
        weight_RT = factor_R[:, None].expand_as(target_RT)
        found = seqpar.linear_cross_entropy(
            hidden_RTD,
            generator.weight,
            target_RT,
            bias=generator.bias,
            ignore_index=PAD,
            temperature=self.temperature,
            token_weight=weight_RT,
            chunk_tokens=self.chunk_tokens,
        )
        return found._replace(total=found.total - found.total.detach() + risk)
