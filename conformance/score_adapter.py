"""Describe an implementation of the scores of tokens to the checks: its function, its features and its code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from seqpar.linear.token_scores import TokenScores

ScoreFeature = Literal[
    "float64",
    "float32",
    "bfloat16",
    "float16",
    "bias",
    "chunks",
    "gradients",
    "ignored",
    "entropy",
    "entropy gradient",
    "given classes",
    "top-k",
    "ties",
    "temperature",
    "token temperature",
    "softcap",
    "CPU memory",
]
ALL_SCORES: frozenset[ScoreFeature] = frozenset(get_args(ScoreFeature))


@dataclass(frozen=True)
class ScoreOptions:
    """The options of one call of the scores; each is used only if the adapter offers its feature."""

    ignore_index: int = -100
    """Tokens with this target have scores of 0 and no gradient ("ignored")."""
    temperature: float | Tensor = 1.0
    """Divides the logits, after softcap: a number ("temperature"), or one for each token ("token temperature")."""
    softcap: float | None = None
    """softcap tanh(z / softcap) in place of the logits z."""
    entropy: bool = False
    top_k: int | None = None
    """"ties": of equally likely classes the lower comes first."""
    ids: Tensor | None = None
    """(N, J) classes whose log-probabilities are wanted too ("given classes")."""
    chunk_size: int | None = None
    """The size of a chunk, in rows or in classes, as the implementation cuts; None leaves it to the implementation."""
    dtype: torch.dtype = torch.float32
    """The dtype of hidden, weight and bias, for calls that take it as an argument."""

    @property
    def variables(self) -> dict[str, Any]:
        """Return the variables of a call's text beside hidden, weight, target and bias."""
        return {"temperature": self.temperature, "ids": self.ids}


Scores = Callable[[Tensor, Tensor, Tensor, "Tensor | None", ScoreOptions], TokenScores]
"""`scores(hidden, weight, target, bias, options)`, of shapes (N, D), (V, D), (N,), (V,)."""


@dataclass(frozen=True)
class ScoreAdapter:
    """An implementation of the scores of tokens under a projection that the checks can run.

        from seqpar import TokenScores
        from conformance import ScoreAdapter

        def scores(hidden, weight, target, bias, options):
            return TokenScores(log_prob=my_log_probs(hidden, weight, target))

        adapter = ScoreAdapter("mine", scores, offers=frozenset({"float32", "gradients"}))

    `python -m conformance scores my_module:adapter` then shows its column.

    Args:
        name: the heading of its column.
        scores: the function under test; its weight and bias are `nn.Parameter`s. It returns `TokenScores` of tensors
            of shape (N,), (N, top_k) or ids'; what the options do not ask for may be None.
        offers: the features of `ALL_SCORES` that it has; checks of the others report "not offered". "gradients":
            backward goes through log_prob; "entropy gradient": through the entropy too. "chunks": it obeys
            `chunk_size`; "CPU memory": its memory can be measured as this process's peak.
        note: one line below the table.
        imports: the imports of a reproduction, on one line.
        call: returns the call in a reproduction, of `hidden, weight, target, bias`, `temperature` if it is a tensor,
            and `ids`; None calls `scores`.
        package: the package whose version is reported, by its name in the package index; empty for none.
        why_not: returns why it cannot run here; empty if it can.
        where: the `module:object` it was loaded from; empty for the known ones.
    """

    name: str
    scores: Scores
    offers: frozenset[ScoreFeature] = ALL_SCORES
    note: str = ""
    imports: str = ""
    call: Callable[[ScoreOptions], str] | None = None
    package: str = ""
    why_not: Callable[[], str] = str
    where: str = ""

    @property
    def spec(self) -> str:
        """Return the name that `score_adapter_of` finds it by."""
        return self.where or self.name
