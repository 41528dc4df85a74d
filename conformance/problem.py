"""State a problem for a loss or for scores, and measure the error of its answer.

Shape suffixes: N rows, D hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conformance.adapter import DEVICE, Adapter, Implementation, Options, call_of
from conformance.finding import RaisedError
from conformance.plain import plain_loss, plain_scores
from seqpar.linear.token_scores import TokenScores
from seqpar.testing.precision import DRAWS, EXACT, TWICE, error

GRADIENTS = ("hidden", "weight", "bias")
FACTORS = {"log_prob": "u", "entropy": "h", "log_probs_at": "g"}
"""The upstream factors of each score that has a gradient, one for each of its numbers."""
NEEDED = {
    "entropy": "entropy",
    "log_probs_at": "given classes",
    "softcap": "softcap",
    "chunk": "chunks",
    "temperature": "temperature",
    "token_temperature": "token temperature",
}
"""The feature that a score, an option or a field of a problem needs."""
QUIET = 8
"""The number of tokens whose scores are compared while the rest of the batch changes."""

Answer = dict[str, Tensor | None]
"""The results and the gradients, by name, in float64; None for a tensor without a gradient."""
Change = Callable[[SimpleNamespace], object]
"""Changes a problem's tensors, which are the argument's attributes, in place."""


def _make_whole(t: SimpleNamespace) -> None:
    """Round the tensors so that all logits are whole numbers."""
    t.weight.data.mul_(2)
    for name in vars(t).keys() & {*GRADIENTS}:
        getattr(t, name).data.round_()


def _raise_logits(t: SimpleNamespace) -> None:
    """Make all logits whole numbers near 512."""
    _make_whole(t)
    t.hidden.data[:, 0] = 32
    t.weight.data[:, 0] = 16


def _exclude_classes(t: SimpleNamespace) -> None:
    """Exclude every third class, and move all targets to classes that remain."""
    t.bias.data[1::3] = -torch.inf
    t.target -= t.target % 3


def _make_certain(t: SimpleNamespace) -> None:
    """Make every target almost certain."""
    t.hidden.data *= 40
    t.target = F.linear(t.hidden, t.weight, getattr(t, "bias", None)).argmax(1)


def _leave_quiet(t: SimpleNamespace) -> None:
    """Leave only the first tokens in the batch."""
    for name in vars(t).keys() & {"hidden", "target", "ids", *FACTORS.values()}:
        setattr(t, name, getattr(t, name).detach()[:QUIET])
    t.hidden.requires_grad_()


CHANGES: Mapping[str, Change] = {
    "": lambda t: None,
    "every second target is -100": lambda t: t.target[::2].fill_(-100),
    "every third target is -100": lambda t: t.target[::3].fill_(-100),
    "every third target is 3": lambda t: t.target[::3].fill_(3),
    "the first 50 targets are -100": lambda t: t.target[:50].fill_(-100),
    "the second 32 targets are -100": lambda t: t.target[32:64].fill_(-100),
    "one target of 32 is not -100": lambda t: t.target.masked_fill_(torch.arange(len(t.target)) % 32 != 12, -100),
    "all targets are -100": lambda t: t.target.fill_(-100),
    # -1 would index the last class from the end, and V the memory behind the logits
    "target 5 is V": lambda t: t.target[5].fill_(len(t.weight)),
    "target 5 is V + 7": lambda t: t.target[5].fill_(len(t.weight) + 7),
    "target 5 is -1": lambda t: t.target[5].fill_(-1),
    "targets in reverse": lambda t: t.target.copy_(t.target.flip(0)),
    "3 x the weight": lambda t: t.weight.data.mul_(3),
    "1000 x the hidden states": lambda t: t.hidden.data.mul_(1000),
    "40 x the hidden states of all but the first 8": lambda t: t.hidden.data[QUIET:].mul_(40),
    "the first 8 alone": _leave_quiet,
    "whole logits": _make_whole,
    "whole logits about 512": _raise_logits,
    "logits far below 0": lambda t: (t.hidden.data.abs_(), t.weight.data.abs_().mul_(-2)),
    "a bias of -inf for one class of three": _exclude_classes,
    "targets that are almost certain": _make_certain,
}
"""What the checks can change in a problem's tensors."""


