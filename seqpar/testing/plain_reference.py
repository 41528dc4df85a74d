"""The linear cross-entropy in plain PyTorch, with all logits at once: the reference for every other implementation.

It imports nothing but torch and the table of smoothing conventions, has no chunks and no closed form of a gradient, and
computes in the dtype it is given.

Shape suffixes: N rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.rows.conventions import shares_of


def plain_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None = None, softcap: float | None = None, temperature: float = 1.0
) -> Tensor:
    """Return the logits (N, V) of all rows: z = hidden weight^T + bias, softcap tanh(z / softcap), z / temperature."""
    logits_NV = F.linear(hidden.flatten(0, -2), weight, bias)
    if softcap is not None:
        logits_NV = softcap * torch.tanh(logits_NV / softcap)
    return logits_NV / temperature


def plain_smoothed_target(
    target_N: Tensor, vocab_size: int, label_smoothing: float, smoothing_convention: str, ignore_index: int
) -> Tensor:
    """Return the target distribution q (N, V) in float64, for targets that are not ignored.

    q has 1 - eps on the target, and eps in equal parts on the classes that get a share in this convention:

    - "torch" (`torch.nn.CrossEntropyLoss`): all V classes, the target included.
    - "fairseq" (`label_smoothed_cross_entropy`): the V - 1 classes other than the target.
    - "harvard" (The Annotated Transformer, 2018): the V - 2 classes other than the target and the padding.

    Raises ValueError for a convention that is not in `seqpar/rows/conventions.py`.
    """
    shares = shares_of(smoothing_convention)
    gold_NV = F.one_hot(target_N, vocab_size).double()
    smoothed_NV = torch.ones_like(gold_NV)
    if not shares.target:
        smoothed_NV = 1 - gold_NV
    if not shares.padding:
        smoothed_NV[:, ignore_index] = 0
    # If no class gets a share, eps is 0, and so is the share 0 / 1
    classes_N1 = smoothed_NV.sum(-1, keepdim=True).clamp(min=1)
    return (1 - label_smoothing) * gold_NV + label_smoothing / classes_N1 * smoothed_NV


def plain_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    smoothing_convention: str = "torch",
    z_loss: float = 0.0,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Return the loss of `seqpar.linear_cross_entropy`, summed over the rows whose target is not `ignore_index`.

    sum_n token_weight_n (sum_k w_k q_nk (-log p_nk [+ log q_nk in the KL form]) + z_loss logsumexp(z_n)^2)

    Example:
        >>> from seqpar.testing import plain_linear_cross_entropy
        >>> hidden, weight, target = torch.randn(6, 8), torch.randn(50, 8), torch.randint(50, (6,))
        >>> loss = seqpar.linear_cross_entropy(hidden, weight, target, softcap=30.0, z_loss=1e-4)
        >>> torch.allclose(loss.total, plain_linear_cross_entropy(hidden, weight, target, softcap=30.0, z_loss=1e-4))
        True
    """
    # (N,): ignored rows are left out before anything is computed, so that a nan in them does not matter
    counted_N = target.flatten() != ignore_index
    logits_NV = plain_logits(hidden.flatten(0, -2)[counted_N], weight, bias, softcap, temperature)
    q_NV = plain_smoothed_target(
        target.flatten()[counted_N], len(weight), label_smoothing, smoothing_convention, ignore_index
    ).to(logits_NV.dtype)
    terms_NV = -q_NV * torch.log_softmax(logits_NV, -1)
    if shares_of(smoothing_convention).kl:
        # KL(q || p) = sum q log q - sum q log p, where 0 log 0 = 0
        terms_NV = terms_NV + torch.special.xlogy(q_NV, q_NV)
    if class_weight is not None:
        terms_NV = terms_NV * class_weight
    # The auxiliary loss of PaLM (Chowdhery et al. 2022, section 5)
    loss_N = terms_NV.sum(-1) + z_loss * torch.logsumexp(logits_NV, -1).square()
    if token_weight is not None:
        loss_N = loss_N * token_weight.flatten()[counted_N]
    return loss_N.sum()


def plain_rank(logits: Tensor, target: Tensor) -> Tensor:
    """Return the target's place (N,) among all classes (N, V) in descending order; in a tie the lower comes first.

    Example:
        >>> from seqpar.testing import plain_rank
        >>> plain_rank(torch.tensor([[0.1, 2.0, 0.5], [0.7, 0.7, 0.7]]), torch.tensor([2, 1]))
        tensor([1, 1])
    """
    in_order_NV = logits.sort(dim=-1, descending=True, stable=True).indices
    return (in_order_NV == target.unsqueeze(-1)).int().argmax(-1)


def plain_value_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return `plain_linear_cross_entropy` and its gradients by name, whether or not the tensors require them.

    The names are hidden, weight and, if given, bias and token_weight. The tensors' `.grad` is left alone.

    Example:
        >>> from seqpar.testing import plain_value_and_gradients
        >>> hidden, weight, target = torch.randn(6, 8), torch.randn(50, 8), torch.randint(50, (6,))
        >>> loss, gradients = plain_value_and_gradients(hidden, weight, target, label_smoothing=0.1)
        >>> {name: gradient.shape for name, gradient in gradients.items()}
        {'hidden': torch.Size([6, 8]), 'weight': torch.Size([50, 8])}
    """
    given = {"hidden": hidden, "weight": weight, "bias": bias, "token_weight": token_weight}
    leaves = {name: t.detach().requires_grad_() for name, t in given.items() if t is not None}
    with torch.enable_grad():
        loss = plain_linear_cross_entropy(
            leaves["hidden"],
            leaves["weight"],
            target,
            leaves.get("bias"),
            class_weight,
            leaves.get("token_weight"),
            **options,
        )
        gradients = torch.autograd.grad(loss, list(leaves.values()))
    return loss.detach(), dict(zip(leaves, gradients, strict=True))
