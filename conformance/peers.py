"""Call the known losses and token scores as their projects document it. None of them is imported before it runs."""

from __future__ import annotations

import importlib
import os
import sys
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from conformance.adapter import (
    ALL_SCORES,
    DEVICE,
    DTYPES,
    EVERYTHING,
    LOW,
    Adapter,
    Options,
    ScoreAdapter,
    quietly,
    why_missing,
    why_no_nemo_rl,
)
from conformance.plain import logits_of, plain_loss, usual_scores, zero_ignored
from seqpar.core.token_loss import TokenLoss
from seqpar.engine.loss_compute import LossCompute
from seqpar.linear.cross_entropy import linear_cross_entropy
from seqpar.linear.token_scores import TokenScores, token_scores
from seqpar.testing.plain_reference import plain_logits

CPU = DEVICE == "cpu"
CUT_BY = "torch_compile" if CPU else "cce"
TRL_CHUNK = 32768
"""The classes in a chunk where TRL's own trainers call it."""
NEMO_CHUNK = 256
"""The tokens in a chunk where NeMo-RL's own examples set them."""


def usual(options: Options) -> dict[str, Any]:
    """Return the keywords that most losses share with `F.cross_entropy`, without those at their defaults."""
    given = {name: getattr(options, name) for name in ("ignore_index", "label_smoothing", "softcap")}
    changed = {name: value for name, value in given.items() if value != getattr(Options, name)}
    return {"reduction": options.reduction} | changed


def torch_chunked(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options, **policy: Any
) -> Tensor:
    """Call `F.linear_cross_entropy` with its default options; with smoothing it makes all logits, and warns."""
    if options.chunk:
        policy |= {"batch_chunk_size": options.chunk, "chunking_method": None}
    how = nn.LinearCrossEntropyOptions(**policy)
    loss: Tensor = F.linear_cross_entropy(hidden, weight, target, linear_bias=bias, **usual(options), options=how)
    return loss


