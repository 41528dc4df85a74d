"""LoRA: instead of each projection, a low-rank change of it is trained (Hu et al. 2021, section 4.1).

    y = x W^T + b + s (x A^T) B^T    with    s = alpha / r                    (equation 3, and the scale below it)

W (O, D) and b stay as they are, and A (r, D) and B (O, r) are trained. B starts at 0, so that the model starts out
unchanged. A is drawn uniformly from within 1 / sqrt(D) of 0, as in the authors' `loralib` and in PEFT:
`kaiming_uniform_` with a = sqrt(5).

The projections are those of attention and of the feed-forward networks, in every layer: with fewer of them, LoRA was
found to fall behind training all weights (Dettmers et al. 2023, section 4 and figure 2). Embeddings, generator, norms
and biases stay as they are. Keys and values, which are one matrix of two blocks here, have an A and a B for each block,
as if they were two matrices.

    add_lora(model, rank=16, alpha=16.0)     # in place; model(src, tgt) as before
    without_lora(model)                      # an ordinary model with the weights W + s B A

Shape suffixes: O outputs, D inputs, r rank, C rank x blocks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import Attention
from models.transformer import FeedForward

Model = TypeVar("Model", bound=nn.Module)


class LoraLinear(nn.Module):
    """A frozen linear map and its trained change: `F.linear(x, weight + alpha / rank * B @ A, bias)`.

    The product B A is never formed in training: it would be as large as the weight, and so would its gradient.

    Args:
        linear: the map, whose weight and bias are shared and no longer trained.
        rank: r, at least 1.
        alpha: the scale of the change, which is divided by the rank.
        blocks: number of matrices that are concatenated along their outputs; each has its own A and B.
    """

    def __init__(self, linear: nn.Linear, rank: int, alpha: float, blocks: int) -> None:
        super().__init__()
        self.alpha = alpha
        self.blocks = blocks
        self.weight = linear.weight
        self.bias = linear.bias
        self.requires_grad_(False)  # before it has parameters that are trained
        self.lora_A = nn.Parameter(self.weight.new_empty(blocks * rank, linear.in_features))
        self.lora_B = nn.Parameter(self.weight.new_empty(linear.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., D) to (..., O)."""
        low_C = F.linear(x, self.lora_A) * (self.alpha / self.lora_B.size(1))
        blocks = zip(low_C.chunk(self.blocks, -1), self.lora_B.chunk(self.blocks), strict=True)
        change = torch.cat([F.linear(low_r, block_Or) for low_r, block_Or in blocks], -1)
        return F.linear(x, self.weight, self.bias) + change


def add_lora(model: nn.Module, rank: int, alpha: float) -> None:
    """Freeze the model and add LoRA to its projections, in place; they keep their names, and so do the weights.

    Raises ValueError for a model without attention or feed-forward networks from `models`, one whose projections are
    not `nn.Linear`s, such as a model with LoRA, and a rank below 1.
    """
    if rank < 1:
        raise ValueError(f"rank is {rank}, below 1: LoRA needs at least one row of A and one column of B")
    found = dict(_projections(model))
    if not found:
        raise ValueError(f"{type(model).__name__} has no attention or feed-forward network of a Transformer for LoRA")
    model.requires_grad_(False)
    for name, linear in found.items():
        blocks = 1
        if name.endswith(".key_value"):
            blocks = 2
        model.set_submodule(name, LoraLinear(linear, rank, alpha, blocks))


@torch.no_grad()
def without_lora(model: Model) -> Model:
    """Return a copy in which each weight with LoRA is W + s B A; all other weights are shared with the model."""
    plain = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    for name, module in list(plain.named_modules()):
        if isinstance(module, LoraLinear):
            weight = changed_weight(module.weight, module.lora_A, module.lora_B, module.alpha)
            linear = nn.Linear(weight.size(1), weight.size(0), device="meta")
            linear.weight = nn.Parameter(weight, requires_grad=False)
            linear.bias = module.bias
            plain.set_submodule(name, linear)
    return plain


def has_lora(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a model's tensors include matrices of LoRA."""
    return any(name.endswith(".lora_A") for name in tensors)


@torch.no_grad()
def merged_tensors(tensors: Mapping[str, Tensor], alpha: float) -> dict[str, Tensor]:
    """Return the tensors of `without_lora(model)`, given the model's tensors by name."""
    merged = dict(tensors)
    for name in tensors:
        outer, _, own = name.rpartition(".")
        if own == "lora_A":
            lora_A, lora_B = merged.pop(f"{outer}.lora_A"), merged.pop(f"{outer}.lora_B")
            merged[f"{outer}.weight"] = changed_weight(tensors[f"{outer}.weight"], lora_A, lora_B, alpha)
    return merged


def changed_weight(weight_OD: Tensor, lora_A_CD: Tensor, lora_B_Or: Tensor, alpha: float) -> Tensor:
    """Return W + alpha / r B A, block by block."""
    rank = lora_B_Or.size(1)
    blocks = len(lora_A_CD) // rank
    changes = [B @ A for A, B in zip(lora_A_CD.chunk(blocks), lora_B_Or.chunk(blocks), strict=True)]
    return weight_OD + alpha / rank * torch.cat(changes)


def _projections(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear maps of attention and feed-forward networks, with their names."""
    for outer, module in model.named_modules():
        if isinstance(module, Attention | FeedForward):
            for name, linear in module.named_children():
                if isinstance(linear, LoraLinear):
                    raise ValueError(
                        f"{outer}.{name} has LoRA already: train it as it is, or merge it first with "
                        "without_lora(model)"
                    )
                if not isinstance(linear, nn.Linear):
                    raise ValueError(
                        f"{outer}.{name} is a {type(linear).__name__}, not an nn.Linear: add LoRA to a whole model"
                    )
                yield f"{outer}.{name}", linear
