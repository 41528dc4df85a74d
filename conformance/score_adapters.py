"""Call the known implementations of token scores as their projects document it. None is imported before it runs."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from conformance.adapter import LOW, why_no_nemo_rl, written
from conformance.adapters import CPU, CUT_BY, CUT_NOTE, F_ONLY, IN_FLOAT32, SWITCH, capped, why_no_liger
from conformance.score_adapter import ALL_SCORES, ScoreAdapter, ScoreFeature, ScoreOptions

# Each of these returns a piece of the text of a call. Text is what the reproduction of a failure shows, and the checks
# evaluate that same text, so that a reproduction cannot differ from the run.


def _logits(options: ScoreOptions) -> str:
    """Return the logits before the temperature."""
    return capped("F.linear(hidden, weight, bias)", options.softcap)


def _divided(options: ScoreOptions) -> str:
    """Return the logits, divided by the temperature."""
    logits = _logits(options)
    if isinstance(options.temperature, Tensor):
        return f"({logits}) / temperature[:, None]"
    if options.temperature != 1.0:
        return f"({logits}) / {options.temperature}"
    return logits


def _temperature(options: ScoreOptions) -> str:
    """Return the temperature, as a keyword, where it is not 1."""
    if isinstance(options.temperature, Tensor):
        return ", temperature=temperature"
    if options.temperature != 1.0:
        return f", temperature={options.temperature}"
    return ""


def _counted(options: ScoreOptions) -> str:
    return f"target != {options.ignore_index}"


def _zero(score: str, options: ScoreOptions) -> str:
    """Return a score with 0 where the target is ignored."""
    return f"{score}.masked_fill(target == {options.ignore_index}, 0)"


def _rows(options: ScoreOptions) -> str:
    """Return the log-probabilities of the given classes."""
    return f"log_p.gather(1, ids).masked_fill((target == {options.ignore_index})[:, None], 0)"


def plain(options: ScoreOptions, reference: bool = False) -> str:
    """Return the scores as they are usually written.

    The reference also has 0 log 0 = 0, for classes that a bias of -inf excludes, and the lower class first among ties.
    """
    every = f"(log_p := torch.log_softmax({_divided(options)}, -1))"
    log_p = "log_p"
    top = f"log_p.topk({options.top_k})"
    if reference:
        # exp(-1e4) is 0 in every dtype
        log_p = "log_p.clamp(min=-1e4)"
        top = "log_p.sort(dim=-1, descending=True, stable=True)"
    scores = [_zero(f"{every}.gather(1, target.clamp(min=0)[:, None])[:, 0]", options)]
    if options.entropy:
        scores.append("entropy=" + _zero(f"(-(log_p.exp() * {log_p}).sum(-1))", options))
    if options.top_k:
        size = f"[:, :{options.top_k}]"
        scores.append(f"top_log_probs=(top := {top}).values{size}, top_ids=top.indices{size}")
    if options.ids is not None:
        scores.append(f"log_probs_at={_rows(options)}")
    return f"TokenScores({', '.join(scores)})"


def _seqpar(options: ScoreOptions, more: str = "") -> str:
    if options.ignore_index != -100:
        more += f", ignore_index={options.ignore_index}"
    more += _temperature(options)
    if options.softcap is not None:
        more += f", softcap={options.softcap}"
    if options.entropy:
        more += ", entropy=True"
    if options.top_k:
        more += f", top_k={options.top_k}"
    if options.ids is not None:
        more += ", ids=ids"
    if options.chunk_size:
        more += f", chunk_tokens={options.chunk_size}"
    return f"seqpar.token_scores(hidden, weight, target, bias=bias{more})"


def _invariant(options: ScoreOptions) -> str:
    return _seqpar(options, ", batch_invariant=True")


def _trl(options: ScoreOptions) -> str:
    given = f"(z := {_logits(options)}), target.clamp(min=0)"
    mask = f"row_mask={_counted(options)}"
    scores = f"selective_log_softmax({given}{_temperature(options)}, {mask})"
    if options.entropy:
        scores = f"*selective_log_softmax_and_entropy({given}{_temperature(options)}, {mask})"
    if options.ids is not None:
        at = f"selective_log_softmax(z, ids{_temperature(options)}, row_mask=({_counted(options)})[:, None])"
        scores += f", log_probs_at={at}"
    return f"TokenScores({scores})"


def _trl_chunked(options: ScoreOptions) -> str:
    outputs = "()"
    if options.entropy:
        outputs = "('entropy',)"
    how = f"{options.temperature}, {options.chunk_size or TRL_CHUNK}, {options.softcap}, 1.0, {outputs}"
    found = f"ChunkedLogProbFunction.apply(hidden, weight, bias, target.clamp(min=0), {how})[:2]"
    return f"TokenScores(*({_zero('s', options)} if s is not None else None for s in {found}))"


def _liger(options: ScoreOptions) -> str:
    function = "LigerFusedLinearScaledCrossEntropyFunction"
    found = f"{function}.apply(hidden, weight, target, {options.temperature}, {options.ignore_index}, 1"
    if options.entropy:
        return f"TokenScores(-(found := {found}, True))[0], found[1])"
    return f"TokenScores(-{found}))"


def _liger_selective(options: ScoreOptions) -> str:
    # (1, N + 1, V): the function leaves the last position out
    logits = f"F.pad({_logits(options)}.detach(), (0, 0, 0, 1))[None]"
    mask = f"({_counted(options)})[None]"
    return f"TokenScores(fused_selective_log_softmax({logits}, target[None], {options.temperature}, {mask})[0])"


def _cut(options: ScoreOptions) -> str:
    softcap = ""
    if options.softcap is not None:
        softcap = f", softcap={options.softcap}"
    how = f"ignore_index={options.ignore_index}, reduction='none', impl={CUT_BY!r}{softcap}"
    return f"TokenScores(-linear_cross_entropy(hidden, weight, target, {how}))"


def _verl(options: ScoreOptions) -> str:
    scores = f"logprobs_from_logits(z := {_divided(options)}, target)"
    if options.entropy:
        scores += ", entropy_from_logits(z)"
    return f"TokenScores({scores})"


def _verl_fused(options: ScoreOptions) -> str:
    chunk = f"chunk_size={options.chunk_size or 512}"
    return f"TokenScores(*FusedLinearForPPO({chunk})(hidden, weight, target{_temperature(options)}))"


def _nemo(options: ScoreOptions) -> str:
    chunk = options.chunk_size or NEMO_CHUNK
    given = f"(z := ({_divided(options)})[None]), target[None], 0, z.size(-1), {chunk}, group"
    scores = [_zero(f"ChunkedDistributedLogprob.apply({given})[0]", options)]
    if options.entropy:
        # The function returns sum(p log p)
        scores.append(_zero(f"(-ChunkedDistributedEntropy.apply(z, {chunk}, group)[0])", options))
    return f"TokenScores({', '.join(scores)})"


def _nemo_fused(options: ScoreOptions) -> str:
    # Of shapes (N, 1, D), time first, and (1, N)
    given = f"hidden[:, None], target[None], weight, 0, len(weight), {options.chunk_size or NEMO_CHUNK}, group"
    log_probs = f"ChunkedDistributedHiddenStatesToLogprobs.apply({given})[0]"
    return f"TokenScores({_zero(log_probs, options)})"


TRL_CHUNK = 32768
"""The classes in a chunk where TRL's own trainers call it."""
NEMO_CHUNK = 256
"""The tokens in a chunk where NeMo-RL's own examples set them."""
OURS = "from seqpar import TokenScores"
TORCH = f"{F_ONLY}; {OURS}"
VERL = "verl.utils.torch_functional"
VERL_FUSED = "verl.utils.experimental.torch_functional"
NEMO_RL = "nemo_rl.distributed.model_utils"
GROUP = "group = torch.distributed.ProcessGroupGloo(torch.distributed.HashStore(), 0, 1)"
"""A group of this process alone."""
BOTH: frozenset[ScoreFeature] = frozenset({"gradients", "entropy", "entropy gradient", "temperature"})
MEASURED: frozenset[ScoreFeature] = frozenset({"CPU memory"})
IGNORED: frozenset[ScoreFeature] = frozenset({"ignored"})
BIASED: frozenset[ScoreFeature] = frozenset({"bias", "softcap"})
WIDE: frozenset[ScoreFeature] = frozenset({"float64", *LOW})  # type: ignore[arg-type]
NARROW: frozenset[ScoreFeature] = WIDE - {"float64"}
ON_CPU = ""
IN_INTERPRETER = ""
if CPU:
    ON_CPU = ", here in torch operations, which is its fallback without a supported GPU"
    IN_INTERPRETER = ", in Triton's interpreter"

