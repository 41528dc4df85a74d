"""Sum losses and counts over chunks, devices, ranks and micro-batches: `TokenLoss`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from seqpar.core.graphs import nodes_of_graph

INSTEAD = (
    "for the gradient write (loss.total / loss.tokens).backward(), with the tokens of the whole step; for a report, "
    "loss.mean.item()"
)
"""The advice of every error about a TokenLoss used as if it were one tensor."""


_WIDE = {dtype: dtype for dtype in (torch.float64, torch.complex64, torch.complex128)}


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums of `dtype` are computed in: float64 and complex ones in their own, else float32."""
    # Not by promote_types, which takes longer: every chunk asks several times
    return _WIDE.get(dtype, torch.float32)


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return a + b, and None where either is unknown."""
    if a is None or b is None:
        return None
    return a + b


def _ranks() -> int:
    """Return how many processes there are; 1 if no group was initialised."""
    if not dist.is_available() or not dist.is_initialized():
        return 1
    return dist.get_world_size()


def mark_same_on(tensor: Tensor, ranks: int) -> None:
    """Note, in the graph, that a tensor with all of a step's tokens is the same on `ranks` ranks."""
    node: Any = tensor.grad_fn
    if node is not None:
        node.same_on_ranks = ranks


def _refuse_part_of_a_step(total: Any, tokens: Tensor, upstream: Tensor) -> None:
    """Raise RuntimeError, as a hook of a mean's gradient, unless all ranks have the same tokens, as the graph tells.

    Args:
        total: the last node of the total's graph.
    """
    ranks = _ranks()
    if any(getattr(node, "same_on_ranks", 1) == ranks for node in nodes_of_graph(total)):
        return
    raise RuntimeError(
        f"backward went through the mean over {int(tokens)} tokens of one of {ranks} ranks, and a mean of the ranks' "
        "means is not the mean over all tokens: call seqpar.accumulate_gradients, or write (loss.total * ranks / "
        "seqpar.group_sum(loss.tokens, group)).backward() under DDP or FSDP2; where all ranks have the same tokens, "
        "(loss.total / loss.tokens).backward()"
    )


