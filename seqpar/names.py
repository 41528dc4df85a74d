"""The public names. `import seqpar` has them all; they are loaded with the first one that is asked for."""

from seqpar.accumulate import accumulate_gradients, sum_over_ranks
from seqpar.chunked_gradient import chunked_gradient
from seqpar.collectives import check_agreement, copy_to_group, group_sum
from seqpar.criteria import CrossEntropy, LabelSmoothing
from seqpar.data_parallel import DataParallel, data_parallel
from seqpar.distillation import linear_distillation
from seqpar.linear_cross_entropy import linear_cross_entropy
from seqpar.loss_compute import LossCompute
from seqpar.model_with_loss import ModelWithLoss
from seqpar.multi_gpu import MultiGPULossCompute
from seqpar.placement import place
from seqpar.replicas import gather, parallel_apply, replicate, scatter
from seqpar.sampled import sampled_cross_entropy
from seqpar.sequence import join_time, next_token_targets, split_time, time_steps
from seqpar.token_loss import TokenLoss
from seqpar.token_scores import token_scores
from seqpar.vocab_parallel import VocabShard

__all__ = [
    "CrossEntropy",
    "DataParallel",
    "LabelSmoothing",
    "LossCompute",
    "ModelWithLoss",
    "MultiGPULossCompute",
    "TokenLoss",
    "VocabShard",
    "accumulate_gradients",
    "check_agreement",
    "chunked_gradient",
    "copy_to_group",
    "data_parallel",
    "gather",
    "group_sum",
    "join_time",
    "linear_cross_entropy",
    "linear_distillation",
    "next_token_targets",
    "parallel_apply",
    "place",
    "replicate",
    "sampled_cross_entropy",
    "scatter",
    "split_time",
    "sum_over_ranks",
    "time_steps",
    "token_scores",
]
