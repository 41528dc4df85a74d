"""What other projects offer for the same loss, called as they document it; `plain_ways` says what a step is."""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import platform
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.loss.plain_ways import Step
from benchmarks.loss.problems import Inputs
from seqpar.testing.conformance import adapter

TUNE_CHUNKS = 8
PEERS = {
    "cpu": ["cut-cross-entropy", "torchtune", "torchao"],
    "cuda": ["triton", "cut-cross-entropy", "liger-kernel", "quack-kernels"],
}
"""As they are called in the package index; torchtune needs torchao."""


def versions(device: str) -> dict[str, str]:
    """Of Python, torch, seqpar and the peers, where they are installed."""
    found = {"Python": platform.python_version(), "torch": str(torch.__version__)}
    for name in ["seqpar", *PEERS.get(device.split(":")[0], [])]:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def torch_op(options: dict[str, Any]) -> Callable[[Inputs], Step]:
    """torch's own `F.linear_cross_entropy` in chunks (2.13 and later), with these options.

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


def torch_op_choices(dtype: torch.dtype) -> list[dict[str, Any]]:
    """The options of torch's op worth trying: what its documentation names, over sensible chunks."""
    wide = [None, torch.float32] if dtype.itemsize < 4 else [None]
    tried = itertools.product(["compact", "balanced", "accurate"], [512, 1024, 2048], wide)
    return [{"acc_policy": policy, "batch_chunk_size": rows, "acc_dtype": kind} for policy, rows, kind in tried]


def cut_cross_entropy(x: Inputs) -> Step:
    """apple's `linear_cross_entropy(impl="torch_compile")`, its way for machines without a supported GPU."""
    linear_cross_entropy = quietly("cut_cross_entropy").linear_cross_entropy
    impl = "torch_compile" if x.device == "cpu" else "cce"
    return lambda: linear_cross_entropy(x.hidden, x.weight, x.target, reduction="sum", impl=impl) / x.tokens


def torchtune(x: Inputs) -> Step:
    """torchtune's `CEWithChunkedOutputLoss` with 8 chunks over time, its inner function compiled as it advises."""
    loss = quietly("torchtune.modules.loss").CEWithChunkedOutputLoss(TUNE_CHUNKS)
    loss.compute_cross_entropy = torch.compile(loss.compute_cross_entropy)

    def step() -> Tensor:
        hidden_BTD, target_BT = x.sentences()
        chunks = [F.linear(hidden, x.weight, x.bias) for hidden in hidden_BTD.chunk(TUNE_CHUNKS, 1)]
        return loss(chunks, target_BT)  # type: ignore[no-any-return]

    return step


def liger(wide_sums: bool) -> Callable[[Inputs], Step]:
    """Liger's fused linear cross-entropy, which sums its weight gradient in the weight's dtype by default."""

    def prepare(x: Inputs) -> Step:
        module = quietly("liger_kernel.transformers.fused_linear_cross_entropy")
        sums = torch.float32 if wide_sums else None
        loss = module.LigerFusedLinearCrossEntropyLoss(
            label_smoothing=x.problem.smoothing, reduction="sum", accum_dtype=sums
        )
        return lambda: loss(x.weight, x.hidden, x.target, x.bias) / x.tokens

    return prepare


def quack(x: Inputs) -> Step:
    """Dao-AILab's chunked linear cross-entropy, which adds its weight gradient up in float32."""
    chunked = quietly("quack.linear_cross_entropy").chunked_linear_cross_entropy
    return lambda: chunked(x.hidden, x.weight, x.target, reduction="sum") / x.tokens


def why_missing(module: str) -> str:
    """Why that module cannot be imported here; empty where it can."""
    try:
        quietly(module)
    except Exception as error:  # whatever a package does at import is the answer
        reason = str(error).strip().splitlines() or [type(error).__name__]
        return f"cannot be imported: {reason[0].strip()}"
    return ""


def quietly(module: str) -> Any:
    """The module, without what it says at import (torchao names each of its GPU libraries that it cannot load)."""
    return adapter.quietly(lambda: importlib.import_module(module))
