"""Stand in for the function by which TRL's fused head computes log-probabilities, and check that TRL's are as expected.

Shape suffixes: N rows that have a label, K rows of one chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import trl
from torch import Tensor
from transformers import PreTrainedModel
from trl.trainer import utils as trl_utils

from seqpar.core.checks import is_dtensor
from seqpar.core.chunks import rows_per_chunk
from seqpar.core.token_loss import wide
from seqpar.integrations.peft_adapters import adapter_of
from seqpar.integrations.transformers_head import is_split_by_plan, with_adapter
from seqpar.integrations.transformers_model import Reading
from seqpar.integrations.trl_head import inside_head
from seqpar.linear.token_scores import token_scores

Compared = tuple[str, Tensor, Tensor]

NODE = "_ChunkedLogProbFunction"
COMPACT = "_use_triton"
"""The two names in `trl.trainer.utils` that a forward with `fused_lm_head=True` uses: the function that computes its
log-probabilities, and whether to pass it only the rows that have a label."""

NODE_ARGUMENTS = [
    "hidden",
    "weight",
    "bias",
    "targets",
    "temperature",
    "chunk_size",
    "final_logit_softcapping",
    "logit_scale",
    "outputs",
]


FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
"""What that function returns, in order."""


def check_function(
    what: str, module: ModuleType, name: str, arguments: list[str], compared: Callable[[Any], Iterator[Compared]]
) -> None:
    """Raise RuntimeError unless a function of TRL's has these arguments and returns what ours does.

    Args:
        what: what it computes, for the error.
        compared: yields, for each part that it returns, the name, TRL's numbers and ours.
    """
    own: Any = getattr(module, name, None)
    if own is None:
        raise another_version(what, f"{module.__name__} has no {name}")
    # An autograd function takes them in its forward, after the context
    taken = list(inspect.signature(getattr(own, "forward", own)).parameters)[hasattr(own, "forward") :]
    if taken != arguments:
        raise another_version(what, f"{name} takes {', '.join(taken)} where it took {', '.join(arguments)}")
    # On the CPU, wherever the model is
    with torch.no_grad(), torch.device("cpu"):
        for part, theirs, ours in compared(own):
            difference = float((theirs.double() - ours.double()).abs().max())
            # The numbers are float32, and about 1 in size
            if not difference < 1e-4:
                raise another_version(what, f"{name} returns {part} that differ by up to {difference:.2g} from ours")


def another_version(what: str, changed: str) -> RuntimeError:
    """Return the error for a version of TRL that computes something differently from the supported one."""
    return RuntimeError(
        f"TRL {trl.__version__} computes {what} differently from 1.16, for which apply_seqpar_scores is written: "
        f"{changed}; install trl==1.16.0, or train without it"
    )


def check_version() -> None:
    """Raise RuntimeError unless the installed TRL computes its log-probabilities as this integration expects."""
    if not hasattr(trl_utils, COMPACT):
        raise another_version("its log-probabilities", f"trl.trainer.utils has no {COMPACT}")
    check_function("its log-probabilities", trl_utils, NODE, NODE_ARGUMENTS, _fields_of_three_logits)


def _fields_of_three_logits(node: Any) -> Iterator[Compared]:
    """Yield the name, TRL's numbers and ours for each field of TRL's log-probabilities."""
    hidden, weight = torch.linspace(-1, 1, 6).view(3, 2), torch.linspace(-2, 3, 10).view(5, 2)
    bias, target = torch.linspace(0, 1, 5), torch.tensor([0, 3, 4])
    theirs = node.apply(hidden, weight, bias, target, 0.7, 4, 2.0, 0.5, FIELDS)
    if len(theirs) != len(FIELDS):
        raise another_version(
            "its log-probabilities", f"{NODE} returns {len(theirs)} fields where it returned {len(FIELDS)}"
        )
    logits = 2 * torch.tanh(0.5 * (hidden @ weight.T + bias) / 2) / 0.7
    log_p = logits.log_softmax(-1)
    ours = (
        log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1),
        -(log_p * log_p.exp()).sum(-1),
        (2 * log_p).logsumexp(-1),
        logits.mean(-1),
        logits.argmax(-1) == target,
    )
    yield from zip(FIELDS, theirs, ours, strict=True)


class StandIn:
    """Stand in for TRL's `_ChunkedLogProbFunction` during one forward of one model."""

    def __init__(self, model: PreTrainedModel, reading: Reading, chunk_tokens: int | None) -> None:
        self.model = model
        self.reading = reading
        self.chunk_tokens = chunk_tokens
        self.calls = 0

    def apply(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None,
        logit_scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[Tensor | None, ...]:
        """Return the fields of TRL's function, in its order; None for those that `outputs` does not name.

        The softcap and the factor are those the model was found to use, not those TRL reads from its configuration.
        """
        head: Any = self.model.get_output_embeddings()
        asked = (target_N, temperature, outputs)
        self.calls += 1
        # TRL has gathered the weight. If a plan splits its classes, all ranks have the same tokens, so its gradient is
        # complete; under FSDP2 each rank would keep only the gradient of its own tokens
        if is_split_by_plan(head):
            return self._fields(hidden_ND, weight_VD, bias_V, *asked)
        if is_dtensor(head.weight):
            return inside_head(
                head, lambda hidden_ND: self._fields(hidden_ND, head.weight, head.bias, *asked), hidden_ND
            )
        # This replaces TRL's function for the whole process, and Ctrl-C may have left it in place
        if weight_VD.data_ptr() != head.weight.data_ptr():
            remains = "a forward with apply_seqpar_scores was interrupted before it ended"
            raise RuntimeError(f"{remains}; call its remove() before another model is trained")
        return self._fields(hidden_ND, weight_VD, bias_V, *asked)

    def _fields(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        temperature: float,
        outputs: tuple[str, ...],
    ) -> tuple[Tensor | None, ...]:
        """Return the fields of TRL's function, given weights that are gathered at this moment."""
        # Read here and not before the backbone runs, because FSDP2 gathers the weights in between
        rows, weight = with_adapter(hidden_ND, weight_VD, adapter_of(self.model))
        options: dict[str, Any] = {
            "bias": bias_V,
            "softcap": self.reading.softcap,
            "temperature": self.reading.temperature * temperature,
            "chunk_tokens": self.chunk_tokens,
        }
        # As in TRL, the products have the hidden states' dtype, even if the projection's is wider
        product_dtype = None if torch.is_autocast_enabled(hidden_ND.device.type) else hidden_ND.dtype
        asked: dict[str, Any] = {"entropy": "entropy" in outputs, "top_k": 1 if "is_top1" in outputs else None}
        scores = token_scores(rows, weight, target_N, product_dtype=product_dtype, **asked, **options)
        with torch.no_grad():
            statistics = LogitStatistics(rows, weight, **options)
            mean_logits_N = statistics.mean_logits() if "mean_logits" in outputs else None
            log_sum_sq_N = statistics.log_sum_sq_probs() if "log_sum_sq_probs" in outputs else None
        is_top1_N = None if scores.top_ids is None else scores.top_ids[:, 0] == target_N
        return scores.log_prob, scores.entropy, log_sum_sq_N, mean_logits_N, is_top1_N


class LogitStatistics:
    """Statistics of logits = cap(rows @ weight.T + bias) / temperature, cap(x) = softcap tanh(x / softcap).

    `chunk_tokens` is the maximum number of rows whose logits exist at once; None chooses it by size in bytes.
    """

    def __init__(
        self,
        rows: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None,
        softcap: float | None,
        temperature: float,
        chunk_tokens: int | None = None,
    ) -> None:
        self.rows, self.weight, self.bias = rows, weight, bias
        self.softcap, self.temperature = softcap, temperature
        self.dtype = wide(rows.dtype)
        self.chunk_tokens = chunk_tokens or rows_per_chunk(len(weight), self.dtype, rows.device.type)

    def mean_logits(self) -> Tensor:
        """Return the mean logit of each row (N,)."""
        if self.softcap is not None:
            return self._by_chunks(lambda logits_KV: logits_KV.mean(-1))
        # The mean of hidden @ weight.T over classes is hidden @ (the mean row of weight)
        mean_N = self.rows.to(self.dtype) @ self.weight.mean(0, dtype=self.dtype)
        if self.bias is not None:
            mean_N = mean_N + self.bias.mean(dtype=self.dtype)
        return mean_N / self.temperature

    def log_sum_sq_probs(self) -> Tensor:
        """Return log sum_v p_v^2 of each row (N,): lse(2 z) - 2 lse(z)."""
        return self._by_chunks(lambda logits_KV: (2 * logits_KV).logsumexp(-1) - 2 * logits_KV.logsumexp(-1))

    def _by_chunks(self, statistic: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a statistic of each row's logits, with one chunk's logits in memory at a time."""
        chunks = [statistic(self._logits(rows_KD)) for rows_KD in self.rows.split(self.chunk_tokens)]
        return torch.cat(chunks)

    def _logits(self, rows_KD: Tensor) -> Tensor:
        """Return the logits of some rows."""
        logits_KV = (rows_KD @ self.weight.t().to(rows_KD.dtype)).to(self.dtype)
        if self.bias is not None:
            logits_KV += self.bias
        if self.softcap is not None:
            logits_KV = self.softcap * torch.tanh(logits_KV / self.softcap)
        return logits_KV / self.temperature