def torch_accurate(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    """Do the same with acc_policy="accurate", acc_dtype=torch.float32 for 16 bits, and allow_retain_graph=True."""
    policy: dict[str, Any] = {"acc_policy": "accurate", "allow_retain_graph": True}
    if options.dtype in (torch.bfloat16, torch.float16):
        policy["acc_dtype"] = torch.float32
    return torch_chunked(hidden, weight, target, bias, options, **policy)


def why_no_torch_chunked() -> str:
    """Return why torch has no chunked loss here; empty if it has."""
    if hasattr(F, "linear_cross_entropy") and hasattr(nn, "LinearCrossEntropyOptions"):
        return ""
    return f"not in torch {torch.__version__}"


def liger(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options, **more: Any) -> Tensor:
    """Call the fused loss, without a GPU in Triton's interpreter (numbers, no memory), which has no float64."""
    peer: Any = import_liger("liger_kernel.transformers")
    loss: Tensor = peer.LigerFusedLinearCrossEntropyLoss(**usual(options), **more)(weight, hidden, target, bias)
    return loss


def liger_float32(*given: Any) -> Tensor:
    """Do the same with accum_dtype=torch.float32."""
    return liger(*given, accum_dtype=torch.float32)


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
    """Call it with impl="cce", or "torch_compile" without a supported GPU; float64 is computed in float32."""
    peer: Any = importlib.import_module("cut_cross_entropy")
    loss: Tensor = peer.linear_cross_entropy(hidden, weight, target, **usual(options), impl=CUT_BY)
    return loss


def torchtune(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    """Take 8 chunks, not compiled; it has only a mean; float64 is computed in float32."""
    peer: Any = importlib.import_module("torchtune.modules.loss")
    logits = [F.linear(part, weight, bias) for part in hidden[None].chunk(8, 1)]
    loss: Tensor = peer.CEWithChunkedOutputLoss(8, options.ignore_index)(logits, target[None])
    return loss


def seqpar(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    """Call `linear_cross_entropy`."""
    # A TokenLoss has both the sum and the mean, so there is no keyword for the reduction
    how = usual(options)
    del how["reduction"]
    loss = linear_cross_entropy(hidden, weight, target, bias=bias, chunk_tokens=options.chunk, **how)
    return loss.total if options.reduction == "sum" else loss.mean


def engine(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    """Call `LossCompute` with your own generator."""
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


def seqpar_scores(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options, **more: Any
) -> TokenScores:
    """Call `token_scores`."""
    for name in ("ignore_index", "temperature", "softcap", "entropy", "top_k", "ids"):
        more[name] = getattr(options, name)
    return token_scores(hidden, weight, target, bias=bias, chunk_tokens=options.chunk, **more)


def seqpar_invariant(*given: Any) -> TokenScores:
    """Do the same with batch_invariant=True."""
    return seqpar_scores(*given, batch_invariant=True)


def trl(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> TokenScores:
    """Call `selective_log_softmax` and, with it, `entropy_from_logits`, of all logits."""
    peer: Any = importlib.import_module("trl.trainer.utils")
    logits = plain_logits(hidden, weight, bias, options.softcap)
    how: dict[str, Any] = {"row_mask": target != options.ignore_index}
    if options.temperature != 1:
        how["temperature"] = options.temperature
    given = logits, target.clamp(min=0)
    entropy = at = None
    if options.entropy:
        log_prob, entropy = peer.selective_log_softmax_and_entropy(*given, **how)
    else:
        log_prob = peer.selective_log_softmax(*given, **how)
    if options.ids is not None:
        at = peer.selective_log_softmax(logits, options.ids, **how | {"row_mask": how["row_mask"][:, None]})
    return TokenScores(log_prob, entropy, log_probs_at=at)


def trl_chunked(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> TokenScores:
    """Call `ChunkedLogProbFunction`, masked as in its trainers, on the CPU in torch operations; a chunk is of classes;
    float64 is computed in float32.
    """
    peer: Any = importlib.import_module("trl.kernels")
    outputs = ("entropy",) if options.entropy else ()
    how = options.temperature, options.chunk or TRL_CHUNK, options.softcap, 1.0, outputs
    log_prob, entropy = peer.ChunkedLogProbFunction.apply(hidden, weight, bias, target.clamp(min=0), *how)[:2]
    if entropy is not None:
        entropy = zero_ignored(entropy, target, options)
    return TokenScores(zero_ignored(log_prob, target, options), entropy)


def liger_scores(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> TokenScores:
    """Call `LigerFusedLinearScaledCrossEntropyFunction`, on the CPU in torch operations; float64 is
    computed in float32.
    """
    scores = import_liger("liger_kernel.ops").LigerFusedLinearScaledCrossEntropyFunction
    given = hidden, weight, target, options.temperature, options.ignore_index, 1
    if options.entropy:
        loss, entropy = scores.apply(*given, True)[:2]
        return TokenScores(-loss, entropy)
    return TokenScores(-scores.apply(*given))


def liger_selective(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options
) -> TokenScores:
    """Call `fused_selective_log_softmax` of all logits, which has no gradient, without a GPU in Triton's interpreter;
    float64 is computed in float32.
    """
    scores = import_liger("liger_kernel.ops.grpo_loss").fused_selective_log_softmax
    # (1, N + 1, V): the function leaves the last position out
    logits = F.pad(plain_logits(hidden, weight, bias, options.softcap).detach(), (0, 0, 0, 1))[None]
    mask = (target != options.ignore_index)[None]
    return TokenScores(scores(logits, target[None], options.temperature, mask)[0])


def cut_scores(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> TokenScores:
    """Call it with reduction="none" and the same impl; float64 is computed in float32."""
    peer: Any = importlib.import_module("cut_cross_entropy")
    how = usual(options) | {"reduction": "none", "impl": CUT_BY}
    return TokenScores(-peer.linear_cross_entropy(hidden, weight, target, **how))


def verl(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> TokenScores:
    """Call `logprobs_from_logits` and `entropy_from_logits` of all logits."""
    peer: Any = importlib.import_module("verl.utils.torch_functional")
    logits = logits_of(hidden, weight, bias, options)
    entropy = peer.entropy_from_logits(logits) if options.entropy else None
    return TokenScores(peer.logprobs_from_logits(logits, target), entropy)


def verl_fused(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> TokenScores:
    """Call `FusedLinearForPPO`; it always computes the entropy; float64 is computed in float32; the Triton kernel
    of `verl.utils.kernel` needs a GPU, in the interpreter too.
    """
    peer: Any = importlib.import_module("verl.utils.experimental.torch_functional")
    how = {} if options.temperature == 1 else {"temperature": options.temperature}
    return TokenScores(*peer.FusedLinearForPPO(chunk_size=options.chunk or 512)(hidden, weight, target, **how))


@cache
def group_of_one() -> Any:
    """Return a group of this process alone."""
    return dist.ProcessGroupGloo(dist.HashStore(), 0, 1)  # type: ignore[attr-defined, call-arg]


def nemo(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> TokenScores:
    """Call `ChunkedDistributedLogprob` and `ChunkedDistributedEntropy` of all logits, in float32."""
    peer: Any = importlib.import_module("nemo_rl.distributed.model_utils")
    logits, chunk = logits_of(hidden, weight, bias, options)[None], options.chunk or NEMO_CHUNK
    given = logits, target[None], 0, logits.size(-1), chunk, group_of_one()
    log_prob = zero_ignored(peer.ChunkedDistributedLogprob.apply(*given)[0], target, options)
    if not options.entropy:
        return TokenScores(log_prob)
    # The function returns sum(p log p)
    entropy = -peer.ChunkedDistributedEntropy.apply(logits, chunk, group_of_one())[0]
    return TokenScores(log_prob, zero_ignored(entropy, target, options))


def nemo_fused(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> TokenScores:
    """Call `ChunkedDistributedHiddenStatesToLogprobs`; float64 is computed in float32."""
    peer: Any = importlib.import_module("nemo_rl.distributed.model_utils")
    # Of shapes (N, 1, D), time first, and (1, N)
    given = hidden[:, None], target[None], weight, 0, len(weight), options.chunk or NEMO_CHUNK, group_of_one()
    log_prob = peer.ChunkedDistributedHiddenStatesToLogprobs.apply(*given)[0]
    return TokenScores(zero_ignored(log_prob, target, options))


# Triton's interpreter gives Liger's kernel a Python float, of which the kernel asks what only a Triton value has
LIGER = LOW | {"bias", "smoothing", "sum", "mean"} | (frozenset() if CPU else {"softcap"})
CUT = LOW | {"softcap", "sum", "mean", "CPU memory"}
TUNE = LOW | {"bias", "mean", "CPU memory"}
CHUNKED = EVERYTHING - {"softcap"}
WITH_ENTROPY = {"gradients", "entropy", "entropy gradient", "temperature"}
MASKED = {"ignored"}
BIASED = {"bias", "softcap"}
MEASURED = {"CPU memory"}
TRL = DTYPES | WITH_ENTROPY | BIASED | MASKED | MEASURED | {"given classes"}
OF_LOGITS = LOW | WITH_ENTROPY | BIASED | MASKED | MEASURED | {"chunks"}
SELECTIVE = LOW | BIASED | MASKED | {"temperature"}
UNBIASED = LOW | MASKED | MEASURED | {"gradients"}
FUSED = LOW | WITH_ENTROPY | MEASURED
has = partial(partial, why_missing)
PEERS = (
    Adapter("torch", plain_loss, EVERYTHING - {"chunks"}),
    Adapter("torch-chunked", torch_chunked, CHUNKED, why_not=why_no_torch_chunked),
    Adapter("torch-chunked-accurate", torch_accurate, CHUNKED, why_not=why_no_torch_chunked),
    Adapter("liger", liger, LIGER, "liger-kernel", why_no_liger),
    Adapter("liger-float32", liger_float32, LIGER, "liger-kernel", why_no_liger),
    Adapter("cce", cut, CUT, "cut-cross-entropy", has("cut_cross_entropy")),
    Adapter("torchtune", torchtune, TUNE, "torchtune", has("torchtune.modules.loss")),
    Adapter("seqpar", seqpar, package="seqpar"),
    Adapter("seqpar-engine", engine, package="seqpar"),
)
SCORE_PEERS = (
    ScoreAdapter("torch", usual_scores, ALL_SCORES - {"chunks", "ties"}),
    ScoreAdapter("trl", trl, TRL, "trl", has("trl.trainer.utils")),
    ScoreAdapter("trl-chunked", trl_chunked, OF_LOGITS, "trl", has("trl.kernels")),
    ScoreAdapter("liger", liger_scores, FUSED | MASKED, "liger-kernel", why_no_liger),
    ScoreAdapter("liger-selective", liger_selective, SELECTIVE, "liger-kernel", why_no_liger),
    ScoreAdapter("cce", cut_scores, UNBIASED | {"softcap"}, "cut-cross-entropy", has("cut_cross_entropy")),
    ScoreAdapter("verl", verl, DTYPES | WITH_ENTROPY | BIASED | MEASURED, "verl", has("verl.utils.torch_functional")),
    ScoreAdapter("verl-fused", verl_fused, FUSED | {"chunks"}, "verl", has("verl.utils.experimental.torch_functional")),
    ScoreAdapter("nemo-rl", nemo, OF_LOGITS, "nemo-rl", why_no_nemo_rl),
    ScoreAdapter("nemo-rl-fused", nemo_fused, UNBIASED | {"chunks"}, "nemo-rl", why_no_nemo_rl),
    ScoreAdapter("seqpar", seqpar_scores, package="seqpar"),
    ScoreAdapter("seqpar-invariant", seqpar_invariant, package="seqpar"),
)
KNOWN: dict[str, Adapter] = {adapter.name: adapter for adapter in PEERS}
"""The known losses, by name."""
KNOWN_SCORES: dict[str, ScoreAdapter] = {adapter.name: adapter for adapter in SCORE_PEERS}
"""The known implementations of scores, by name."""
