"""Call the known implementations of token scores as their projects document it. None is imported before it runs."""

from __future__ import annotations

import importlib
from functools import cache, partial
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from conformance.adapter import ALL_SCORES, DTYPES, LOW, Options, ScoreAdapter, why_missing, why_no_nemo_rl
from conformance.loss_peers import CPU, CUT_BY, CUT_NOTE, IN_FLOAT32, import_liger, usual, why_no_cut, why_no_liger
from conformance.plain import logits_of, usual_scores, zero_ignored
from seqpar.linear.token_scores import TokenScores, token_scores
from seqpar.testing.plain_reference import plain_logits

TRL_CHUNK = 32768
"""The classes in a chunk where TRL's own trainers call it."""
NEMO_CHUNK = 256
"""The tokens in a chunk where NeMo-RL's own examples set them."""


def seqpar(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options, **more: Any
) -> TokenScores:
    for name in ("ignore_index", "temperature", "softcap", "entropy", "top_k", "ids"):
        more[name] = getattr(options, name)
    return token_scores(hidden, weight, target, bias=bias, chunk_tokens=options.chunk, **more)


def trl(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> TokenScores:
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
    peer: Any = importlib.import_module("trl.kernels")
    outputs = ("entropy",) if options.entropy else ()
    how = options.temperature, options.chunk or TRL_CHUNK, options.softcap, 1.0, outputs
    log_prob, entropy = peer.ChunkedLogProbFunction.apply(hidden, weight, bias, target.clamp(min=0), *how)[:2]
    if entropy is not None:
        entropy = zero_ignored(entropy, target, options)
    return TokenScores(zero_ignored(log_prob, target, options), entropy)


def liger(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> TokenScores:
    scores = import_liger("liger_kernel.ops").LigerFusedLinearScaledCrossEntropyFunction
    given = hidden, weight, target, options.temperature, options.ignore_index, 1
    if options.entropy:
        loss, entropy = scores.apply(*given, True)[:2]
        return TokenScores(-loss, entropy)
    return TokenScores(-scores.apply(*given))


def liger_selective(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options
) -> TokenScores:
    scores = import_liger("liger_kernel.ops.grpo_loss").fused_selective_log_softmax
    # (1, N + 1, V): the function leaves the last position out
    logits = F.pad(plain_logits(hidden, weight, bias, options.softcap).detach(), (0, 0, 0, 1))[None]
    mask = (target != options.ignore_index)[None]
    return TokenScores(scores(logits, target[None], options.temperature, mask)[0])


def cut(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> TokenScores:
    peer: Any = importlib.import_module("cut_cross_entropy")
    how = usual(options) | {"reduction": "none", "impl": CUT_BY}
    return TokenScores(-peer.linear_cross_entropy(hidden, weight, target, **how))


def verl(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> TokenScores:
    peer: Any = importlib.import_module("verl.utils.torch_functional")
    logits = logits_of(hidden, weight, bias, options)
    entropy = peer.entropy_from_logits(logits) if options.entropy else None
    return TokenScores(peer.logprobs_from_logits(logits, target), entropy)


def verl_fused(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> TokenScores:
    peer: Any = importlib.import_module("verl.utils.experimental.torch_functional")
    how = {} if options.temperature == 1 else {"temperature": options.temperature}
    return TokenScores(*peer.FusedLinearForPPO(chunk_size=options.chunk or 512)(hidden, weight, target, **how))


@cache
def group_of_one() -> Any:
    """Return a group of this process alone."""
    return dist.ProcessGroupGloo(dist.HashStore(), 0, 1)  # type: ignore[attr-defined, call-arg]


def nemo(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> TokenScores:
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
    peer: Any = importlib.import_module("nemo_rl.distributed.model_utils")
    # Of shapes (N, 1, D), time first, and (1, N)
    given = hidden[:, None], target[None], weight, 0, len(weight), options.chunk or NEMO_CHUNK, group_of_one()
    log_prob = peer.ChunkedDistributedHiddenStatesToLogprobs.apply(*given)[0]
    return TokenScores(zero_ignored(log_prob, target, options))


BOTH = frozenset({"gradients", "entropy", "entropy gradient", "temperature"})
MEASURED = frozenset({"CPU memory"})
IGNORED = frozenset({"ignored"})
BIASED = frozenset({"bias", "softcap"})
ON_CPU = ", here in torch operations, which is its fallback without a supported GPU" if CPU else ""
IN_INTERPRETER = ", in Triton's interpreter" if CPU else ""
VERL_FUSED = (
    f"`FusedLinearForPPO`; it always computes the entropy; {IN_FLOAT32}; the Triton kernel of `verl.utils.kernel` "
    "needs a GPU, in the interpreter too"
)
PEERS = (
    ScoreAdapter(
        "torch",
        usual_scores,
        ALL_SCORES - {"chunks", "ties"},
        "log_softmax of all logits, gather, and -sum(p log p)",
    ),
    ScoreAdapter(
        "trl",
        trl,
        DTYPES | BOTH | BIASED | IGNORED | MEASURED | {"given classes"},
        "`selective_log_softmax` and, with it, `entropy_from_logits`, of all logits",
        "trl",
        partial(why_missing, "trl.trainer.utils"),
    ),
    ScoreAdapter(
        "trl-chunked",
        trl_chunked,
        LOW | BOTH | BIASED | IGNORED | MEASURED | {"chunks"},
        f"`ChunkedLogProbFunction`, masked as in its trainers; a chunk is of classes{ON_CPU}; {IN_FLOAT32}",
        "trl",
        partial(why_missing, "trl.kernels"),
    ),
    ScoreAdapter(
        "liger",
        liger,
        LOW | BOTH | IGNORED | MEASURED,
        f"`LigerFusedLinearScaledCrossEntropyFunction`{ON_CPU}; {IN_FLOAT32}",
        "liger-kernel",
        why_no_liger,
    ),
    ScoreAdapter(
        "liger-selective",
        liger_selective,
        LOW | BIASED | IGNORED | {"temperature"},
        f"`fused_selective_log_softmax` of all logits, which has no gradient{IN_INTERPRETER}; {IN_FLOAT32}",
        "liger-kernel",
        why_no_liger,
    ),
    ScoreAdapter(
        "cce",
        cut,
        LOW | IGNORED | MEASURED | {"gradients", "softcap"},
        f"reduction='none', {CUT_NOTE}; {IN_FLOAT32}",
        "cut-cross-entropy",
        why_no_cut,
    ),
    ScoreAdapter(
        "verl",
        verl,
        DTYPES | BOTH | BIASED | MEASURED,
        "`logprobs_from_logits` and `entropy_from_logits` of all logits",
        "verl",
        partial(why_missing, "verl.utils.torch_functional"),
    ),
    ScoreAdapter(
        "verl-fused",
        verl_fused,
        LOW | BOTH | MEASURED | {"chunks"},
        VERL_FUSED,
        "verl",
        partial(why_missing, "verl.utils.experimental.torch_functional"),
    ),
    ScoreAdapter(
        "nemo-rl",
        nemo,
        LOW | BOTH | BIASED | IGNORED | MEASURED | {"chunks"},
        f"`ChunkedDistributedLogprob` and `ChunkedDistributedEntropy` of all logits; {IN_FLOAT32}",
        "nemo-rl",
        why_no_nemo_rl,
    ),
    ScoreAdapter(
        "nemo-rl-fused",
        nemo_fused,
        LOW | IGNORED | MEASURED | {"chunks", "gradients"},
        f"`ChunkedDistributedHiddenStatesToLogprobs`; {IN_FLOAT32}",
        "nemo-rl",
        why_no_nemo_rl,
    ),
    ScoreAdapter("seqpar", seqpar, note="`token_scores`", package="seqpar"),
    ScoreAdapter(
        "seqpar-invariant",
        partial(seqpar, batch_invariant=True),
        note="the same with batch_invariant=True",
        package="seqpar",
    ),
)
KNOWN_SCORES: dict[str, ScoreAdapter] = {adapter.name: adapter for adapter in PEERS}
"""The known implementations of scores, by name."""