@dataclass(frozen=True)
class Problem:
    """Sizes, the call's options, what is differentiated, and what is changed in the tensors."""

    adapter: Implementation
    rows: int = 96
    width: int = 16
    vocab_size: int = 128
    options: Options = Options()  # noqa: RUF009 - frozen
    """`temperature` and `ids` are filled in if `token_temperature` and `given` ask for tensors."""
    change: str | Change = ""
    """The name of one of `CHANGES`, or your own."""
    frozen: tuple[str, ...] = ()
    token_temperature: bool = False
    """Whether each token has a temperature of its own."""
    given: int = 0
    """J, the number of given classes for each token."""
    used: tuple[str, ...] = ("loss",)
    """What is differentiated: the loss, or those scores that have a gradient, each times its factors."""
    factor: float = 1.0
    """Multiplies what is differentiated."""
    seed: int = 0
    device: str = DEVICE

    __repr__ = call_of

    @property
    def is_loss(self) -> bool:
        """Return whether the result is a loss rather than scores."""
        return self.adapter.part == "losses"

    def made(self) -> dict[str, Tensor]:
        """Return new tensors: hidden, weight, target, bias if the implementation has one, and further ones."""
        n, v, d, dtype = self.rows, self.vocab_size, self.width, self.options.dtype
        t = SimpleNamespace()
        with torch.device(self.device):
            torch.manual_seed(self.seed)
            t.hidden = torch.randn(n, d).to(dtype).requires_grad_()
            # Divided by sqrt(width), the logits have a variance of 1 whatever the width
            t.weight = nn.Parameter((torch.randn(v, d) / d**0.5).to(dtype))
            if "bias" in self.adapter.offers:
                t.bias = nn.Parameter(torch.randn(v).to(dtype))
            t.target = torch.randint(v, (n,))
            if self.token_temperature:
                t.temperature = torch.rand(n) + 0.5
            if self.given:
                t.ids = torch.randint(v, (n, self.given))
            for name in filter(FACTORS.get, self.used):
                shape = (n, self.given) if name == "log_probs_at" else (n,)
                setattr(t, FACTORS[name], torch.randn(shape))
            change = self.change if callable(self.change) else CHANGES[self.change]
            change(t)
        for name in vars(t).keys() & {*self.frozen}:
            getattr(t, name).requires_grad_(False)
        return vars(t)

    def options_of(self, tensors: dict[str, Tensor]) -> Options:
        """Return the options with the tensors filled in."""
        given = {name: tensors[name] for name in ("temperature", "ids") if name in tensors}
        return replace(self.options, **given)  # type: ignore[arg-type]

    def run(self, tensors: dict[str, Tensor]) -> Any:
        """Return the implementation's result for these tensors; raise RaisedError if it fails."""
        arguments = tensors["hidden"], tensors["weight"], tensors["target"], tensors.get("bias")
        with raising():
            found = self.adapter.function(*arguments, self.options_of(tensors))
            if not self.is_loss and not isinstance(found, TokenScores):
                raise TypeError(f"the scores are a {type(found).__name__}; they must be seqpar.TokenScores")
            for name, more in self.wanted.items():
                number, shape = self.numbers(found)[name], more if self.is_loss else (len(tensors["target"]), *more)
                if not isinstance(number, Tensor):
                    raise TypeError(f"{name} is a {type(number).__name__}; it must be a tensor of shape {shape}")
                if number.shape != shape and not (self.is_loss and number.numel() == 1):
                    raise ValueError(f"{name} has shape {tuple(number.shape)}; it must be {shape}")
        return found

    @property
    def wanted(self) -> dict[str, tuple[int, ...]]:
        """Return the names of the requested numbers, with their shapes per token."""
        if self.is_loss:
            return {"loss": ()}
        asked: dict[str, tuple[int, ...]] = {"log_prob": ()}
        if self.options.entropy:
            asked["entropy"] = ()
        if self.given:
            asked["log_probs_at"] = (self.given,)
        if self.options.top_k:
            asked |= dict.fromkeys(("top_log_probs", "top_ids"), (self.options.top_k,))
        return asked

    def numbers(self, result: Any) -> Mapping[str, Tensor | None]:
        """Return the requested numbers."""
        return {"loss": result} if self.is_loss else {name: getattr(result, name) for name in self.wanted}

    def loss_of(self, result: Any, tensors: dict[str, Tensor]) -> Tensor:
        """Return what is differentiated: the loss, or the sum of the scores in `used`, each times its factors."""
        if self.is_loss:
            return result * self.factor  # type: ignore[no-any-return]
        terms = [(tensors[FACTORS[name]] * getattr(result, name)).sum() for name in self.used]
        return torch.stack(terms).sum() * self.factor

    def backward(self, result: Any, tensors: dict[str, Tensor], **keywords: bool) -> None:
        """Run backward, and raise RaisedError if it fails."""
        loss = self.loss_of(result, tensors)
        with raising():
            loss.backward(**keywords)

    def answer(self) -> Answer:
        """Return the results and the gradients of one forward and backward."""
        return self.answer_on(self.made())

    def answer_on(self, tensors: dict[str, Tensor]) -> Answer:
        """Return the same for these tensors."""
        result = self.run(tensors)
        # Classes are compared separately, since they are right or wrong
        found = {name: number for name, number in self.numbers(result).items() if name != "top_ids"}
        if self.used:
            if self.loss_of(result, tensors).requires_grad:
                self.backward(result, tensors)
            found |= {name: t.grad for name, t in leaves(tensors).items()}
        return as_float64(found)

    @property
    def plain(self) -> Callable[..., Any]:
        """Return the plain loss or scores."""
        return plain_loss if self.is_loss else plain_scores

    def plainly(self) -> Problem:
        """Return the same problem with plain PyTorch as the implementation."""
        return replace(self, adapter=replace(self.adapter, function=self.plain))

    def truth(self) -> Answer:
        """Return plain PyTorch's answer in float64, including the gradients of frozen tensors."""
        return replace(self.plainly(), frozen=()).answer_on(wide(self.made()))


