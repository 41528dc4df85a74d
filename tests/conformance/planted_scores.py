"""Implementations of token scores, each with one mistake, for the conformance suite to catch.

The first eight are faults that training libraries have had.
"""

import itertools
import math
import operator
from dataclasses import replace

import torch
import torch.nn.functional as F

from conformance import ALL_SCORES, ScoreAdapter
from conformance.plain import plain_scores
from seqpar import TokenScores
from tests.backward import with_gradient
from tests.conformance.planted import altered, frozen_head_loses_hidden, frozen_trunk_loses_weight, padding_counts

TILE = 64


def changed(scores, change):
    return TokenScores(*(score if score is None or score.dtype == torch.int64 else change(score) for score in scores))


def entropy_gradient_dropped(*given):
    scores = plain_scores(*given)
    return scores._replace(entropy=scores.entropy if scores.entropy is None else scores.entropy.detach())


def times(x, factor):
    return with_gradient(x, lambda upstream: upstream * factor)


def scaled_by_the_chunks(g):
    """Every chunk's gradient is divided by the number of chunks, as a mean of means would be."""
    return {"hidden": times(g.hidden, 1 / math.ceil(len(g.target) / (g.options.chunk or len(g.target))))}


def last_tile_of_zeros(g):
    """The last tile of classes is filled up with logits of 0, which are added up with the others."""
    missing = -len(g.weight) % TILE
    bias = torch.zeros(len(g.weight), dtype=g.hidden.dtype) if g.bias is None else g.bias
    return {"weight": F.pad(g.weight, (0, 0, 0, missing)), "bias": F.pad(bias, (0, missing))}


def temperature_without_its_gradient(g):
    """The gradient is that of the logits before the temperature."""
    return {"hidden": times(g.hidden, g.options.temperature if isinstance(g.options.temperature, float) else 1.0)}


def one_temperature_for_all(g):
    temperature = torch.as_tensor(g.options.temperature).double().mean().item()
    return {"options": replace(g.options, temperature=temperature)}


def first_class_given(g):
    ids = g.options.ids
    return {} if ids is None else {"options": replace(g.options, ids=ids[:, :1].expand_as(ids))}


def doubling(g):
    """The gradient doubles with every backward."""
    factors = itertools.accumulate(itertools.repeat(2), operator.mul, initial=1)
    return {"hidden": with_gradient(g.hidden, lambda upstream: upstream * next(factors))}


def token_factors_dropped(*given):
    """Backward takes the mean of the upstream factors, so that no token has its own."""

    def mean_upstream(upstream):
        return upstream.mean(0, keepdim=True).expand_as(upstream)

    return changed(plain_scores(*given), lambda score: with_gradient(score, mean_upstream))


class WrongCap(torch.autograd.Function):
    """softcap tanh(z / softcap), with the derivative 1 - tanh instead of 1 - tanh^2."""

    @staticmethod
    def forward(ctx, z, softcap):
        tanh = torch.tanh(z / softcap)
        ctx.save_for_backward(tanh)
        return softcap * tanh

    @staticmethod
    def backward(ctx, upstream):
        (tanh,) = ctx.saved_tensors
        return upstream * (1 - tanh), None


def of_logits(logits, target, options):
    """Return the scores of logits that are given as a projection by the identity."""
    return plain_scores(logits, torch.eye(logits.size(1), dtype=logits.dtype), target, None, options)


def wrong_softcap_derivative(hidden, weight, target, bias, options):
    if options.softcap is None:
        return plain_scores(hidden, weight, target, bias, options)
    logits = WrongCap.apply(F.linear(hidden, weight, bias), options.softcap)
    return of_logits(logits, target, replace(options, softcap=None))


def no_gradient_if_mostly_ignored(hidden, weight, target, bias, options):
    """A batch is taken for an empty one if nine tenths of it are ignored."""
    scores = plain_scores(hidden, weight, target, bias, options)
    if (target != options.ignore_index).float().mean() < 0.1:
        return changed(scores, lambda score: score.detach() + 0 * score)
    return scores


def coarse_normaliser(hidden, weight, target, bias, options):
    """The logarithm of the sum is rounded to bfloat16 before the target's logit is taken from it."""
    scores = plain_scores(hidden, weight, target, bias, options)
    z = F.linear(hidden, weight, bias)
    normaliser = z.logsumexp(-1).detach()
    return scores._replace(log_prob=scores.log_prob + (normaliser - normaliser.bfloat16().to(normaliser.dtype)))


def infinite_last_tile(hidden, weight, target, bias, options):
    """The classes that the last tile lacks are not masked: they hold what the memory held, here inf."""
    scores = plain_scores(hidden, weight, target, bias, options)
    logits = F.pad(F.linear(hidden, weight, bias), (0, -len(weight) % TILE), value=math.inf)
    return scores._replace(log_prob=scores.log_prob - logits.logsumexp(-1) + scores.log_prob.detach())


def entropy_of_masked_classes(hidden, weight, target, bias, options):
    """-sum(p log p) is nan where p is 0."""
    scores = plain_scores(hidden, weight, target, bias, options)
    if scores.entropy is None or bias is None or not bias.isinf().any():
        return scores
    log_p = F.linear(hidden, weight, bias).log_softmax(-1)
    return scores._replace(entropy=-(log_p.exp() * log_p).sum(-1))


