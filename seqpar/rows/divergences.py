"""The divergences between a student's distribution p and a teacher's q, and their gradients, in closed form.

    forward_kl       KL(q || p)  loss = sum_k q_k (log q_k - log p_k)
    reverse_kl       KL(p || q)  loss = sum_k p_k (log p_k - log q_k)
    jsd              loss = beta KL(q || m) + (1 - beta) KL(p || m),  m = beta q + (1 - beta) p,  0 < beta < 1
    total_variation  loss = 1/2 sum_k |p_k - q_k|

jsd is D_JSD(beta) of Agarwal et al. (2024), section 2, with their P = q (the teacher) and Q = p (the student): near
beta = 0 its gradient is beta times that of forward_kl, near beta = 1 it is 1 - beta times that of reverse_kl.

Each is a sum over classes, loss = sum_k f(p_k, q_k). With g_k = d f / d p_k, up to a constant that is the same for all
k (the p_k sum to 1, so it has no effect), and p = softmax(z):

    d loss / d z_k = p_k (g_k - sum_j p_j g_j) = s_k - p_k S,      s_k = p_k g_k,  S = sum_k s_k

    forward_kl                 s_k = - q_k
    reverse_kl                 s_k = p_k (log p_k - log q_k)
    jsd                        s_k = (1 - beta) p_k (log p_k - log m_k)
    total_variation            s_k = 1/2 p_k sign(p_k - q_k), and 0 where p_k = q_k

A term whose weight is 0 (q_k, or p_k in reverse_kl) is 0, even where both logarithms are -inf. A class that only the
teacher can predict (p_k = 0 < q_k) makes forward_kl inf, one that only the student can predict
(q_k = 0 < p_k) makes reverse_kl inf. jsd and total_variation stay finite.

In the code: `log_p_KC` is log p, `slope_KC` is s, `slope_K` is S.
Shape suffixes: K rows, C classes (of this rank, where the vocabulary is split; then loss and S are this rank's part).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from seqpar.core.checks import check_choice, check_number

Divergence = Literal["forward_kl", "reverse_kl", "jsd", "total_variation"]


class Terms(NamedTuple):
    """Each row's sums over classes, and s, from which the gradient follows."""

    loss_K: Tensor
    slope_K: Tensor
    """S."""
    slope_KC: Tensor
    """s."""


RowTerms = Callable[[Tensor, Tensor, Tensor, Tensor], Terms]
"""(log p, p, log q, q) -> Terms; all four but p may be overwritten."""


def check_divergence(divergence: object, beta: object) -> None:
    """Raise ValueError for an unknown divergence; raise unless beta is in (0, 1) for "jsd" and None for the others."""
    check_choice(divergence, "divergence", get_args(Divergence))
    if divergence == "jsd":
        check_number(beta, "beta", above=0, below=1)
    elif beta is not None:
        raise ValueError(f"beta is {beta!r} and divergence {divergence!r}; beta is for 'jsd', leave it out")


def row_terms(divergence: Divergence, beta: float | None) -> RowTerms:
    """Return the function that computes this divergence's terms."""
    if divergence == "jsd":
        assert beta is not None
        return partial(_jsd_, float(beta))
    return _WITHOUT_BETA[divergence]


def logits_gradient_(terms: Terms, slope_K: Tensor, p_KC: Tensor) -> Tensor:
    """Turn s into the gradient with respect to the logits, s - p S, in place.

    Args:
        slope_K: S, summed over all ranks.
    """
    return terms.slope_KC.addcmul_(p_KC, slope_K.unsqueeze(1), value=-1)


def _forward_kl_(log_p_KC: Tensor, p_KC: Tensor, log_q_KC: Tensor, q_KC: Tensor) -> Terms:
    loss_K = _dot(q_KC, log_q_KC.sub_(log_p_KC))
    slope_KC = q_KC.neg_()
    return Terms(loss_K, slope_KC.sum(-1), slope_KC)


def _reverse_kl_(log_p_KC: Tensor, p_KC: Tensor, log_q_KC: Tensor, q_KC: Tensor) -> Terms:
    slope_KC = _product_(p_KC, log_p_KC.sub_(log_q_KC))
    # The loss is S itself
    loss_K = slope_KC.sum(-1)
    return Terms(loss_K, loss_K, slope_KC)


def _jsd_(beta: float, log_p_KC: Tensor, p_KC: Tensor, log_q_KC: Tensor, q_KC: Tensor) -> Terms:
    # From p and q, not from their logarithms, which are less accurate the further they are from 0
    log_m_KC = torch.mul(q_KC, beta).add_(p_KC, alpha=1 - beta).log_()
    teacher_K = _dot(q_KC, log_q_KC.sub_(log_m_KC))
    slope_KC = _product_(p_KC, log_p_KC.sub_(log_m_KC)).mul_(1 - beta)
    slope_K = slope_KC.sum(-1)
    # beta KL(q || m) + (1 - beta) KL(p || m), and the second of them is S
    return Terms(beta * teacher_K + slope_K, slope_K, slope_KC)


def _total_variation_(log_p_KC: Tensor, p_KC: Tensor, log_q_KC: Tensor, q_KC: Tensor) -> Terms:
    difference_KC = torch.sub(p_KC, q_KC, out=log_p_KC)
    loss_K = difference_KC.abs().sum(-1) / 2
    slope_KC = difference_KC.sign_().mul_(p_KC).div_(2)
    return Terms(loss_K, slope_KC.sum(-1), slope_KC)


def _dot(weight_KC: Tensor, value_KC: Tensor) -> Tensor:
    """Return sum_k weight_k value_k of each row, in the values' memory, where a weight of 0 makes the term 0."""
    return _product_(weight_KC, value_KC).sum(-1)


def _product_(weight_KC: Tensor, value_KC: Tensor) -> Tensor:
    """Return weight x value in the values' memory, and 0 where the weight is 0, whatever the value."""
    return value_KC.masked_fill_(weight_KC == 0, 0).mul_(weight_KC)


_WITHOUT_BETA: dict[str, RowTerms] = {
    "forward_kl": _forward_kl_,
    "reverse_kl": _reverse_kl_,
    "total_variation": _total_variation_,
}
