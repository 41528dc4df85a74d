"""State a problem for an implementation of the scores of tokens.

Shape suffixes: N rows, J given classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from conformance.adapter import evaluator
from conformance.problem import GRADIENTS, Answer, Problem, leaves
from conformance.score_adapter import ScoreAdapter, ScoreOptions
from conformance.score_adapters import TORCH, plain
from seqpar.linear.token_scores import TokenScores

FACTORS = {"log_prob": "u", "entropy": "h", "log_probs_at": "g"}
"""The upstream factor of each score that has a gradient, one for each of its numbers."""
plainly_evaluated = evaluator(TORCH)


@dataclass(frozen=True)
class ScoreInputs(Problem):
    """A problem of token scores: sizes, options, what is differentiated, and a line that changes the tensors."""

    adapter: ScoreAdapter
    rows: int = 96
    width: int = 16
    vocab_size: int = 131
    options: ScoreOptions = field(default_factory=ScoreOptions)
    """`temperature` and `ids` are filled in where the two fields below ask for tensors."""
    temperature: str = ""
    """The code of a temperature for each token, such as `torch.rand(96) + 0.5`."""
    given: int = 0
    """J."""
    used: tuple[str, ...] = ("log_prob",)
    """The scores in the loss, each times its factors; only those with a gradient."""
    result: ClassVar[str] = "scores"
    own_imports: ClassVar[str] = (
        f"{TORCH}; from conformance import ScoreOptions, score_adapter_of; adapter = score_adapter_of({{spec!r}})"
    )
    needed: ClassVar[dict[str, str]] = {
        " as F": "import torch.nn.functional as F",
        "TokenScores": "from seqpar import TokenScores",
    }

    @property
    def is_differentiated(self) -> bool:
        """Return whether any score is in the loss."""
        return bool(self.used)

    @property
    def further_lines(self) -> list[str]:
        """Return the statements that make temperatures, given classes and upstream factors."""
        n = self.rows
        lines = []
        if self.temperature:
            lines.append(f"temperature = {self.temperature}")
        if self.given:
            lines.append(f"ids = torch.randint({self.vocab_size}, ({n}, {self.given}))")
        shapes = {"u": (n,), "h": (n,), "g": (n, self.given)}
        return lines + [f"{FACTORS[name]} = torch.randn{shapes[FACTORS[name]]}" for name in self.used]

    @property
    def call(self) -> str:
        """Return the call in a reproduction."""
        options = self.options_of(self.made())
        if self.adapter.call is not None:
            return self.adapter.call(options)
        text = repr(self.options)
        if self.temperature:
            text = text.replace("temperature=1.0", "temperature=temperature")
        if self.given:
            text = text.replace("ids=None", "ids=ids")
        return f"adapter.scores(hidden, weight, target, bias, {text})"

    @property
    def loss_code(self) -> str:
        """Return the sum of the scores in use, each times its factors."""
        return "(" + " + ".join(f"({FACTORS[name]} * scores.{name}).sum()" for name in self.used) + ")"

    @property
    def step_code(self) -> str:
        """Return forward and backward on one line; without gradients only forward."""
        forward = f"scores = {self.call}"
        if not self.used:
            return forward
        return f"{forward}; {self.backward_code}"

    def options_of(self, tensors: dict[str, Tensor]) -> ScoreOptions:
        """Return the options with the tensors in them."""
        return replace(
            self.options,
            temperature=tensors.get("temperature", self.options.temperature),
            ids=tensors.get("ids"),
        )

    def run(self, tensors: dict[str, Tensor]) -> TokenScores:
        """Return the implementation's scores of these tensors."""
        arguments = tensors["hidden"], tensors["weight"], tensors["target"], tensors.get("bias")
        with self.raising():
            found = self.adapter.scores(*arguments, self.options_of(tensors))
            self._check(found, tensors)
        return found

    def _check(self, scores: object, tensors: dict[str, Tensor]) -> None:
        """Raise TypeError unless the scores are what was asked for."""
        if not isinstance(scores, TokenScores):
            raise TypeError(f"the scores are a {type(scores).__name__}; they must be seqpar.TokenScores")
        rows = len(tensors["target"])
        for name in self.wanted():
            shape: tuple[int, ...] = (rows,)
            if name == "log_probs_at":
                shape = (rows, self.given)
            if name.startswith("top_"):
                shape = (rows, self.options.top_k or 0)
            score = getattr(scores, name)
            if not isinstance(score, Tensor):
                raise TypeError(f"{name} is a {type(score).__name__}; it must be a tensor of shape {shape}")
            if score.shape != shape:
                raise ValueError(f"{name} has shape {tuple(score.shape)}; it must be {shape}")

    def wanted(self) -> list[str]:
        """Return the names of the scores that are asked for."""
        names = ["log_prob"]
        if self.options.entropy:
            names.append("entropy")
        if self.given:
            names.append("log_probs_at")
        if self.options.top_k:
            names += ["top_log_probs", "top_ids"]
        return names

    def loss_of(self, result: TokenScores, tensors: dict[str, Tensor]) -> Tensor:
        """Return the sum of the scores in use, each times its factors."""
        terms = [(tensors[FACTORS[name]] * getattr(result, name)).sum() for name in self.used]
        return torch.stack(terms).sum()

    def values(self, result: TokenScores) -> Mapping[str, Tensor | None]:
        """Return the scores that are asked for; classes are compared apart, as they have no error."""
        return {name: getattr(result, name) for name in self.wanted() if name != "top_ids"}

    def truth(self) -> Answer:
        """Return the same numbers of the plain scores in float64, with the gradients of frozen tensors too."""
        tensors = self.made()
        # Made in the dtype under test first, so that both see the same rounded inputs
        for name, t in leaves(tensors).items():
            tensors[name] = t.detach().double().requires_grad_()
        for name in tensors.keys() - {*GRADIENTS, "target", "ids"}:
            tensors[name] = tensors[name].double()
        return replace(self.plainly(), frozen=()).answer_on(tensors)

    def plainly(self) -> ScoreInputs:
        """Return the same problem with the scores as usually written as the implementation."""
        return replace(self, adapter=replace(self.adapter, scores=plain_scores))


def plain_scores(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: ScoreOptions
) -> TokenScores:
    """Return the scores as they are usually written, in the dtype of the tensors, with 0 log 0 = 0."""
    variables = {"hidden": hidden, "weight": weight, "target": target, "bias": bias, **options.variables}
    found: TokenScores = plainly_evaluated(plain(options, reference=True), variables)
    return found


def asked(adapter: ScoreAdapter, names: Iterable[str] = FACTORS, **more: Any) -> ScoreInputs:
    """Return a problem with these scores, and a loss of those of them that have a gradient, as far as offered."""
    names = [name for name in names if name == "log_prob" or NEEDED[name] in adapter.offers]
    differentiable = [name for name in names if name != "entropy" or "entropy gradient" in adapter.offers]
    if "gradients" not in adapter.offers:
        differentiable = []
    options = more.pop("options", ScoreOptions())
    options = replace(options, entropy="entropy" in names)
    given = 3 * ("log_probs_at" in names)
    return ScoreInputs(adapter, options=options, given=given, used=tuple(differentiable), **more)


NEEDED = {"entropy": "entropy", "log_probs_at": "given classes"}
"""The feature that each further score needs."""
