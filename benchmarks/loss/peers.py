"""Compute the loss as other projects offer it, called as they document it; `plain_ways` explains what a step is."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.loss.plain_ways import Step
from benchmarks.loss.problems import Inputs
from conformance.adapter import quietly


def torch_op(options: dict[str, Any]) -> Callable[[Inputs], Step]:
    """Use torch's own `F.linear_cross_entropy` in chunks (2.13 and later), with these options.

    With label smoothing it falls back to full logits and warns.
    """

    def prepare(x: Inputs) -> Step:
        def step() -> Tensor:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                loss = F.linear_cross_entropy(
                    x.hidden,
                    x.weight,
                    x.target,
                    linear_bias=x.bias,
                    label_smoothing=x.problem.smoothing,
                    reduction="sum",
                    options=torch.nn.LinearCrossEntropyOptions(**options),
                )
            return loss / x.tokens

        return step

    return prepare


def cut_cross_entropy(x: Inputs) -> Step:
    """Use apple's `linear_cross_entropy`; without a supported GPU that is its `impl="torch_compile"`."""
    linear_cross_entropy = import_quietly("cut_cross_entropy").linear_cross_entropy
    impl = "cce"
    if x.device == "cpu":
        impl = "torch_compile"
    return lambda: linear_cross_entropy(x.hidden, x.weight, x.target, reduction="sum", impl=impl) / x.tokens


def liger(wide_sums: bool) -> Callable[[Inputs], Step]:
    """Use Liger's fused linear cross-entropy; unless `wide_sums`, it sums the weight gradient in the weight's dtype."""

    def prepare(x: Inputs) -> Step:
        module = import_quietly("liger_kernel.transformers.fused_linear_cross_entropy")
        sums = None
        if wide_sums:
            sums = torch.float32
        loss = module.LigerFusedLinearCrossEntropyLoss(
            label_smoothing=x.problem.smoothing, reduction="sum", accum_dtype=sums
        )
        return lambda: loss(x.weight, x.hidden, x.target, x.bias) / x.tokens

    return prepare


def quack(x: Inputs) -> Step:
    """Use Dao-AILab's chunked linear cross-entropy, which sums the weight gradient in float32."""
    chunked = import_quietly("quack.linear_cross_entropy").chunked_linear_cross_entropy
    return lambda: chunked(x.hidden, x.weight, x.target, reduction="sum") / x.tokens


def import_quietly(module: str) -> Any:
    """Import a module without its messages (torchao names each of its GPU libraries that it cannot load)."""
    return quietly(lambda: importlib.import_module(module))
