"""Run one step of a trainer in new processes, and keep what it reports, its gradients and its optimizer's state."""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from seqpar.core.checks import check_integer, kind_of
from seqpar.distributed.collectives import whole_tensor
from seqpar.testing.evidence import dense
from seqpar.testing.ranks import Pool, RankError

WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_forward_module", "_checkpoint_wrapped_module"})
"""What wrappers such as DDP and `torch.compile` add to parameter names."""
GROUP = "_group_tensors_by_device_and_dtype"
"""The function to which gradient clipping passes the gradients before it changes any."""
CLIPPING = ("_clip_grads_with_norm_", "clip_grad_value_")
"""The clipping functions of `torch.nn.utils`, by the names of their code objects."""
PRELOADED = ("torch._dynamo", "torch.distributed.fsdp")
"""Modules that torch loads with the first optimizer or sharded module, which would take a second in every process."""
OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SEED = 0
SHAKE = 0.1
Sentence = TypeVar("Sentence")
Trainer = tuple[nn.Module, Callable[[], Any]]
"""A model, and a function that trains it for one step and returns the reported loss."""


@dataclass(frozen=True)
class Layout:
    """How one step's sentences are divided; `Layout()` is one process with all of them at once.

    Args:
        ranks: the number of processes, which form one gloo group with torchrun's usual variables.
        accumulation: the number of micro-batches of each rank.
        kind: any word that `make_trainer` understands, such as "fsdp2".
        dtype: the model's dtype; float64 unless `assert_same_step` is given a different one.
        only: the only sentence to train on, while looking for the cause of a failure.

    Example:
        >>> from seqpar.testing import Layout
        >>> print(Layout(ranks=2, accumulation=4, kind="fsdp2"))
        2 ranks, 4 micro-batches each, fsdp2
        >>> Layout(ranks=2, accumulation=4).parts
        8
    """

    ranks: int = 1
    accumulation: int = 1
    kind: str = ""
    dtype: torch.dtype = torch.float64
    only: int | None = None

    def __post_init__(self) -> None:
        check_integer(self.ranks, "ranks", at_least=1)
        check_integer(self.accumulation, "accumulation", at_least=1)

    def __str__(self) -> str:
        batches = {1: ""}.get(self.accumulation, f", {self.accumulation} micro-batches" + " each" * (self.ranks > 1))
        ranks = "one process" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{ranks}{batches}{', ' * bool(self.kind)}{self.kind}"

    @property
    def parts(self) -> int:
        """Return the number of micro-batches of all ranks."""
        return self.ranks * self.accumulation

    def step(self, sentences: Sequence[Sentence]) -> list[Sentence]:
        """Return the sentences of the step: all, or just one while looking for the cause of a failure."""
        _given.append(len(sentences))
        if self.only is None:
            return [*sentences]
        return [sentences[self.only]]

    def micro_batches(self, sentences: Sequence[Sentence]) -> list[list[Sentence]]:
        """Return this rank's micro-batches of the step: adjacent sentences, in numbers as equal as possible."""
        mine = self.step(sentences)
        rank = int(os.environ.get("RANK", 0))
        cuts = [len(mine) * part // self.parts for part in range(self.parts + 1)]
        first = rank * self.accumulation
        return [mine[cuts[k] : cuts[k + 1]] for k in range(first, first + self.accumulation)]


_given: list[int] = []
"""The numbers of sentences that a layout was asked to divide in the process that trains."""


class Ran(NamedTuple):
    """What one rank's step did."""

    loss: Any
    """The reported loss; None if this rank reports none."""
    gradients: dict[str, Tensor]
    """The gradients that the optimizer was given, as they were before any clipping by `torch.nn.utils`."""
    state: dict[str, Tensor]
    """The optimizer's state and settings by parameter, such as "exp_avg of head.weight"."""
    before: dict[str, Tensor]
    """All parameters before the step."""
    after: dict[str, Tensor]
    """All parameters after the step."""
    sentences: int
    """The number of sentences; 0 if the trainer did not ask the layout for them."""


class Watch:
    """Record each parameter's gradient and state in the steps of all torch optimizers."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.unclipped: dict[int, tuple[Tensor, Tensor]] = {}
        """By id, each gradient itself (kept, so that no other tensor gets its id) and a copy from before clipping."""
        self.gradients: dict[str, Tensor] = {}
        self.state: dict[str, Tensor] = {}
        self.stepped: set[str] = set()
        self.depth = 0
        """How many optimizers are stepping: one may step another, as in ZeroRedundancyOptimizer, SAM and Lookahead."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch every optimizer, and the gradients before they are clipped."""
        group = getattr(clip_grad, GROUP)

        def keep_and_group(tensors: Any, *arguments: Any, **keywords: Any) -> Any:
            # This is also called for the norm of gradients, possibly before all have been added up
            if sys._getframe(1).f_code.co_name in CLIPPING:
                for gradient in tensors[0]:
                    # Only the first time counts: later on the gradient has already been clipped
                    if id(gradient) not in self.unclipped:
                        self.unclipped[id(gradient)] = gradient, _whole(gradient)
            return group(tensors, *arguments, **keywords)

        hooks = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]
        setattr(clip_grad, GROUP, keep_and_group)
        try:
            yield
        finally:
            setattr(clip_grad, GROUP, group)
            for hook in hooks:
                hook.remove()

    def _name(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, nn.Parameter, dict[str, Any]]]:
        """Yield the name and the group of each parameter that an optimizer trains, with the parameter."""
        names = {id(p): name for name, p in named_parameters(self.model)}
        group: dict[str, Any]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise ValueError(
                        f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is none of the "
                        f"{type(self.model).__name__} which make_trainer returned; return the module that is trained"
                    )
                yield names[id(parameter)], parameter, group

    def _before(self, optimizer: torch.optim.Optimizer, arguments: Sequence[Any], keywords: dict[str, Any]) -> None:
        """Record the gradients that an optimizer is about to use, unless a closure has yet to compute them."""
        has_closure = any(callable(one) for one in (*arguments[1:], *keywords.values()))
        self.depth += 1
        for name, parameter, _ in self._name(optimizer):
            if name in self.stepped and self.depth == 1:
                raise ValueError(f"{name} was stepped twice; make_trainer's function must train for one step")
            self.stepped.add(name)
            if not has_closure:
                self._keep(name, parameter)

    def _keep(self, name: str, parameter: nn.Parameter) -> None:
        """Record a gradient if there is one and it has not been recorded."""
        gradient = parameter.grad
        if gradient is not None and name not in self.gradients:
            before = self.unclipped.get(id(gradient))
            self.gradients[name] = _whole(gradient) if before is None else before[1]

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Record an optimizer's state and settings, and gradients from a closure, in which Lightning runs backward."""
        self.depth -= 1
        for name, parameter, settings in self._name(optimizer):
            self._keep(name, parameter)
            values: dict[str, Any] = {**settings, **optimizer.state.get(parameter, {})}
            for key, value in values.items():
                numbers = [value] if isinstance(value, Tensor | float | int) else [*_numbers(value)]
                for place, number in enumerate(numbers):
                    what = f"{key}[{place}]" if len(numbers) > 1 else key
                    if not isinstance(number, Tensor):
                        number = torch.tensor(number, dtype=torch.float64)
                    self.state[f"{what} of {name}"] = _whole(number).double()


