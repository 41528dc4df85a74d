"""Refuse the options of TRL's trainers that need the logits of all tokens, or that the scores do not support."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
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
        raise RuntimeError(
            f"TRL {trl.__version__} computes its log-probabilities in another way than 1.16, for which "
            "apply_seqpar_scores is written; install trl==1.16.0, or train without it"
        )


def refuse_options(trainer: Any) -> None:
    """Raise TypeError for a trainer of another kind, and ValueError for the first option that is not supported."""
    kind = type(trainer).__name__
    if not isinstance(trainer, TRAINERS):
        names = ", ".join(supported.__name__ for supported in TRAINERS)
        raise TypeError(f"apply_seqpar_scores got a {kind}; it supports {names}, and subclasses of these")
    for option, reason in _unsupported(trainer):
        raise ValueError(f"{kind} with {option}: {reason}; leave it out, or train without apply_seqpar_scores")


def _unsupported(trainer: Any) -> Iterator[tuple[str, str]]:
    """Yield the options that are set and not supported, each with the reason."""
    args = trainer.args
    if args.use_liger_kernel:
        yield "use_liger_kernel=True", "it replaces parts of the model's forward"
    if args.torch_compile:
        yield "torch_compile=True", "the scores are computed outside the compiled graph"
    for option in _needing_logits(trainer):
        yield option, "TRL computes the logits of all tokens for it"
    for option in _layouts(trainer):
        yield option, "the scores are not tested with it"


def _needing_logits(trainer: Any) -> Iterator[str]:
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


def _layouts(trainer: Any) -> Iterator[str]:
    """Yield the ways to split the model or a sequence over devices."""
    if trainer.is_deepspeed_enabled:
        yield "DeepSpeed"
    if trainer.is_fsdp_enabled:
        yield "FSDP"
    parallelism = trainer.accelerator.parallelism_config
    for name in ("tp", "cp", "sp"):
        if parallelism is not None and getattr(parallelism, f"{name}_enabled", False):
            yield f"parallelism_config with {name}_size > 1"
