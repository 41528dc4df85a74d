"""The loss of a sequence model, over any number of devices, in chunks, with the gradient of the single-device model."""

from seqpar.chunked_gradient import chunked_gradient
from seqpar.criteria import CrossEntropy, LabelSmoothing
from seqpar.data_parallel import DataParallel, data_parallel
from seqpar.loss_compute import LossCompute, MultiGPULossCompute
from seqpar.placement import place
from seqpar.replicas import gather, parallel_apply, replicate, scatter
from seqpar.token_loss import TokenLoss

__version__ = "0.1.0"

__all__ = [
    "CrossEntropy",
    "DataParallel",
    "LabelSmoothing",
    "LossCompute",
    "MultiGPULossCompute",
    "TokenLoss",
    "chunked_gradient",
    "data_parallel",
    "gather",
    "parallel_apply",
    "place",
    "replicate",
    "scatter",
]
