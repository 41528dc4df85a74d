"""The known implementations of a training step over several ranks, by name."""

from __future__ import annotations

import os
from functools import partial

from seqpar.testing.conformance.adapter import why_missing
from seqpar.testing.conformance.layout_adapter import EVERY_LAYOUT, LayoutAdapter
from seqpar.testing.conformance.layout_adapters import loss_parallel_step, seqpar_step, torch_step
from seqpar.testing.conformance.layout_peers import Liger, Megatron, of_vocabulary, titan_step, trl_step

VOCABULARY = frozenset({"split vocabulary", "data x vocabulary"})
REPLICATED = frozenset({"data parallel", "FSDP2", "split sequence", "accumulation"})
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
            EVERY_LAYOUT - VOCABULARY,
            "`F.cross_entropy`, summed and divided once, under DDP, FSDP2 and GPipe",
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
            f"`vocab_parallel_cross_entropy`, {IN_FLOAT32}; vocabularies that the ranks divide",
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
        LayoutAdapter("seqpar", seqpar_step, EVERY_LAYOUT, "`accumulate_gradients` and `ModelWithLoss`", "seqpar"),
    )
}
