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

from seqpar.core.checks import check_integer
from seqpar.distributed.collectives import whole_tensor
from seqpar.testing.evidence import dense
from seqpar.testing.ranks import Pool, RankError

WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_forward_module", "_checkpoint_wrapped_module"})
"""What wrappers such as DDP and `torch.compile` add to the names of parameters."""
GROUP = "_group_tensors_by_device_and_dtype"
"""What the functions that clip gradients call with them before they change any."""
CLIPPING = ("_clip_grads_with_norm_", "clip_grad_value_")
"""Those of `torch.nn.utils`, by the names of their code."""
PRELOADED = ("torch._dynamo", "torch.distributed.fsdp")
"""What torch loads with the first optimizer, or the first sharded module: a second, in every new process."""
OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SEED = 0
SHAKE = 0.1
Sentence = TypeVar("Sentence")
Trainer = tuple[nn.Module, Callable[[], Any]]
"""A model, and a function that trains it for one step and returns the loss that is reported."""


@dataclass(frozen=True)
class Layout:
    """How one step's sentences are divided; `Layout()` is one process with all of them at once.

    Args:
        ranks: the number of processes, one gloo group with the usual variables of torchrun.
        accumulation: the number of micro-batches of each rank.
        kind: any word for `make_trainer`, such as "fsdp2".
        dtype: of the model; float64 unless `assert_same_step` is given another.
        only: one sentence, which is all that is trained on when the cause of a failure is looked for.

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
        """Return the sentences of the step: all, or the one by which the cause of a failure is found."""
        _given.append(len(sentences))
        if self.only is None:
            return [*sentences]
        return [sentences[self.only]]

    def micro_batches(self, sentences: Sequence[Sentence]) -> list[list[Sentence]]:
        """Return this rank's micro-batches of the step: neighbours, as equally many as can be."""
        mine = self.step(sentences)
        rank = int(os.environ.get("RANK", 0))
        cuts = [len(mine) * part // self.parts for part in range(self.parts + 1)]
        first = rank * self.accumulation
        return [mine[cuts[k] : cuts[k + 1]] for k in range(first, first + self.accumulation)]


_given: list[int] = []
"""How many sentences a layout was asked to divide, in the process that trains."""


class Ran(NamedTuple):
    """What one rank's step did."""

    loss: Any
    """None where this rank reports none."""
    gradients: dict[str, Tensor]
    """As the optimizer was given them, before any clipping by `torch.nn.utils`."""
    state: dict[str, Tensor]
    """The optimizer's state and settings by parameter, such as "exp_avg of head.weight"."""
    before: dict[str, Tensor]
    """All parameters before the step,"""
    after: dict[str, Tensor]
    """and after it."""
    sentences: int
    """The number of sentences; 0 where the trainer did not ask the layout for them."""


class Watch:
    """Keep each parameter's gradient and state in the steps of all torch optimizers."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.unclipped: dict[int, tuple[Tensor, Tensor]] = {}
        """By the id of a gradient itself, which is held so that no other one has it, and a copy of before."""
        self.gradients: dict[str, Tensor] = {}
        self.state: dict[str, Tensor] = {}
        self.stepped: set[str] = set()
        self.depth = 0
        """How many optimizers are stepping: one may step another, as ZeroRedundancyOptimizer, SAM and Lookahead do."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch every optimizer, and the gradients before they are clipped."""
        group = getattr(clip_grad, GROUP)

        def keep_and_group(tensors: Any, *arguments: Any, **keywords: Any) -> Any:
            # It is called for the norm of gradients, too, perhaps before all have been added up
            if sys._getframe(1).f_code.co_name in CLIPPING:
                for gradient in tensors[0]:
                    # The first time counts: what is clipped once more is clipped already
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
        """Yield name, parameter and group of what an optimizer trains."""
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
        """Keep the gradients that an optimizer is about to use, unless a closure is still to compute them."""
        has_closure = any(callable(one) for one in (*arguments[1:], *keywords.values()))
        self.depth += 1
        for name, parameter, _ in self._name(optimizer):
            if name in self.stepped and self.depth == 1:
                raise ValueError(f"{name} was stepped twice; make_trainer's function must train for one step")
            self.stepped.add(name)
            if not has_closure:
                self._keep(name, parameter)

    def _keep(self, name: str, parameter: nn.Parameter) -> None:
        """Keep a gradient, if there is one and it has not been kept."""
        gradient = parameter.grad
        if gradient is not None and name not in self.gradients:
            before = self.unclipped.get(id(gradient))
            self.gradients[name] = _whole(gradient) if before is None else before[1]

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Keep an optimizer's state and settings, and gradients of a closure, in which Lightning runs backward."""
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
    """Yield the numbers of a setting such as Adam's betas; nothing for any other."""
    if isinstance(value, tuple | list):
        yield from (number for number in value if isinstance(number, float | int))


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield a model's parameters under the names that they have without wrappers."""
    for name, parameter in model.named_parameters():
        yield ".".join(part for part in name.split(".") if part not in WRAPPERS), parameter


def _whole(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU, of all rows where FSDP2 or a plan has divided them; every rank must call it."""
    return dense(whole_tensor(tensor.detach()).to("cpu", copy=True))


class Run(NamedTuple):
    """One training step to run."""

    layout: Layout
    other_random_numbers: bool = False
    """Whether all operations draw other random numbers than usual."""
    other_weights: bool = False
    """Whether the weights are others when the step begins."""


def run(make_trainer: Callable[[Layout], Trainer], *runs: Run) -> list[list[Ran]]:
    """Return what every rank did in some runs of as many ranks, one after the other in one set of new processes."""
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
"""What builds the trainer; a fork inherits it, also where another process could not find it by its name."""


def _send(make_trainer: Callable[[Layout], Trainer]) -> Callable[[Layout], Trainer] | None:
    """Return what builds the trainer, if it can be sent to another process."""
    try:
        pickle.dumps(make_trainer)
    except Exception:
        # pickle raises an error of almost any class for what it cannot find by name
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
    # A trainer may collect garbage in every step, and need not look through what this process has inherited
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
    """Return a model and its step, as make_trainer is asked for."""
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])):
        raise TypeError(
            f"make_trainer returned a {type(made).__name__}; it must return two things: the model, and a function that "
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
    """Leave behind what a fork has of other trainers: accelerate keeps one state for a process and all its trainers."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
    # One process is no group of one: DDP and the Trainer would take it for several
    if world == 1 and dist.is_initialized():
        dist.destroy_process_group()
        for name in OF_RANKS:
            os.environ.pop(name, None)


class _OtherRandomNumbers(TorchFunctionMode):
    """Draw a number before every operation, so that those which draw some, such as dropout, draw others."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        torch.default_generator.manual_seed(torch.default_generator.initial_seed() + 1)
        return func(*args, **(kwargs or {}))


def alone(layout: Layout, sentence: int) -> Layout:
    """Return the layout in which one process trains on one sentence."""
    return replace(layout, ranks=1, accumulation=1, kind="", only=sentence)