def tied_to_the_higher(hidden, weight, target, bias, options):
    scores = plain_scores(hidden, weight, target, bias, replace(options, top_k=None))
    if options.top_k is None:
        return scores
    log_p = F.linear(hidden, weight, bias).log_softmax(-1).flip(1)
    top = log_p.sort(dim=-1, descending=True, stable=True)
    ids = len(weight) - 1 - top.indices[:, : options.top_k]
    return scores._replace(top_log_probs=top.values[:, : options.top_k], top_ids=ids)


def ascending_top(hidden, weight, target, bias, options):
    scores = plain_scores(hidden, weight, target, bias, options)
    if options.top_k is None:
        return scores
    return scores._replace(top_log_probs=scores.top_log_probs.flip(1), top_ids=scores.top_ids.flip(1))


def temperature_before_softcap(hidden, weight, target, bias, options):
    if options.softcap is None or isinstance(options.temperature, torch.Tensor):
        return plain_scores(hidden, weight, target, bias, options)
    cap = options.softcap
    logits = cap * torch.tanh(F.linear(hidden, weight, bias) / options.temperature / cap)
    return of_logits(logits, target, replace(options, softcap=None, temperature=1.0))


def one_maximum_for_the_batch(hidden, weight, target, bias, options):
    """log p in a sum of exponentials below the maximum of all tokens, which underflow where a neighbour is loud."""
    scores = plain_scores(hidden, weight, target, bias, options)
    z = F.linear(hidden, weight, bias)
    best = z.detach().amax()
    normaliser = (z - best).exp().sum(-1).log() + best
    log_prob = z.gather(1, target.clamp(min=0)[:, None])[:, 0] - normaliser
    return scores._replace(log_prob=log_prob.masked_fill(target == options.ignore_index, 0))


def nan_for_an_empty_batch(hidden, weight, target, bias, options):
    scores = plain_scores(hidden, weight, target, bias, options)
    counted = (target != options.ignore_index).sum()
    return scores._replace(log_prob=scores.log_prob * counted / counted)


def loses_an_empty_chunk(hidden, weight, target, bias, options):
    """Chunks are taken up to the first one without a token that counts."""
    rows = len(target)
    if options.chunk:
        empty = (target == options.ignore_index).view(-1, options.chunk).all(1) if rows % 8 == 0 else None
        if empty is not None and empty.any():
            rows = int(empty.nonzero()[0]) * options.chunk
    scores = plain_scores(hidden, weight, target, bias, options)
    return changed(scores, lambda score: torch.cat([score[:rows], 0 * score[rows:]]))


def large_cancellation(hidden, weight, target, bias, options):
    """H = log sum exp z - sum p z, a difference of two numbers in the thousands."""
    scores = plain_scores(hidden, weight, target, bias, options)
    if scores.entropy is None:
        return scores
    z = F.linear(hidden, weight, bias)
    return scores._replace(entropy=z.logsumexp(-1) - (z.softmax(-1) * z).sum(-1))


SCORE_MISTAKES = {
    "entropy_gradient_dropped": ("entropy gradient", entropy_gradient_dropped),
    "scaled_by_chunks": ("any chunk size", altered(plain_scores, scaled_by_the_chunks)),
    "softcap_derivative": ("softcap", wrong_softcap_derivative),
    "mostly_ignored": ("mostly ignored", no_gradient_if_mostly_ignored),
    "coarse_normaliser": ("signs", coarse_normaliser),
    "infinite_last_tile": ("last tile", infinite_last_tile),
    "token_factors_dropped": ("log-probability", token_factors_dropped),
    "entropy_of_masked": ("masked classes", entropy_of_masked_classes),
    "tile_of_zeros": ("last tile", altered(plain_scores, last_tile_of_zeros)),
    "tied_to_the_higher": ("ties in top-k", tied_to_the_higher),
    "ascending_top": ("top-k", ascending_top),
    "temperature_gradient": ("temperature", altered(plain_scores, temperature_without_its_gradient)),
    "one_temperature": ("temperature per token", altered(plain_scores, one_temperature_for_all)),
    "temperature_first": ("softcap", temperature_before_softcap),
    "one_maximum": ("in any batch", one_maximum_for_the_batch),
    "counted_padding": ("ignored tokens", altered(plain_scores, padding_counts)),
    "empty_batch": ("no token", nan_for_an_empty_batch),
    "empty_chunk": ("empty response", loses_an_empty_chunk),
    "first_given": ("given classes", altered(plain_scores, first_class_given)),
    "frozen_head": ("frozen head", altered(plain_scores, frozen_head_loses_hidden)),
    "frozen_trunk": ("frozen trunk", altered(plain_scores, frozen_trunk_loses_weight)),
    "cancellation": ("extreme logits", large_cancellation),
    "doubling": ("second backward", altered(plain_scores, doubling)),
    "dropped_in_both": ("both gradients", entropy_gradient_dropped),
}
"""The check that must catch it, and the function."""

for name, (_, scores) in SCORE_MISTAKES.items():
    globals()[name] = ScoreAdapter(name, scores, ALL_SCORES, note=f"wrong: {name}")
