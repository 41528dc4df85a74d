"""Collect the public names of the package, which `seqpar.__getattr__` loads when the first one is used."""

from seqpar.core.function_of_chunks import chunked_gradient
from seqpar.core.token_loss import TokenLoss
from seqpar.distributed.accumulate import accumulate_gradients, sum_over_ranks
from seqpar.distributed.collectives import THIS_PROCESS, check_agreement, copy_to_group, group_sum
from seqpar.distributed.model_with_loss import ModelWithLoss
from seqpar.distributed.sequence import join_time, next_token_targets, split_time, time_steps
from seqpar.distributed.vocab_parallel import VocabShard
from seqpar.engine.loss_compute import LossCompute
from seqpar.engine.multi_gpu import MultiGPULossCompute
from seqpar.linear.cross_entropy import linear_cross_entropy
from seqpar.linear.distillation import linear_distillation
from seqpar.linear.scored_loss import scored_loss
from seqpar.linear.teachers import SparseTarget, TeacherHidden, TeacherLogProbs, TeacherTopK
from seqpar.linear.token_scores import TokenScores, token_scores
from seqpar.multi_device.data_parallel import DataParallel, data_parallel
from seqpar.multi_device.parallel_apply import parallel_apply
from seqpar.multi_device.placement import place
from seqpar.multi_device.replicas import gather, replicate, scatter
from seqpar.rows.criteria import CrossEntropy, LabelSmoothing

__all__ = [
    "THIS_PROCESS",
    "CrossEntropy",
    "DataParallel",
    "LabelSmoothing",
    "LossCompute",
    "ModelWithLoss",
    "MultiGPULossCompute",
    "SparseTarget",
    "TeacherHidden",
    "TeacherLogProbs",
    "TeacherTopK",
    "TokenLoss",
    "TokenScores",
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
    "scatter",
    "scored_loss",
    "split_time",
    "sum_over_ranks",
    "time_steps",
    "token_scores",
]
