"""Call the known losses and token scores as their projects document. None of them is imported before it runs."""

from __future__ import annotations

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
    Package,
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

cut_cross_entropy = Package("cut_cross_entropy")
liger_modules = Package("liger_kernel.transformers")
liger_scaled = Package("liger_kernel.ops")
liger_grpo = Package("liger_kernel.ops.grpo_loss")
nemo_utils = Package("nemo_rl.distributed.model_utils")
torchtune_loss = Package("torchtune.modules.loss")
trl_utils = Package("trl.trainer.utils")
trl_kernels = Package("trl.kernels")
verl_functions = Package("verl.utils.torch_functional")
verl_experimental = Package("verl.utils.experimental.torch_functional")
CPU = DEVICE == "cpu"
CUT_BY = "torch_compile" if CPU else "cce"
TRL_CHUNK = 32768
"""The number of classes in a chunk in TRL's own trainers."""
NEMO_CHUNK = 256
"""The number of tokens in a chunk in NeMo-RL's own examples."""


def usual(options: Options) -> dict[str, Any]:
    """Return the keywords that most losses share with `F.cross_entropy`, except those at their defaults."""
    given = {name: getattr(options, name) for name in ("ignore_index", "label_smoothing", "softcap")}
    changed = {name: value for name, value in given.items() if value != getattr(Options, name)}
    return {"reduction": options.reduction} | changed


def torch_chunked(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options, **policy: Any
) -> Any:
    """Call `F.linear_cross_entropy` with its default options; with smoothing it makes all logits, and warns."""
    if options.chunk:
        policy |= {"batch_chunk_size": options.chunk, "chunking_method": None}
    how = nn.LinearCrossEntropyOptions(**policy)
    return F.linear_cross_entropy(hidden, weight, target, linear_bias=bias, **usual(options), options=how)


def torch_accurate(*given: Any) -> Any:
    """Do the same with acc_policy="accurate", acc_dtype=torch.float32 for 16 bits, and allow_retain_graph=True."""
    policy: dict[str, Any] = {"acc_policy": "accurate", "allow_retain_graph": True}
    if given[-1].dtype in (torch.bfloat16, torch.float16):
        policy["acc_dtype"] = torch.float32
    return torch_chunked(*given, **policy)


def why_no_torch_chunked() -> str:
    """Return why torch has no chunked loss here; empty if it has one."""
    if hasattr(F, "linear_cross_entropy") and hasattr(nn, "LinearCrossEntropyOptions"):
        return ""
    return f"not in torch {torch.__version__}"


def liger(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options, **more: Any) -> Any:
    """Call the fused loss, without a GPU in Triton's interpreter (numbers, no memory), which has no float64."""
    choose_interpreter()
    return liger_modules.LigerFusedLinearCrossEntropyLoss(**usual(options), **more)(weight, hidden, target, bias)


def liger_float32(*given: Any) -> Any:
    """Do the same with accum_dtype=torch.float32."""
    return liger(*given, accum_dtype=torch.float32)


def choose_interpreter() -> None:
    """Let Triton's interpreter run Liger's kernels if there is no GPU."""
    if CPU:
        os.environ["TRITON_INTERPRET"] = "1"


def why_no_liger() -> str:
    """Return why Liger cannot run: its kernels need a GPU or the interpreter, chosen before Triton is imported."""
    late = "triton" in sys.modules and "liger_kernel" not in sys.modules
    if CPU and late and os.environ.get("TRITON_INTERPRET") != "1":
        return "needs a GPU, or a process that has not loaded Triton yet"

    def switched() -> str:
        choose_interpreter()
        return why_missing("liger_kernel.transformers")

    return quietly(switched)


def cut(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options, **more: Any) -> Any:
    """Call it with impl="cce", or "torch_compile" without a supported GPU; float64 is computed in float32."""
    return cut_cross_entropy.linear_cross_entropy(hidden, weight, target, **usual(options) | more, impl=CUT_BY)


