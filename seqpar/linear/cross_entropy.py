"""A projection onto the vocabulary and its cross-entropy in chunks, every gradient by formula.

Shape suffixes: N rows (batch x time), D hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.core.token_loss import TokenLoss
from seqpar.distributed.vocab_parallel import VocabShard
from seqpar.linear.compiled_op import compiled_cross_entropy
from seqpar.linear.formula import differentiable_loss
from seqpar.linear.inputs import Inputs, Settings, checked, local_parts, plan
from seqpar.losses.softmax_loss import Convention


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    smoothing_convention: Convention = "torch",
    z_loss: float = 0.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    loss_scale: float | Tensor = 1.0,
    chunk_tokens: int | None = None,
    vocab: VocabShard | None = None,
) -> TokenLoss:
    """The summed cross-entropy of `hidden @ weight.T + bias`, while one chunk's logits exist at a time.

    Plain equivalent, with its gradients, to the last digits of float64:

        logits = F.linear(hidden, weight, bias).flatten(0, -2)
        F.cross_entropy(logits, target.flatten(), class_weight, label_smoothing=label_smoothing, reduction="sum")

    The loss of a row with target y, logits z, p = softmax(z) and token weight a is
    `a * (sum_k w_k q_k (-log p_k) + z_loss * logsumexp(z)^2)`; rows whose target is `ignore_index` are never projected.

    Args:
        hidden: (rows, D) or (batch, time, D).
        weight: (V, D), `nn.Linear`'s and `nn.Embedding`'s layout, so it may be tied to an embedding. A DTensor split
            by rows on a mesh of one axis gives `vocab` by itself.
        target: whole numbers of hidden's leading shape, in [0, vocab_size) or `ignore_index`.
        bias: (V,).
        label_smoothing, smoothing_convention: the probability taken from the target, in [0, 1), and which classes get
            it: "torch", "fairseq" or "harvard", as `seqpar.LabelSmoothing` defines them.
        z_loss: factor of the squared log-partition, which keeps logits near 0 (PaLM, Chowdhery et al. 2022,
            section 5, with 1e-4).
        softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2, 2024, section 2); None leaves them.
        temperature: what logits are then divided by; above 0.
        class_weight: (V,), w: each class's term of the sum times its weight, in "harvard" the whole KL term
            `q_k (log q_k - log p_k)`. For "torch" these are the weights of `torch.nn.CrossEntropyLoss`. Not
            differentiated.
        token_weight: target's shape, a: each token's loss times its weight (an advantage, the weight of its sequence),
            of either sign. `tokens`, `nll` and `correct` count every token once. Differentiated where it needs it.
        loss_scale: what `total` will be multiplied by before `backward`, a number other than 0 or a tensor of one. For
            float16, where the gradients kept would be too small: `scaler.get_scale() / tokens` with a GradScaler. They
            are kept so many times as large, and divided again; any factor gives the right gradient.
        chunk_tokens: the most rows whose logits exist at once; None chooses by bytes.
        vocab: which classes `weight` holds, where the vocabulary is split over ranks. Then hidden and target are the
            same on every rank of the group, or every rank raises (hidden states are compared by sums of them, up to
            rounding); weight and bias are this rank's rows, and class_weight is this rank's part, or all of it. Per
            chunk two all-reduces, per call one small all-gather, per backward one all-reduce of the hidden gradient.

    Returns:
        `TokenLoss`, the same on every rank of the group: `total` in float32 or wider; `nll` without smoothing, weights
        and z-loss, at this temperature; `correct` by the lowest of the most likely classes. `total` can be
        differentiated once.

    Under autocast the products are in autocast's dtype, as `F.linear`'s are. Under `torch.compile` it is one operator
    of the graph (`fullgraph=True` holds) with the same numbers, unless the vocabulary is split.

    Raises:
        TypeError: what is no dense tensor or no number; a float target; tensors of different dtypes; a DTensor of
            another layout.
        ValueError: shapes or devices that disagree; a number out of its range; a shard beyond the vocabulary.
        IndexError: a target outside [0, vocab_size) that is not ignored (with value and position), on every rank.
        RuntimeError: ranks that disagree on sizes, settings, hidden, targets or the validity of their inputs, on every
            rank.
    """
    settings = Settings(ignore_index, label_smoothing, smoothing_convention, z_loss, softcap, temperature, chunk_tokens)
    inputs = Inputs(hidden, weight, target, bias, class_weight, token_weight)
    if torch.compiler.is_compiling() and vocab is None:
        return compiled_cross_entropy(inputs, settings, loss_scale)
    inputs, vocab = local_parts(inputs, vocab)
    shard, q = checked(inputs, settings, vocab, loss_scale)
    leaves, chunks, chunk_loss = plan(inputs, settings, shard, q)
    return differentiable_loss(chunk_loss, chunks, leaves, loss_scale)
