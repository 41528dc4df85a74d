"""Refuse the options of TRL's trainers that need the logits of all tokens, or that the scores do not support."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import trl
from trl import DPOTrainer, GRPOTrainer, KTOTrainer, SFTTrainer
from trl.trainer import utils as trl_utils

TRAINERS = (SFTTrainer, DPOTrainer, KTOTrainer, GRPOTrainer)

NODE = "_ChunkedLogProbFunction"
COMPACT = "_use_triton"
"""The two names in `trl.trainer.utils` by which a forward with `fused_lm_head=True` finds its log-probabilities, and
whether to pass only the rows that have a label."""

NODE_ARGUMENTS = [
    "hidden",
    "weight",
    "bias",
    "targets",
    "temperature",
    "chunk_size",
    "final_logit_softcapping",
    "logit_scale",
    "outputs",
]


def check_version() -> None:
    """Raise RuntimeError unless the installed TRL computes its log-probabilities as this integration expects."""
    node: Any = getattr(trl_utils, NODE, None)
    arguments: list[str] = []
    if node is not None and hasattr(trl_utils, COMPACT):
        arguments = list(inspect.signature(node.forward).parameters)[1:]
    if arguments != NODE_ARGUMENTS:
        other = f"TRL {trl.__version__} computes its log-probabilities in another way than 1.16"
        raise RuntimeError(f"{other}; install trl==1.16.0, or train without apply_seqpar_scores")


def refuse_options(trainer: Any) -> None:
    """Raise TypeError for a trainer of another kind, and ValueError for the first option that is not supported."""
    kind = type(trainer).__name__
    if not isinstance(trainer, TRAINERS):
        names = ", ".join(supported.__name__ for supported in TRAINERS)
        raise TypeError(f"apply_seqpar_scores got a {kind}; it supports {names}, and subclasses of these")
    for reason, options in UNSUPPORTED.items():
        for option in options(trainer):
            raise ValueError(f"{kind} with {option}: {reason}; leave it out, or train without apply_seqpar_scores")


def _changed_models(trainer: Any) -> Iterator[str]:
    """Yield the options with which another forward runs."""
    for name in ("use_liger_kernel", "torch_compile"):
        if getattr(trainer.args, name):
            yield f"{name}=True"


def _needing_logits(trainer: Any) -> Iterator[str]:
    """Yield the options for which TRL runs the model again and keeps its logits."""
    args = trainer.args
    if isinstance(trainer, SFTTrainer) and args.label_smoothing_factor and args.loss_type != "dft":
        yield f"label_smoothing_factor={args.label_smoothing_factor:g}"
    if isinstance(trainer, SFTTrainer) and trainer.compute_loss_func is not None:
        yield "compute_loss_func"
    for name in ("compute_metrics", "preprocess_logits_for_metrics"):
        if getattr(trainer, name) is not None:
            yield name


def _layouts(trainer: Any) -> Iterator[str]:
    """Yield the ways to split the model or a sequence over devices."""
    if trainer.is_deepspeed_enabled:
        yield "DeepSpeed"
    if trainer.is_fsdp_enabled:
        yield "FSDP"
    parallelism = trainer.accelerator.parallelism_config
    for name in ("tp", "cp", "sp"):
        if getattr(parallelism, f"{name}_enabled", False):
            yield f"parallelism_config with {name}_size > 1"


UNSUPPORTED: dict[str, Callable[[Any], Iterator[str]]] = {
    "it replaces parts of the model's forward, or compiles it, and the scores are outside the compiled graph": (
        _changed_models
    ),
    "TRL computes the logits of all tokens for it": _needing_logits,
    "the scores are not tested with it": _layouts,
}
"""The reason why the scores do not go with some options -> those of them that a trainer has set."""
