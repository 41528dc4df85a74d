"""Compute a projection onto the vocabulary and its cross-entropy in chunks, with all gradients in closed form.

Shape suffixes: N rows (batch x time), D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from seqpar.core.chunked_gradient import differentiable_sum
from seqpar.core.graphs import outside_graphs
from seqpar.core.token_loss import TokenLoss
from seqpar.distributed.vocab_parallel import VocabShard
from seqpar.linear.agreement import compare_ranks
from seqpar.linear.compiled_op import compiled_cross_entropy
from seqpar.linear.few_classes import soft_cross_entropy
from seqpar.linear.inputs import Inputs, Settings, check_inputs, cross_entropy_job, local_tensors, tell_errors
from seqpar.linear.least_memory import check_memory, least_memory
from seqpar.linear.teachers import SparseTarget
from seqpar.rows.conventions import Convention


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    soft_target: SparseTarget | None = None,
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
    memory: Literal["least"] | None = None,
    weight_grad: Tensor | None = None,
) -> TokenLoss:
    """Return the summed cross-entropy of `hidden @ weight.T + bias`, with only one chunk's logits in memory at a time.

    Plain equivalent, matched to the last digits of float64, gradients included:

        logits = F.linear(hidden, weight, bias).flatten(0, -2)
        F.cross_entropy(
            logits,
            target.flatten(),
            class_weight,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction="sum",
        )

    The loss of a row with target y, logits z, p = softmax(z) and token weight a is
    `a * (sum_k w_k q_k (-log p_k) + z_loss * logsumexp(z)^2)`; rows whose target is `ignore_index` are never projected.

    Args:
        hidden: (rows, D) or (batch, time, D).
        weight: (V, D), the layout of `nn.Linear` and `nn.Embedding`, so it may be tied to an embedding. A DTensor split
            by rows on a mesh of one axis defines `vocab` itself.
        target: class indices of hidden's leading shape, in [0, vocab_size) or `ignore_index`.
        soft_target: a distribution over a few classes for each row, which replaces the target in the loss:
            `-sum_j q_j log p_j` over the given classes. `target` then only says which rows are ignored, and what `nll`
            and `correct` refer to. It gets no gradient, and cannot be combined with label smoothing or class weights.
        bias: (V,).
        label_smoothing, smoothing_convention: the probability taken from the target, in [0, 1), and which classes get
            it: "torch", "fairseq" or "harvard", as `seqpar.LabelSmoothing` defines them.
        z_loss: factor of the squared log-partition, which keeps logits near 0 (PaLM, Chowdhery et al. 2022,
            section 5, with 1e-4).
        softcap: replaces logits with `softcap * tanh(logits / softcap)` (Gemma 2, 2024, section 2); None: no cap.
        temperature: divides the logits, after softcap; above 0.
        class_weight: (V,), the w above: multiplies each class's term of the sum or, with "harvard", the whole KL term
            `q_k (log q_k - log p_k)`. For "torch" these are the weights of `torch.nn.CrossEntropyLoss`. It gets no
            gradient.
        token_weight: target's shape, the a above: multiplies each token's loss (an advantage, the weight of its
            sequence); may be negative. `tokens`, `nll` and `correct` count every token once. It gets a gradient if it
            requires one.
        loss_scale: the factor that `total` will be multiplied by before `backward`: a nonzero number, or a tensor
            holding one. For float16, where small gradients would underflow: `scaler.get_scale() / tokens` with a
            GradScaler. Gradients are stored multiplied by it and divided by it in backward; any factor gives the right
            gradient, unless it makes them overflow their dtype.
        chunk_tokens: the maximum number of rows whose logits exist at once; None chooses it by size in bytes.
        vocab: the classes that `weight` holds, if the vocabulary is split over ranks. Hidden and target must then be
            the same on every rank of the group, or every rank raises (hidden states are compared by their sums, up to
            rounding); weight and bias are this rank's rows, and class_weight covers this rank's classes or all of them.
            Costs one all-gather per chunk, one small one per call (plus two all-reduces with class weights), and one
            all-reduce of the hidden gradient per backward.
        memory: "least" recomputes the logits in backward, over tiles of the vocabulary: four products instead of
            three, and no float32 sum of the weight's gradient. Not allowed with `soft_target`.
        weight_grad: with `memory="least"`, a float32 tensor of weight's shape (float64 for a float64 weight) that
            backward adds the weight's gradient into, such as Megatron's `main_grad`; `weight.grad` is left unchanged.

    Returns:
        `TokenLoss`, the same on every rank of the group: `total` in float32 or wider; `nll` without smoothing, weights
        and z-loss, at this temperature; `correct` counts the targets that are the most likely class (in a tie, the
        lowest). `total` can be differentiated once.

    Under autocast the products are computed in autocast's dtype, like those of `F.linear`. Under `torch.compile` the
    loss is one operator of the graph (it works with `fullgraph=True`) and gives the same numbers; with a split
    vocabulary, a soft target or `memory` it runs between two graphs.

    Raises:
        TypeError: an argument that is not a dense tensor or not a number; a float target; tensors of different dtypes;
            a DTensor with an unsupported layout.
        ValueError: shapes or devices that do not fit; a number out of its range; a shard beyond the vocabulary.
        IndexError: a target outside [0, vocab_size) that is not ignored (with value and position), on every rank.
        RuntimeError: on every rank, if ranks disagree on sizes, settings, hidden, targets or the validity of their
            inputs.

    Example:
        >>> hidden, weight = torch.randn(2, 6, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
        >>> target = torch.randint(50, (2, 6))
        >>> loss = seqpar.linear_cross_entropy(hidden, weight, target, label_smoothing=0.1)
        >>> (loss.total / loss.tokens).backward()
        >>> plain = F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), target.flatten(), label_smoothing=0.1)
        >>> torch.allclose(loss.mean, plain)
        True
    """
    settings = Settings(ignore_index, label_smoothing, smoothing_convention, z_loss, softcap, temperature, chunk_tokens)
    inputs = Inputs(hidden, weight, target, bias, class_weight, token_weight)
    if torch.compiler.is_compiling() and vocab is None and soft_target is None and memory is None:
        return compiled_cross_entropy(inputs, settings, loss_scale)
    if torch.compiler.is_compiling():
        return _between_graphs(inputs, settings, soft_target, loss_scale, vocab, memory, weight_grad)
    return _compute(inputs, settings, soft_target, loss_scale, vocab, memory, weight_grad)


def _compute(
    inputs: Inputs,
    settings: Settings,
    soft_target: SparseTarget | None,
    loss_scale: float | Tensor,
    vocab: VocabShard | None,
    memory: str | None,
    weight_grad: Tensor | None,
) -> TokenLoss:
    """Return the loss, chunk by chunk."""
    inputs, vocab = local_tensors(inputs, vocab)
    is_least = memory is not None or weight_grad is not None
    if soft_target is not None and not is_least:
        return soft_cross_entropy(inputs, settings, soft_target, loss_scale, vocab)
    with tell_errors(vocab):
        given = check_inputs(inputs, settings, vocab, loss_scale)
        if is_least:
            check_memory(memory, weight_grad, soft_target, inputs)
    if vocab is not None:
        compare_ranks(inputs, settings, vocab, {"memory": memory} if is_least else {})
    if is_least:
        return least_memory(inputs, settings, given, weight_grad)
    return differentiable_sum(*cross_entropy_job(inputs, settings, given), loss_scale)


_between_graphs = outside_graphs(_compute)
