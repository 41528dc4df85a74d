"""Implementations of linear + cross-entropy, each with one mistake, for the conformance suite to catch."""

from dataclasses import replace
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from conformance import EVERYTHING, Adapter
from conformance.plain import plain_loss

CHUNK = 100


def altered(plain, change):
    """The plain function of arguments that a change of them makes wrong."""

    def wrong(hidden, weight, target, bias, options):
        given = {"hidden": hidden, "weight": weight, "target": target, "bias": bias, "options": options}
        return plain(**given | change(SimpleNamespace(**given)))

    return wrong


def frozen_trunk_loses_weight(g):
    """Where the hidden states need no gradient, the weight gets none."""
    return {} if g.hidden.requires_grad else {"weight": g.weight.detach()}


def frozen_head_loses_hidden(g):
    return {} if g.weight.requires_grad else {"hidden": g.hidden.detach()}


def padding_counts(g):
    return {"target": g.target.clamp(min=0), "options": replace(g.options, ignore_index=-1)}


def inside(g, least, most):
    """Targets that are no classes are taken for the nearest one."""
    return {"target": g.target.clamp(least, most).where(g.target != g.options.ignore_index, g.target)}


def other_smoothing(g):
    """eps / (V - 1) for each of the other classes."""
    eps, classes = g.options.label_smoothing, len(g.weight)
    return {"options": replace(g.options, label_smoothing=eps * classes / (classes - 1))}


def coarse_in_small_chunks(g):
    is_small = g.options.chunk and g.options.chunk < len(g.target)
    return {"weight": g.weight.to(torch.bfloat16).to(g.weight.dtype)} if is_small else {}


class Stored(torch.autograd.Function):
    """The plain loss with its gradients taken in forward, and a way to hand them out."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, target, options, hand_out):
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (hidden, weight, bias)]
            loss = plain_loss(leaves[0], leaves[1], target, leaves[2], options)
        ctx.gradients, ctx.hand_out = list(torch.autograd.grad(loss, leaves)), hand_out
        return loss.detach()

    @staticmethod
    def backward(ctx, upstream):
        return *ctx.hand_out(ctx, upstream), None, None, None


def stored(hand_out):
    return lambda hidden, weight, target, bias, options: Stored.apply(hidden, weight, bias, target, options, hand_out)


def doubling(ctx, upstream):
    handed = [upstream * g for g in ctx.gradients]
    ctx.gradients = [2 * g for g in ctx.gradients]
    return handed


def mean_of_means(hidden, weight, target, bias, options):
    if options.reduction == "sum":
        return plain_loss(hidden, weight, target, bias, options)
    parts = zip(hidden.chunk(4), target.chunk(4), strict=True)
    means = torch.stack([plain_loss(h, weight, t, bias, options) for h, t in parts])
    return means[means.isfinite()].mean()


def mean_by_the_number_of_chunks(hidden, weight, target, bias, options):
    """Divide each chunk's sum by the kept targets of all, and the result by the number of chunks once more."""
    chunks = len(hidden.split(32)) if options.reduction == "mean" else 1
    return plain_loss(hidden, weight, target, bias, options) / chunks


def summed_in_bfloat16(hidden, weight, target, bias, options):
    losses = [plain_loss(h, weight, t, bias, options) for h, t in zip(hidden.split(8), target.split(8), strict=True)]
    return sum(losses, start=torch.zeros((), dtype=hidden.dtype))


def drops_the_last_chunk(hidden, weight, target, bias, options):
    rows = max(1, len(target) // CHUNK) * CHUNK
    return plain_loss(hidden[:rows], weight, target[:rows], bias, options)


def divides_by_no_tokens(hidden, weight, target, bias, options):
    kept = (target != options.ignore_index).sum()
    mean = plain_loss(hidden, weight, target, bias, options) / (1 if options.reduction == "mean" else kept)
    return mean * kept if options.reduction == "sum" else mean


def forgets_earlier_gradients(hidden, weight, target, bias, options):
    loss = plain_loss(hidden, weight, target, bias, options)
    loss.register_hook(lambda upstream: setattr(weight, "grad", None))
    return loss


def raises_on_smoothing(hidden, weight, target, bias, options):
    if options.label_smoothing:
        raise NotImplementedError("no smoothing\nat all")
    return F.cross_entropy(
        F.linear(hidden, weight, bias), target, ignore_index=options.ignore_index, reduction=options.reduction
    )


def nan_for_hidden(hidden, weight, target, bias, options):
    return plain_loss(hidden, weight, target, bias, options) + 0 * (hidden - hidden).sum().sqrt()


def forgets_the_softcaps_derivative(hidden, weight, target, bias, options):
    logits = F.linear(hidden, weight, bias)
    if options.softcap is not None:
        logits = logits + (options.softcap * torch.tanh(logits / options.softcap) - logits).detach()
    settings = {"ignore_index": options.ignore_index, "label_smoothing": options.label_smoothing}
    return F.cross_entropy(logits, target, reduction=options.reduction, **settings)


MISTAKES = {
    "no_softcap": ("softcap", altered(plain_loss, lambda g: {"options": replace(g.options, softcap=None)})),
    "no_softcap_derivative": ("softcap", forgets_the_softcaps_derivative),
    "nan": ("float32", nan_for_hidden),
    "mean_of_means": ("mean of kept targets", mean_of_means),
    "mean_by_chunks": ("mean of kept targets", mean_by_the_number_of_chunks),
    "deaf": ("upstream factor", stored(lambda ctx, upstream: ctx.gradients)),
    "deaf_weight": ("upstream factor", stored(lambda ctx, upstream: [upstream * ctx.gradients[0], *ctx.gradients[1:]])),
    "doubling": ("second backward", stored(doubling)),
    "frozen_trunk": ("frozen trunk", altered(plain_loss, frozen_trunk_loses_weight)),
    "frozen_head": ("frozen head", altered(plain_loss, frozen_head_loses_hidden)),
    "bfloat16_sum": ("bfloat16", summed_in_bfloat16),
    "dropped_chunk": ("float64", drops_the_last_chunk),
    "any_target": ("target out of range", altered(plain_loss, lambda g: inside(g, 0, len(g.weight) - 1))),
    "negative_target": ("target out of range", altered(plain_loss, lambda g: inside(g, 0, None))),
    "counted_padding": ("ignored targets", altered(plain_loss, padding_counts)),
    "no_tokens": ("all ignored", divides_by_no_tokens),
    "other_smoothing": ("label smoothing", altered(plain_loss, other_smoothing)),
    "no_smoothing": ("label smoothing", raises_on_smoothing),
    "forgetful": ("accumulation", forgets_earlier_gradients),
    "coarse_chunks": ("any number of chunks", altered(plain_loss, coarse_in_small_chunks)),
    "all_logits": ("padding is not projected", plain_loss),
}
"""The check that must catch it, and the loss."""

for name, (_, loss) in MISTAKES.items():
    globals()[name] = Adapter(name, loss, EVERYTHING, note=f"wrong: {name}")
