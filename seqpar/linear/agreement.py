"""Compare what ranks of a split vocabulary must share: settings, and tensors up to rounding."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from seqpar.distributed.vocab_parallel import VocabShard
from seqpar.linear.inputs import Inputs, Settings


def compare_ranks(inputs: Inputs, settings: Settings, vocab: VocabShard, facts: Mapping[str, object]) -> None:
    """Raise RuntimeError on every rank unless the ranks of the group agree on everything that they must agree on.

    Args:
        facts: what must be the same besides the inputs and settings, by name; floating tensors with one row for each
            token must be the same up to rounding.
    """
    rows = len(inputs.weight)
    tensors = {name: fact for name, fact in facts.items() if isinstance(fact, Tensor)}
    plain = {name: fact for name, fact in facts.items() if name not in tensors}
    vocab.check(rows, {**_facts(inputs, settings, vocab), **plain}, inputs.hidden)
    if inputs.token_weight is not None:
        tensors["token_weight"] = inputs.token_weight.unsqueeze(-1)
    # Each check is a collective, and ranks may have been given the tensors in different orders
    for name, tensor in sorted(tensors.items()):
        vocab.check(rows, {}, tensor, name)


def _facts(inputs: Inputs, settings: Settings, vocab: VocabShard) -> dict[str, object]:
    """Return everything that must be the same on all ranks of a group, by its name in the error message.

    Ranks that differ in any of it would wait for each other, or add up sums of different things.
    """
    hidden = inputs.hidden
    weight = inputs.weight
    return {
        # Another rank has something else here if its arguments were wrong (`tell_errors`)
        "what is wrong": "nothing",
        "the vocabulary's size": vocab.vocab_size,
        "the width of hidden and weight": (hidden.shape[-1:], weight.shape[1:]),
        "the dtype": (hidden.dtype, weight.dtype),
        "the number of tokens": hidden.shape[:-1],
        "bias": _presence(inputs.bias),
        "class_weight": _presence(inputs.class_weight),
        "token_weight": _presence(inputs.token_weight),
        "whether hidden needs a gradient": hidden.requires_grad and torch.is_grad_enabled(),
        **settings._asdict(),
        # Different targets would give different chunks; a checksum of them costs one number
        "the targets": checksum(inputs.target),
    }


def checksum(tensor: Tensor) -> int | float:
    """Return a weighted sum of all numbers: unlike a plain sum, it changes if two of them are swapped."""
    numbers_N = tensor.detach().flatten()
    numbers_N = numbers_N.double() if numbers_N.is_floating_point() else numbers_N.long()
    return (numbers_N * torch.arange(1, len(numbers_N) + 1, device=tensor.device)).sum().item()


def _presence(tensor: Tensor | None) -> str:
    """Return whether an optional tensor was given, in words."""
    return "none" if tensor is None else "given"