def torchtune(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> Any:
    """Take 8 chunks, not compiled; it has only a mean; float64 is computed in float32."""
    logits = [F.linear(part, weight, bias) for part in hidden[None].chunk(8, 1)]
    return torchtune_loss.CEWithChunkedOutputLoss(8, options.ignore_index)(logits, target[None])


def masked(log_prob: Tensor, entropy: Tensor | None, target: Tensor, options: Options) -> TokenScores:
    """Return scores with 0 where the target is ignored."""
    zero = partial(zero_ignored, target=target, options=options)
    return TokenScores(zero(log_prob), None if entropy is None else zero(entropy))


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
    """A projection of a class for which the engine has no closed-form gradient."""

    softcap: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, as `nn.Linear` does, after the softcap if there is one."""
        logits = super().forward(x)
        if self.softcap is None:
            return logits
        return self.softcap * torch.tanh(logits / self.softcap)


def seqpar_scores(*given: Any, **more: Any) -> TokenScores:
    """Call `token_scores`."""
    *tensors, bias, options = given
    how = {
        name: getattr(options, name) for name in ("ignore_index", "temperature", "softcap", "entropy", "top_k", "ids")
    }
    return token_scores(*tensors, bias=bias, chunk_tokens=options.chunk, **how | more)


def seqpar_invariant(*given: Any) -> TokenScores:
    """Do the same with batch_invariant=True."""
    return seqpar_scores(*given, batch_invariant=True)


def trl(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> TokenScores:
    """Call `selective_log_softmax` and, with it, `entropy_from_logits`, of all logits."""
    logits = plain_logits(hidden, weight, bias, options.softcap)
    how: dict[str, Any] = {"row_mask": target != options.ignore_index}
    if options.temperature != 1:
        how["temperature"] = options.temperature
    given = logits, target.clamp(min=0)
    entropy = at = None
    if options.entropy:
        log_prob, entropy = trl_utils.selective_log_softmax_and_entropy(*given, **how)
    else:
        log_prob = trl_utils.selective_log_softmax(*given, **how)
    if options.ids is not None:
        at = trl_utils.selective_log_softmax(logits, options.ids, **how | {"row_mask": how["row_mask"][:, None]})
    return TokenScores(log_prob, entropy, log_probs_at=at)


def trl_chunked(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> TokenScores:
    """Call `ChunkedLogProbFunction`, masked as in its trainers, on the CPU in torch operations; a chunk is of classes;
    float64 is computed in float32.
    """
    outputs = ("entropy",) if options.entropy else ()
    how = options.temperature, options.chunk or TRL_CHUNK, options.softcap, 1.0, outputs
    log_prob, entropy = trl_kernels.ChunkedLogProbFunction.apply(hidden, weight, bias, target.clamp(min=0), *how)[:2]
    return masked(log_prob, entropy, target, options)


def liger_scores(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> TokenScores:
    """Call `LigerFusedLinearScaledCrossEntropyFunction`, on the CPU in torch operations; float64 is
    computed in float32.
    """
    choose_interpreter()
    given = hidden, weight, target, options.temperature, options.ignore_index, 1
    scores = partial(liger_scaled.LigerFusedLinearScaledCrossEntropyFunction.apply, *given)
    if options.entropy:
        loss, entropy = scores(True)[:2]
        return TokenScores(-loss, entropy)
    return TokenScores(-scores())


def liger_selective(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options
) -> TokenScores:
    """Call `fused_selective_log_softmax` of all logits, which has no gradient, without a GPU in Triton's interpreter;
    float64 is computed in float32.
    """
    choose_interpreter()
    # (1, N + 1, V): the function leaves the last position out
    logits = F.pad(plain_logits(hidden, weight, bias, options.softcap).detach(), (0, 0, 0, 1))[None]
    mask = (target != options.ignore_index)[None]
    return TokenScores(liger_grpo.fused_selective_log_softmax(logits, target[None], options.temperature, mask)[0])


def cut_scores(*given: Any) -> TokenScores:
    """Call it with reduction="none" and the same impl; float64 is computed in float32."""
    return TokenScores(-cut(*given, reduction="none"))


def verl(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> TokenScores:
    """Call `logprobs_from_logits` and `entropy_from_logits` of all logits."""
    logits = logits_of(hidden, weight, bias, options)
    entropy = verl_functions.entropy_from_logits(logits) if options.entropy else None
    return TokenScores(verl_functions.logprobs_from_logits(logits, target), entropy)


def verl_fused(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> TokenScores:
    """Call `FusedLinearForPPO`; it always computes the entropy; float64 is computed in float32; the Triton kernel
    of `verl.utils.kernel` needs a GPU, in the interpreter too.
    """
    how = {} if options.temperature == 1 else {"temperature": options.temperature}
    scores = verl_experimental.FusedLinearForPPO(chunk_size=options.chunk or 512)
    return TokenScores(*scores(hidden, weight, target, **how))


@cache
def group_of_one() -> Any:
    """Return a group of only this process."""
    return dist.ProcessGroupGloo(dist.HashStore(), 0, 1)  # type: ignore[attr-defined, call-arg]


def nemo(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> TokenScores:
    """Call `ChunkedDistributedLogprob` and `ChunkedDistributedEntropy` of all logits, in float32."""
    logits, chunk = logits_of(hidden, weight, bias, options)[None], options.chunk or NEMO_CHUNK
    given = logits, target[None], 0, logits.size(-1), chunk, group_of_one()
    log_prob, entropy = nemo_utils.ChunkedDistributedLogprob.apply(*given)[0], None
    if options.entropy:
        # The function returns sum(p log p)
        entropy = -nemo_utils.ChunkedDistributedEntropy.apply(logits, chunk, group_of_one())[0]
    return masked(log_prob, entropy, target, options)


def nemo_fused(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> TokenScores:
    """Call `ChunkedDistributedHiddenStatesToLogprobs`; float64 is computed in float32."""
    # With shapes (N, 1, D), time first, and (1, N)
    given = hidden[:, None], target[None], weight, 0, len(weight), options.chunk or NEMO_CHUNK, group_of_one()
    log_prob = nemo_utils.ChunkedDistributedHiddenStatesToLogprobs.apply(*given)[0]
    return masked(log_prob, None, target, options)


# For the softcap, Triton's interpreter gives Liger's kernel a Python float where it needs a Triton value
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