written_scores = partial(written, ScoreAdapter)

KNOWN_SCORES: dict[str, ScoreAdapter] = {
    adapter.name: adapter
    for adapter in (
        written_scores(
            "torch",
            TORCH,
            plain,
            offers=ALL_SCORES - {"chunks", "ties"},
            note="log_softmax of all logits, gather, and -sum(p log p)",
        ),
        written_scores(
            "trl",
            f"{TORCH}; from trl.trainer.utils import selective_log_softmax, selective_log_softmax_and_entropy",
            _trl,
            "trl.trainer.utils",
            offers=WIDE | BOTH | BIASED | IGNORED | MEASURED | {"given classes"},
            note="`selective_log_softmax` and, with it, `entropy_from_logits`, of all logits",
            package="trl",
        ),
        written_scores(
            "trl-chunked",
            f"import torch; {OURS}; from trl.kernels import ChunkedLogProbFunction",
            _trl_chunked,
            "trl.kernels",
            offers=NARROW | BOTH | BIASED | IGNORED | MEASURED | {"chunks"},
            note=f"`ChunkedLogProbFunction`, masked as in its trainers; a chunk is of classes{ON_CPU}; {IN_FLOAT32}",
            package="trl",
        ),
        written_scores(
            "liger",
            f"import torch; {OURS}; from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction",
            _liger,
            switch=SWITCH,
            offers=NARROW | BOTH | IGNORED | MEASURED,
            note=f"`LigerFusedLinearScaledCrossEntropyFunction`{ON_CPU}; {IN_FLOAT32}",
            package="liger-kernel",
            why_not=why_no_liger,
        ),
        written_scores(
            "liger-selective",
            f"{TORCH}; from liger_kernel.ops.grpo_loss import fused_selective_log_softmax",
            _liger_selective,
            switch=SWITCH,
            offers=NARROW | BIASED | IGNORED | {"temperature"},
            note=f"`fused_selective_log_softmax` of all logits, which has no gradient{IN_INTERPRETER}; {IN_FLOAT32}",
            package="liger-kernel",
            why_not=why_no_liger,
        ),
        written_scores(
            "cce",
            f"import torch; {OURS}; from cut_cross_entropy import linear_cross_entropy",
            _cut,
            "cut_cross_entropy",
            offers=NARROW | IGNORED | MEASURED | {"gradients", "softcap"},
            note=f"reduction='none', {CUT_NOTE}; {IN_FLOAT32}",
            package="cut-cross-entropy",
        ),
        written_scores(
            "verl",
            f"{TORCH}; from {VERL} import entropy_from_logits, logprobs_from_logits",
            _verl,
            VERL,
            offers=WIDE | BOTH | BIASED | MEASURED,
            note="`logprobs_from_logits` and `entropy_from_logits` of all logits",
            package="verl",
        ),
        written_scores(
            "verl-fused",
            f"import torch; {OURS}; from {VERL_FUSED} import FusedLinearForPPO",
            _verl_fused,
            VERL_FUSED,
            offers=NARROW | BOTH | MEASURED | {"chunks"},
            note=f"`FusedLinearForPPO`; it always computes the entropy; {IN_FLOAT32}; "
            "the Triton kernel of `verl.utils.kernel` needs a GPU, in the interpreter too",
            package="verl",
        ),
        written_scores(
            "nemo-rl",
            f"{TORCH}; from {NEMO_RL} import ChunkedDistributedEntropy, ChunkedDistributedLogprob; {GROUP}",
            _nemo,
            offers=NARROW | BOTH | BIASED | IGNORED | MEASURED | {"chunks"},
            note=f"`ChunkedDistributedLogprob` and `ChunkedDistributedEntropy` of all logits; {IN_FLOAT32}",
            package="nemo-rl",
            why_not=why_no_nemo_rl,
        ),
        written_scores(
            "nemo-rl-fused",
            f"import torch; {OURS}; from {NEMO_RL} import ChunkedDistributedHiddenStatesToLogprobs; {GROUP}",
            _nemo_fused,
            offers=NARROW | IGNORED | MEASURED | {"chunks", "gradients"},
            note=f"`ChunkedDistributedHiddenStatesToLogprobs`; {IN_FLOAT32}",
            package="nemo-rl",
            why_not=why_no_nemo_rl,
        ),
        written_scores("seqpar", "import torch, seqpar", _seqpar, note="`token_scores`", package="seqpar"),
        written_scores(
            "seqpar-invariant",
            "import torch, seqpar",
            _invariant,
            note="the same with batch_invariant=True",
            package="seqpar",
        ),
    )
}
