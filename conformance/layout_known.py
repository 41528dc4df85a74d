"""The known implementations of a training step over several ranks, by name."""

from __future__ import annotations

import os
from functools import partial

from conformance.adapter import why_missing, why_no_nemo_rl
from conformance.layout_adapter import EVERY_LAYOUT, ROWS, LayoutAdapter
from conformance.layout_adapters import loss_parallel_step, seqpar_step, torch_step
from conformance.layout_peers import (
    Liger,
    Megatron,
    NemoRl,
    NemoRlFused,
    of_vocabulary,
    titan_step,
    trl_step,
    verl_step,
)

VOCABULARY = frozenset(name for name, row in ROWS.items() if row.inner in ("classes", "time and classes"))
REPLICATED = frozenset(name for name, row in ROWS.items() if row.wrap and not (row.inner or row.is_alone))
IN_FLOAT32 = "computed in float32"


def why_no_liger() -> str:
    """Return why Liger's kernels cannot run in the ranks, which are on the CPU; empty if they can."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "needs Triton's interpreter on the CPU: TRITON_INTERPRET=1 in the environment"
    return why_missing("liger_kernel.transformers")


KNOWN_LAYOUTS = {
    adapter.name: adapter
    for adapter in (
        LayoutAdapter(
            "torch",
            torch_step,
            EVERY_LAYOUT - VOCABULARY - {"DTensor model"},
            "`F.cross_entropy`, summed and divided once, under DDP, FSDP2 and GPipe or ZBV",
        ),
        LayoutAdapter(
            "torch-loss-parallel",
            loss_parallel_step,
            VOCABULARY | {"float64", "uneven vocabulary"},
            "`F.cross_entropy` of DTensor logits under `loss_parallel`",
        ),
        LayoutAdapter(
            "megatron",
            partial(of_vocabulary, Megatron),
            VOCABULARY | {"smoothing"},
            f"`vocab_parallel_cross_entropy`, {IN_FLOAT32}; vocabularies divisible by the number of ranks",
            "megatron-core",
            lambda: why_missing("megatron.core.tensor_parallel"),
        ),
        LayoutAdapter(
            "liger",
            partial(of_vocabulary, Liger),
            VOCABULARY | {"smoothing", "uneven vocabulary"},
            f"`LigerVocabParallelCrossEntropy`, {IN_FLOAT32}",
            "liger-kernel",
            why_no_liger,
        ),
        LayoutAdapter(
            "torchtitan",
            titan_step,
            VOCABULARY | {"FSDP2", "uneven vocabulary"},
            f"`ChunkedLossWrapper` under FSDP2 and `cross_entropy_loss` of DTensor logits, {IN_FLOAT32}",
            "torchtitan",
            lambda: why_missing("torchtitan.components.loss"),
        ),
        LayoutAdapter(
            "trl",
            trl_step,
            REPLICATED,
            f"log-probabilities of `add_fused_lm_head`, {IN_FLOAT32}",
            "trl",
            lambda: why_missing("trl.trainer.utils"),
        ),
        LayoutAdapter(
            "trl-head-unit",
            partial(trl_step, is_head_a_unit=True),
            frozenset({"FSDP2"}),
            "the same with the head as an FSDP2 unit of its own",
            "trl",
            lambda: why_missing("trl.trainer.utils"),
        ),
        LayoutAdapter(
            "verl",
            verl_step,
            VOCABULARY | REPLICATED,
            "`agg_loss` of `logprobs_from_logits`; with a split vocabulary `vocab_parallel_log_probs_from_logits`, "
            f"{IN_FLOAT32}, of vocabularies divisible by the number of ranks",
            "verl",
            lambda: why_missing("verl.trainer.ppo.core_algos") or why_missing("verl.utils.megatron.tensor_parallel"),
        ),
        LayoutAdapter(
            "nemo-rl",
            partial(of_vocabulary, NemoRl),
            VOCABULARY | {"uneven vocabulary"},
            f"`from_parallel_logits_to_logprobs`, {IN_FLOAT32}; a split sequence needs a GPU, in `AllGatherCPTensor`",
            "nemo-rl",
            why_no_nemo_rl,
        ),
        LayoutAdapter(
            "nemo-rl-fused",
            partial(of_vocabulary, NemoRlFused),
            VOCABULARY | {"uneven vocabulary"},
            f"`from_parallel_hidden_states_to_logprobs`, {IN_FLOAT32}; it refuses a split sequence",
            "nemo-rl",
            why_no_nemo_rl,
        ),
        LayoutAdapter("seqpar", seqpar_step, EVERY_LAYOUT, "`accumulate_gradients` and `ModelWithLoss`", "seqpar"),
    )
}