@contextlib.contextmanager
def raising() -> Iterator[None]:
    """Within the block, turn an exception from the implementation into a RaisedError."""
    try:
        yield
    except Exception as error:
        raise RaisedError from error


def wide(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert tensors, made in the dtype under test, to float64, so that both see the same rounded inputs."""
    made = {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
    return made | {name: t.detach().double().requires_grad_() for name, t in leaves(tensors).items()}


def leaves(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that are differentiated unless they are frozen."""
    return {name: tensors[name] for name in GRADIENTS if name in tensors}


def as_float64(found: Mapping[str, Tensor | None]) -> Answer:
    """Return the numbers without a graph, in float64; missing ones stay None."""
    return {name: t if t is None else t.detach().double() for name, t in found.items()}


def asked(
    adapter: Implementation, names: Iterable[str] = FACTORS, used: Iterable[str] | None = None, **how: Any
) -> Problem:
    """Return a problem with these fields of `Problem` and `Options`, except those whose features are not offered.

    The scores in `names` are requested; those in `used`, by default all, are differentiated if they have a gradient.
    """
    how = {name: value for name, value in how.items() if NEEDED.get(name, "") in {"", *adapter.offers}}
    if how.get("token_temperature"):
        how.pop("temperature", None)
    settings = {field.name: how.pop(field.name) for field in fields(Options) if field.name in how}
    if isinstance(adapter, Adapter):
        return Problem(adapter, options=Options(**{"reduction": adapter.reduction} | settings), **how)
    names = [name for name in names if NEEDED.get(name, "") in {"", *adapter.offers}]
    used = [name for name in names if used is None or name in used]
    if "entropy gradient" not in adapter.offers:
        used = [name for name in used if name != "entropy"]
    if "gradients" not in adapter.offers:
        used = []
    options = Options(**settings, entropy="entropy" in names)
    given: dict[str, Any] = {"vocab_size": 131, "used": tuple(used), "given": 3 * ("log_probs_at" in names)}
    return Problem(adapter, options=options, **given | how)


@dataclass(frozen=True)
class Deviation:
    """The error of one number or gradient of the answer."""

    name: str
    error: float
    plain: float
    """Plain PyTorch's own error in the same dtype."""
    allowed: float

    @property
    def label(self) -> str:
        """Return its name in a message."""
        if self.name in GRADIENTS:
            return f"{self.name} gradient"
        return self.name

    @property
    def of_allowed(self) -> float:
        """Return the error relative to the allowed one; above 1 it is wrong."""
        return self.error / self.allowed


Measured = Callable[[Problem], Answer]


def deviations(x: Problem, measured: Measured = Problem.answer, right: Measured = Problem.truth) -> list[Deviation]:
    """Return the error of every number and gradient, the worst first.

    `measured` computes the implementation's answer, and `right` the reference in float64.
    """
    draws = [replace(x, seed=seed) for seed in range(DRAWS)]
    # (plain PyTorch in the given dtype, the reference in float64), for each draw
    own = [(measured(draw.plainly()), right(draw)) for draw in draws]
    found = measured(x)
    dtype = x.options.dtype
    # A number that plain PyTorch computes exactly, such as a loss of 0, may be off by one rounding error
    rounding = torch.finfo(dtype).eps / 2
    made = []
    for name in found.keys() - set(x.frozen):
        plain = max(error(one[name], exact[name]) for one, exact in own)
        allowed = EXACT if dtype == torch.float64 else max(TWICE * plain, rounding)
        made.append(Deviation(name, error(found[name], own[x.seed][1][name]), plain, allowed))
    # Ties are broken by name, because a set has no order
    return sorted(made, key=lambda deviation: (-deviation.of_allowed, deviation.name))