def _numbers(value: Any) -> Iterator[float]:
    """Yield the numbers of a setting such as Adam's betas; nothing for other kinds of settings."""
    if isinstance(value, tuple | list):
        yield from (number for number in value if isinstance(number, float | int))


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield a model's parameters with the names that they have without wrappers."""
    for name, parameter in model.named_parameters():
        yield ".".join(part for part in name.split(".") if part not in WRAPPERS), parameter


def _whole(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU, with all rows if FSDP2 or a plan has split them; every rank must call this."""
    return dense(whole_tensor(tensor.detach()).to("cpu", copy=True))


class Run(NamedTuple):
    """One training step to run."""

    layout: Layout
    other_random_numbers: bool = False
    """Whether all operations draw different random numbers than usual."""
    other_weights: bool = False
    """Whether the step begins with different weights."""


def run(make_trainer: Callable[[Layout], Trainer], *runs: Run) -> list[list[Ran]]:
    """Return what every rank did in each run; runs have equally many ranks and share one set of new processes."""
    _making[:] = [make_trainer]
    for module in PRELOADED:
        importlib.import_module(module)
    pool = Pool(runs[0].layout.ranks)
    try:
        return [pool.call(_train_step, _send(make_trainer), one) for one in runs]
    except RankError as error:
        raise AssertionError(f"{runs[0].layout}: {error}") from None
    finally:
        pool.close()


_making: list[Callable[[Layout], Trainer]] = []
"""The function that builds the trainer; a fork inherits it even if other processes could not find it by name."""


def _send(make_trainer: Callable[[Layout], Trainer]) -> Callable[[Layout], Trainer] | None:
    """Return the function that builds the trainer if it can be sent to another process, else None."""
    try:
        pickle.dumps(make_trainer)
    except Exception:
        # pickle may raise an error of almost any class for objects that it cannot find by name
        return None
    return make_trainer


def _train_step(rank: int, world: int, sent: Callable[[Layout], Trainer] | None, run: Run) -> Ran:
    """Train for one step in one rank."""
    make_trainer = sent or next(iter(_making), None)
    if make_trainer is None:
        raise TypeError(
            "make_trainer must be at the top level of a module, where a new process finds it: a fork of this one "
            "cannot run autograd (on a machine with an accelerator, or after torch.compile in torch's builds for CUDA)"
        )
    _forget_the_parent(world)
    # A trainer may collect garbage in every step; freezing spares it the objects that this process has inherited
    gc.freeze()
    _given.clear()
    torch.manual_seed(SEED)
    model, step = _check(make_trainer(run.layout))
    if run.other_weights:
        _shake(model)
    before = {name: _whole(p) for name, p in named_parameters(model)}
    watch = Watch(model)
    with watch.watching(), _OtherRandomNumbers() if run.other_random_numbers else nullcontext():
        loss = step()
    if isinstance(loss, Tensor):
        loss = float(loss.detach())
    after = {name: _whole(p) for name, p in named_parameters(model) if name in before}
    sentences = _given[0] if _given else 0
    return Ran(loss, watch.gradients, watch.state, before, after, sentences)


def _check(made: Any) -> Trainer:
    """Return a model and its step; raise TypeError unless make_trainer returned just that."""
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])):
        raise TypeError(
            f"make_trainer returned {kind_of(made)}; it must return two things: the model, and a function that "
            "trains it for one step and returns the loss that is reported"
        )
    return made


@torch.no_grad()
def _shake(model: nn.Module) -> None:
    """Add random numbers to the weights that are trained."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter), alpha=SHAKE)


def _forget_the_parent(world: int) -> None:
    """Drop what a fork has inherited of other trainers: accelerate keeps one state for all trainers of a process."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
    # A single process must not be a group of one, which DDP and the Trainer would take for several
    if world == 1 and dist.is_initialized():
        dist.destroy_process_group()
        for name in OF_RANKS:
            os.environ.pop(name, None)


class _OtherRandomNumbers(TorchFunctionMode):
    """Reseed before every operation, so that those that draw random numbers, such as dropout, draw different ones."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        torch.default_generator.manual_seed(torch.default_generator.initial_seed() + 1)
        return func(*args, **(kwargs or {}))


def alone(layout: Layout, sentence: int) -> Layout:
    """Return the layout in which one process trains on one sentence."""
    return replace(layout, ranks=1, accumulation=1, kind="", only=sentence)
