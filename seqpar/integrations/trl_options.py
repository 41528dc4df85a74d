"""Refuse the options of TRL's trainers that need the logits of all tokens, or that the scores do not support."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import trl
from torch import Tensor
from trl import DistillationTrainer, DPOTrainer, GRPOTrainer, KTOTrainer, RLOOTrainer, SFTTrainer

Compared = tuple[str, Tensor, Tensor]

TRAINERS = (SFTTrainer, DPOTrainer, KTOTrainer, GRPOTrainer, RLOOTrainer, DistillationTrainer)


def check_function(
    what: str, module: ModuleType, name: str, arguments: list[str], compared: Callable[[Any], Iterator[Compared]]
) -> None:
    """Raise RuntimeError unless a function of TRL's has these arguments and returns what ours does.

    Args:
        what: what it computes, for the error.
        compared: yields, for each part that it returns, the name, TRL's numbers and ours.
    """
    own: Any = getattr(module, name, None)
    if own is None:
        raise another_version(what, f"{module.__name__} has no {name}")
    # An autograd function takes them in its forward, after the context
    taken = list(inspect.signature(getattr(own, "forward", own)).parameters)[hasattr(own, "forward") :]
    if taken != arguments:
        raise another_version(what, f"{name} takes {', '.join(taken)} where it took {', '.join(arguments)}")
    # On the CPU, wherever the model is
    with torch.no_grad(), torch.device("cpu"):
        for part, theirs, ours in compared(own):
            difference = float((theirs.double() - ours.double()).abs().max())
            # The numbers are float32, and about 1 in size
            if not difference < 1e-4:
                raise another_version(what, f"{name} returns {part} that differ by up to {difference:.2g} from ours")


def another_version(what: str, changed: str) -> RuntimeError:
    """Return the error for a version of TRL that computes something differently from the supported one."""
    return RuntimeError(
        f"TRL {trl.__version__} computes {what} differently from 1.16, for which apply_seqpar_scores is written: "
        f"{changed}; install trl==1.16.0, or train without it"
    )


def refuse_options(trainer: Any) -> None:
    """Raise TypeError for an unsupported kind of trainer, ValueError for the first option that is not supported."""
    kind = type(trainer).__name__
    if not isinstance(trainer, TRAINERS):
        names = ", ".join(supported.__name__ for supported in TRAINERS)
        raise TypeError(f"apply_seqpar_scores got a {kind}; it supports {names}, and subclasses of these")
    for option, reason in _unsupported_options(trainer):
        raise ValueError(f"{kind} with {option}: {reason}; leave it out, or train without apply_seqpar_scores")


def _unsupported_options(trainer: Any) -> Iterator[tuple[str, str]]:
    """Yield the unsupported options that are set, each with the reason."""
    args = trainer.args
    if args.use_liger_kernel:
        yield "use_liger_kernel=True", "it replaces parts of the model's forward"
    if args.torch_compile:
        yield "torch_compile=True", "the scores are computed outside the compiled graph"
    for option in _options_using_logits(trainer):
        yield option, "TRL computes the logits of all tokens for it"
    yield from _layouts(trainer)


def _options_using_logits(trainer: Any) -> Iterator[str]:
    """Yield the options for which TRL runs the model again and keeps its logits."""
    args = trainer.args
    if isinstance(trainer, SFTTrainer):
        if args.label_smoothing_factor and args.loss_type != "dft":
            yield f"label_smoothing_factor={args.label_smoothing_factor:g}"
        if trainer.compute_loss_func is not None:
            yield "compute_loss_func"
    if trainer.compute_metrics is not None:
        yield "compute_metrics"
    if trainer.preprocess_logits_for_metrics is not None:
        yield "preprocess_logits_for_metrics"


def _layouts(trainer: Any) -> Iterator[tuple[str, str]]:
    """Yield the unsupported ways in which the model or a sequence is split over devices, each with the reason."""
    if trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2:
        yield "FSDP1", 'TRL gathers the output embeddings only under FSDP2; set fsdp_config={"version": 2}'
    if trainer.is_deepspeed_enabled and isinstance(trainer, DistillationTrainer):
        yield "DeepSpeed", "the divergence is not tested with it; shard the models with FSDP2 instead"
    parallelism = trainer.accelerator.parallelism_config
    splits = ["cp", "sp"]
    if isinstance(trainer, (GRPOTrainer, RLOOTrainer, DistillationTrainer)):
        splits.append("tp")
    for name in splits:
        if parallelism is not None and getattr(parallelism, f"{name}_enabled", False):
            yield f"parallelism_config with {name}_size > 1", "the scores are not tested with it"
