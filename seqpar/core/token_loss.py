"""`TokenLoss`: sums and counts that add up over chunks, devices, ranks and micro-batches."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

INSTEAD = (
    "for the gradient write (loss.total / loss.tokens).backward(), with the tokens of the whole step; for a report, "
    "float(loss.mean)"
)
"""What to write where a TokenLoss was taken for one tensor."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums are kept in: float32, or float64 where the input has it."""
    return torch.promote_types(dtype, torch.float32)


class TokenLoss(NamedTuple):
    """The loss of some tokens, as sums. Divide once, at the top, by the tokens of the whole step.

    Fields, each a tensor without dimensions:
        total: the summed loss in nats, differentiable, float32 or wider.
        tokens: how many targets were not ignored (int64).
        nll: the summed negative log-likelihood without smoothing, detached; None where the criterion cannot tell.
        correct: how many targets were the most likely class (int64), detached; None where it cannot tell.

    It stays a NamedTuple so that DDP, FSDP2 and DataParallel see the tensors in it. Unlike a plain tuple's, its `+`
    adds field by field, so `sum(losses)` is the loss of all of them.
    """

    total: Tensor
    tokens: Tensor
    nll: Tensor | None = None
    correct: Tensor | None = None

    def __add__(self, other: TokenLoss) -> TokenLoss:  # type: ignore[override]
        """Field by field; a field that either side lacks is None."""
        if not isinstance(other, TokenLoss):
            raise TypeError(
                f"TokenLoss + {type(other).__name__}: sums of tokens are added to their like; add a loss of another "
                "kind after the one division, loss.total / loss.tokens + other"
            )
        fields = (None if a is None or b is None else a + b for a, b in zip(self, other, strict=True))
        return TokenLoss(*fields)  # type: ignore[arg-type]

    def __radd__(self, other: object) -> TokenLoss:
        """What lets `sum(losses)` start from its 0."""
        return self if isinstance(other, int) and other == 0 else self.__add__(other)  # type: ignore[operator]

    def __float__(self) -> NoReturn:
        """Refuse to be one number."""
        raise TypeError(f"float(TokenLoss): a TokenLoss is sums, not one number; {INSTEAD}")

    def __truediv__(self, other: object) -> NoReturn:
        """Refuse to divide every field."""
        raise TypeError(f"TokenLoss / {type(other).__name__}: a TokenLoss is sums, not one number; {INSTEAD}")

    def __mul__(self, other: object) -> NoReturn:
        """Refuse what a tuple would do: list its fields several times."""
        raise TypeError(f"TokenLoss * {type(other).__name__}: a TokenLoss is sums, not one number; {INSTEAD}")

    def __rmul__(self, other: object) -> NoReturn:
        """As from the left."""
        self.__mul__(other)

    def __sub__(self, other: object) -> NoReturn:
        """Refuse a difference of counts."""
        raise TypeError(f"TokenLoss - {type(other).__name__}: a TokenLoss is sums, not one number; {INSTEAD}")

    def __format__(self, spec: str) -> str:
        """As a tuple's, which takes no format of a number."""
        if spec:
            raise TypeError(f"a TokenLoss in the format {spec!r} is sums, not one number; {INSTEAD}")
        return repr(self)

    def __getattr__(self, name: str) -> NoReturn:
        """Say what to write where a tensor was expected; called for names that are not here."""
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"'TokenLoss' object has no attribute {name!r}")
        raise AttributeError(f"TokenLoss.{name}: a TokenLoss is sums, not one tensor; {INSTEAD}")

    @property
    def mean(self) -> Tensor:
        """`total / tokens`, and 0 (not nan) where there is no token: right when this loss is the whole step."""
        return self.total / self.tokens.clamp(min=1)

    def detach(self) -> TokenLoss:
        """The same numbers without the graph."""
        return self._replace(total=self.total.detach())

    @staticmethod
    def zero(dtype: torch.dtype, device: torch.device, tells: bool) -> TokenLoss:
        """No tokens; `tells` says whether the criterion knows `nll` and `correct`."""
        total = torch.zeros((), dtype=wide(dtype), device=device)
        count = torch.zeros((), dtype=torch.int64, device=device)
        return TokenLoss(total, count, total.clone() if tells else None, count.clone() if tells else None)