class TokenLoss(NamedTuple):
    """The loss of some tokens, as sums. Divide once, at the top, by the tokens of the whole step.

    Fields, each a tensor without dimensions:
        total: the summed loss in nats, differentiable, float32 or wider.
        tokens: how many targets were not ignored (int64).
        nll: the summed negative log-likelihood without smoothing, detached; None if the criterion does not compute it.
        correct: how many targets were the most likely class (int64), detached; None if it is not computed.

    It is a NamedTuple so that DDP, FSDP2 and DataParallel find the tensors in it. Unlike a plain tuple's, its `+`
    adds field by field, so `sum(losses)` is the loss of all of them.

    Example:
        >>> hidden, weight = torch.randn(6, 8), torch.randn(50, 8)
        >>> target = torch.tensor([3, 9, 4, -100, -100, 1])
        >>> losses = [seqpar.linear_cross_entropy(hidden[i : i + 3], weight, target[i : i + 3]) for i in (0, 3)]
        >>> [loss.tokens.item() for loss in losses]
        [3, 1]
        >>> torch.allclose(sum(losses).mean, F.cross_entropy(hidden @ weight.T, target))
        True
    """

    total: Tensor
    tokens: Tensor
    nll: Tensor | None = None
    correct: Tensor | None = None

    def __add__(self, other: TokenLoss) -> TokenLoss:  # type: ignore[override]
        """Return the sum, field by field; a field that is None on either side is None."""
        if not isinstance(other, TokenLoss):
            raise TypeError(
                f"TokenLoss + {type(other).__name__}: a TokenLoss can only be added to a TokenLoss; add any other loss "
                "after the division, loss.total / loss.tokens + other"
            )
        return TokenLoss(
            self.total + other.total,
            self.tokens + other.tokens,
            _add(self.nll, other.nll),
            _add(self.correct, other.correct),
        )

    def __radd__(self, other: object) -> TokenLoss:
        """Return `other + self`, where `other` may be the 0 that `sum(losses)` starts from."""
        # `sum` begins with 0 + losses[0]; any other number is a mistake, which `__add__` explains
        if isinstance(other, int) and other == 0:
            return self
        return self.__add__(other)  # type: ignore[operator]

    def __float__(self) -> NoReturn:
        """Refuse to be one number."""
        raise TypeError(f"float(TokenLoss): a TokenLoss is sums, not one number; {INSTEAD}")

    def __truediv__(self, other: object) -> NoReturn:
        """Refuse to divide every field."""
        raise TypeError(f"TokenLoss / {type(other).__name__}: a TokenLoss is sums, not one number; {INSTEAD}")

    def __mul__(self, other: object) -> NoReturn:
        """Refuse to repeat the fields, as a tuple would."""
        raise TypeError(f"TokenLoss * {type(other).__name__}: a TokenLoss is sums, not one number; {INSTEAD}")

    def __rmul__(self, other: object) -> NoReturn:
        """Refuse to repeat the fields, as a tuple would."""
        self.__mul__(other)

    def __sub__(self, other: object) -> NoReturn:
        """Refuse a difference of counts."""
        raise TypeError(f"TokenLoss - {type(other).__name__}: a TokenLoss is sums, not one number; {INSTEAD}")

    def __format__(self, spec: str) -> str:
        """Format the loss as a tuple, and refuse the format of a number."""
        # f"{loss:.3f}" asks for one number, f"{loss}" does not
        if spec:
            raise TypeError(f"a TokenLoss in the format {spec!r} is sums, not one number; {INSTEAD}")
        return repr(self)

    def __getattr__(self, name: str) -> NoReturn:
        """Raise for a missing name; for a method of tensors, say what to write instead."""
        # Python and torch ask for names such as `__torch_function__`, and a hint would not help them
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"'TokenLoss' object has no attribute {name!r}")
        raise AttributeError(f"TokenLoss.{name}: a TokenLoss is sums, not one tensor; {INSTEAD}")

    @property
    def mean(self) -> Tensor:
        """Return `total / tokens`, and 0 (not nan) without tokens; correct if this loss is the whole step's.

        Raises:
            RuntimeError: in backward, if a process group has other ranks, which may have other tokens.
        """
        mean = self.total / self.tokens.clamp(min=1)
        # A graph that torch.compile traces has no nodes to look at
        if mean.requires_grad and not torch.compiler.is_compiling() and _ranks() > 1:
            mean.register_hook(partial(_refuse_part_of_a_step, self.total.grad_fn, self.tokens))
        return mean

    def detach(self) -> TokenLoss:
        """Return the same numbers without the graph."""
        return self._replace(total=self.total.detach())

    @staticmethod
    def zero(dtype: torch.dtype, device: torch.device, tells: bool) -> TokenLoss:
        """Return the loss of no tokens; `tells` is whether the criterion computes `nll` and `correct`."""
        # The same dtypes and device as the loss of a chunk, so that they can be stacked
        total = torch.zeros((), dtype=wide(dtype), device=device)
        count = torch.zeros((), dtype=torch.int64, device=device)
        if not tells:
            return TokenLoss(total, count)
        return TokenLoss(total, count, nll=total.clone(), correct=count.clone())


def sum_of_parts(parts: Sequence[TokenLoss]) -> TokenLoss:
    """Return the sum of the losses, field by field; a field that is None in any of them is None.

    All are added in one reduction: a running float32 sum would lose a digit over a thousand chunks.
    """
    if len(parts) == 1:
        return parts[0]
    sums: list[Tensor | None] = []
    for column in zip(*parts, strict=True):
        numbers = [t for t in column if t is not None]
        sums.append(torch.stack(numbers).sum() if len(numbers) == len(column) else None)
    return TokenLoss(*sums)  # type: ignore[arg-type]
