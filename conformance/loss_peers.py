"""Call the known losses as their projects document it. None of them is imported before it runs."""

from __future__ import annotations

import importlib
import os
import sys
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conformance.adapter import DEVICE, EVERYTHING, LOW, Adapter, Options, quietly, why_missing
from conformance.plain import plain_loss
from seqpar.core.token_loss import TokenLoss
from seqpar.engine.loss_compute import LossCompute
from seqpar.linear.cross_entropy import linear_cross_entropy

HALVES = (torch.bfloat16, torch.float16)
CPU = DEVICE == "cpu"


def usual(options: Options) -> dict[str, Any]:
    """Return the keywords that most implementations share with `F.cross_entropy`, without those at their defaults."""
    how: dict[str, Any] = {"reduction": options.reduction}
    if options.ignore_index != -100:
        how["ignore_index"] = options.ignore_index
    if options.label_smoothing:
        how["label_smoothing"] = options.label_smoothing
    if options.softcap is not None:
        how["softcap"] = options.softcap
    return how


def torch_chunked(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options, **policy: Any
) -> Tensor:
    if options.chunk:
        policy |= {"batch_chunk_size": options.chunk, "chunking_method": None}
    how = nn.LinearCrossEntropyOptions(**policy)
    loss: Tensor = F.linear_cross_entropy(hidden, weight, target, linear_bias=bias, **usual(options), options=how)
    return loss


def torch_accurate(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    policy: dict[str, Any] = {"acc_policy": "accurate", "allow_retain_graph": True}
    if options.dtype in HALVES:
        policy["acc_dtype"] = torch.float32
    return torch_chunked(hidden, weight, target, bias, options, **policy)


def why_no_torch_chunked() -> str:
    """Return why torch has no chunked loss here; empty if it has."""
    if hasattr(F, "linear_cross_entropy") and hasattr(nn, "LinearCrossEntropyOptions"):
        return ""
    return f"not in torch {torch.__version__}"


def liger(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options, **more: Any) -> Tensor:
    peer: Any = import_liger("liger_kernel.transformers")
    loss: Tensor = peer.LigerFusedLinearCrossEntropyLoss(**usual(options), **more)(weight, hidden, target, bias)
    return loss


def import_liger(module: str) -> Any:
    """Return a module of Liger, whose kernels need a GPU, or Triton's interpreter."""
    if CPU:
        os.environ["TRITON_INTERPRET"] = "1"
    return importlib.import_module(module)


def why_no_liger() -> str:
    """Return why Liger cannot run: its kernels need a GPU or the interpreter, chosen before Triton is imported."""
    late = "triton" in sys.modules and "liger_kernel" not in sys.modules
    if CPU and late and os.environ.get("TRITON_INTERPRET") != "1":
        return "needs a GPU, or a process that has not loaded Triton yet"

    def switched() -> str:
        if CPU:
            os.environ["TRITON_INTERPRET"] = "1"
        return why_missing("liger_kernel.transformers")

    return quietly(switched)


def cut(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    peer: Any = importlib.import_module("cut_cross_entropy")
    loss: Tensor = peer.linear_cross_entropy(hidden, weight, target, **usual(options), impl=CUT_BY)
    return loss


def torchtune(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    peer: Any = importlib.import_module("torchtune.modules.loss")
    logits = [F.linear(part, weight, bias) for part in hidden[None].chunk(8, 1)]
    loss: Tensor = peer.CEWithChunkedOutputLoss(8, options.ignore_index)(logits, target[None])
    return loss


def seqpar(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    # A TokenLoss has both the sum and the mean, so there is no keyword for the reduction
    how = usual(options)
    del how["reduction"]
    loss = linear_cross_entropy(hidden, weight, target, bias=bias, chunk_tokens=options.chunk, **how)
    return loss.total if options.reduction == "sum" else loss.mean


def engine(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    """Compute the loss by `LossCompute` with a projection of a class that it differentiates by autograd."""
    generator = Projection(weight.size(1), weight.size(0), bias is not None, device="meta")
    # The caller's own parameters, so that gradients arrive in them
    generator.softcap = options.softcap
    generator.weight = weight
    generator.bias = bias  # type: ignore[assignment]
    criterion = nn.CrossEntropyLoss(
        ignore_index=options.ignore_index, label_smoothing=options.label_smoothing, reduction="sum"
    )
    loss: TokenLoss = LossCompute(generator, criterion, chunk_tokens=options.chunk)(hidden, target)
    return loss.total if options.reduction == "sum" else loss.mean


class Projection(nn.Linear):
    """A projection of its own class, for which the engine has no closed form of the gradient."""

    softcap: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, as `nn.Linear` does, after the softcap if there is one."""
        logits = super().forward(x)
        if self.softcap is None:
            return logits
        return self.softcap * torch.tanh(logits / self.softcap)


# Without a GPU, Liger's kernels run in Triton's interpreter and cut_cross_entropy in compiled torch operations
INTERPRETED, CUT_BY, CUT_NOTE = "", "cce", 'impl="cce"'
LIGER = LOW | {"bias", "smoothing", "softcap", "sum", "mean"}
if CPU:
    INTERPRETED = ", in Triton's interpreter (numbers, no memory)"
    CUT_BY, CUT_NOTE = "torch_compile", 'impl="torch_compile", its fallback without a supported GPU'
    # The interpreter gives its kernel a Python float, of which the kernel asks what only a Triton value has
    LIGER -= {"softcap"}
IN_FLOAT32 = "float64 is taken, and computed in float32"
WITHOUT_SOFTCAP = EVERYTHING - {"softcap"}
CHUNKED = "`F.linear_cross_entropy` with its default options; with smoothing it makes all logits, and warns"
ACCURATE = (
    'the same with acc_policy="accurate", acc_dtype=torch.float32 (bfloat16, float16) and allow_retain_graph=True'
)
TUNE = f"8 chunks, not compiled; it has only a mean; {IN_FLOAT32}"
why_no_cut = partial(why_missing, "cut_cross_entropy")
why_no_tune = partial(why_missing, "torchtune.modules.loss")

PEERS = (
    Adapter("torch", plain_loss, EVERYTHING - {"chunks"}, "the plain loss"),
    Adapter("torch-chunked", torch_chunked, WITHOUT_SOFTCAP, CHUNKED, why_not=why_no_torch_chunked),
    Adapter("torch-chunked-accurate", torch_accurate, WITHOUT_SOFTCAP, ACCURATE, why_not=why_no_torch_chunked),
    Adapter("liger", liger, LIGER, f"fused{INTERPRETED}; {IN_FLOAT32}", "liger-kernel", why_no_liger),
    Adapter(
        "liger-float32",
        partial(liger, accum_dtype=torch.float32),
        LIGER,
        "the same with accum_dtype=torch.float32",
        "liger-kernel",
        why_no_liger,
    ),
    Adapter(
        "cce",
        cut,
        LOW | {"softcap", "sum", "mean", "CPU memory"},
        f"{CUT_NOTE}; {IN_FLOAT32}",
        "cut-cross-entropy",
        why_no_cut,
    ),
    Adapter("torchtune", torchtune, LOW | {"bias", "mean", "CPU memory"}, TUNE, "torchtune", why_no_tune),
    Adapter("seqpar", seqpar, note="`linear_cross_entropy`", package="seqpar"),
    Adapter("seqpar-engine", engine, note="`LossCompute` with your own generator", package="seqpar"),
)
KNOWN: dict[str, Adapter] = {adapter.name: adapter for adapter in PEERS}
"""The known losses, by name."""
