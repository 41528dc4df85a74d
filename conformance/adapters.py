"""Call the known implementations as their projects document it. None of them is imported before it runs."""

from __future__ import annotations

import os
import sys
from functools import partial

import torch
from torch import Tensor, nn

from conformance.adapter import (
    DEVICE,
    EVERYTHING,
    LOW,
    Adapter,
    Feature,
    Options,
    quietly,
    why_missing,
    written,
)
from seqpar.core.token_loss import TokenLoss
from seqpar.engine.loss_compute import LossCompute

HALVES = (torch.bfloat16, torch.float16)
CPU = DEVICE == "cpu"


def _usual(options: Options) -> str:
    """Return the keywords that most implementations share with `F.cross_entropy`, without those at their defaults."""
    keywords = ""
    if options.ignore_index != -100:
        keywords += f", ignore_index={options.ignore_index}"
    if options.label_smoothing:
        keywords += f", label_smoothing={options.label_smoothing}"
    return f"{keywords}, reduction={options.reduction!r}"


# Each of these returns the text of one implementation's call. Text is what the reproduction of a failure shows, and the
# checks evaluate that same text, so that a reproduction cannot differ from the run.


def _torch(options: Options) -> str:
    return f"F.cross_entropy({capped('F.linear(hidden, weight, bias)', options.softcap)}, target{_usual(options)})"


def capped(logits: str, softcap: float | None) -> str:
    """Return the text of the logits after the softcap, if there is one."""
    if softcap is None:
        return logits
    return f"{softcap} * torch.tanh({logits} / {softcap})"


def _softcap(options: Options) -> str:
    """Return the keyword of implementations that have it."""
    if options.softcap is None:
        return ""
    return f", softcap={options.softcap}"


def _chunked(options: Options, more: str = "") -> str:
    chosen = [more]
    if options.chunk_rows:
        chosen = [f"batch_chunk_size={options.chunk_rows}, chunking_method=None", more]
    call = f"F.linear_cross_entropy(hidden, weight, target, linear_bias=bias{_usual(options)}"
    return f"{call}, options=torch.nn.LinearCrossEntropyOptions({', '.join(filter(None, chosen))}))"


def _accurate(options: Options) -> str:
    wide = ""
    if options.dtype in HALVES:
        wide = "acc_dtype=torch.float32, "
    return _chunked(options, f'acc_policy="accurate", {wide}allow_retain_graph=True')


def _torch_has_it() -> str:
    has = hasattr(nn.functional, "linear_cross_entropy") and hasattr(nn, "LinearCrossEntropyOptions")
    if has:
        return ""
    return f"not in torch {torch.__version__}"


def _liger(options: Options, more: str = "") -> str:
    module = "LigerFusedLinearCrossEntropyLoss"
    return f"{module}({_usual(options).removeprefix(', ')}{_softcap(options)}{more})(weight, hidden, target, bias)"


def _liger_float32(options: Options) -> str:
    return _liger(options, ", accum_dtype=torch.float32")


def why_no_liger() -> str:
    """Return why Liger cannot run: its kernels need a GPU or the interpreter, chosen before Triton is imported."""
    late = "triton" in sys.modules and "liger_kernel" not in sys.modules
    if CPU and late and os.environ.get("TRITON_INTERPRET") != "1":
        return "needs a GPU, or a process that has not loaded Triton yet"

    def switched() -> str:
        exec(SWITCH)
        return why_missing("liger_kernel.transformers")

    return quietly(switched)


def _cut(options: Options) -> str:
    return f"linear_cross_entropy(hidden, weight, target{_usual(options)}{_softcap(options)}, impl={CUT_BY!r})"


def _tune(options: Options) -> str:
    chunks = "[F.linear(part, weight, bias) for part in hidden[None].chunk(8, 1)]"
    return f"CEWithChunkedOutputLoss(8, {options.ignore_index})({chunks}, target[None])"


def _formula(options: Options) -> str:
    # A TokenLoss has both the sum and the mean, so there is no keyword for the reduction
    usual = _usual(options).rsplit(", reduction", 1)[0]
    what = {"sum": "total", "mean": "mean"}[options.reduction]
    chunk = ""
    if options.chunk_rows:
        chunk = f", chunk_tokens={options.chunk_rows}"
    return f"seqpar.linear_cross_entropy(hidden, weight, target, bias=bias{usual}{_softcap(options)}{chunk}).{what}"


def engine_loss(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    """Compute the loss by `LossCompute` with a projection of a class that it differentiates by autograd."""
    generator = Projection(weight.size(1), weight.size(0), bias is not None, device="meta")
    # The caller's own parameters, so that gradients arrive in them
    generator.softcap = options.softcap
    generator.weight = weight
    generator.bias = bias  # type: ignore[assignment]
    criterion = nn.CrossEntropyLoss(
        ignore_index=options.ignore_index, label_smoothing=options.label_smoothing, reduction="sum"
    )
    loss: TokenLoss = LossCompute(generator, criterion, chunk_tokens=options.chunk_rows)(hidden, target)
    if options.reduction == "sum":
        return loss.total
    return loss.mean


class Projection(nn.Linear):
    """A projection of its own class, for which the engine has no closed form of the gradient."""

    softcap: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, as `nn.Linear` does, after the softcap if there is one."""
        logits = super().forward(x)
        if self.softcap is None:
            return logits
        return self.softcap * torch.tanh(logits / self.softcap)


F_ONLY = "import torch, torch.nn.functional as F"
# Without a GPU, Liger's kernels run in Triton's interpreter and cut_cross_entropy in compiled torch operations
SWITCH = ""
INTERPRETED = ""
CUT_BY = "cce"
CUT_NOTE = 'impl="cce"'
if CPU:
    SWITCH = "import os; os.environ['TRITON_INTERPRET'] = '1'"
    INTERPRETED = ", in Triton's interpreter (numbers, no memory)"
    CUT_BY = "torch_compile"
    CUT_NOTE = 'impl="torch_compile", its fallback without a supported GPU'
LIGER = f"{F_ONLY}; from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss"
IN_FLOAT32 = "float64 is taken, and computed in float32"
LIGER_OFFERS: frozenset[Feature] = frozenset({*LOW, "bias", "smoothing", "softcap", "sum", "mean"})
if CPU:
    # The interpreter gives its kernel a Python float, of which the kernel asks what only a Triton value has
    LIGER_OFFERS -= {"softcap"}
MEASURED = frozenset({"CPU memory"})

written_loss = partial(written, Adapter)

KNOWN: dict[str, Adapter] = {
    adapter.name: adapter
    for adapter in (
        written_loss("torch", F_ONLY, _torch, offers=EVERYTHING - {"chunks"}, note="the plain loss"),
        written_loss(
            "torch-chunked",
            F_ONLY,
            _chunked,
            offers=EVERYTHING - {"softcap"},
            note="`F.linear_cross_entropy` with its default options; with smoothing it makes all logits, and warns",
            why_not=_torch_has_it,
        ),
        written_loss(
            "torch-chunked-accurate",
            F_ONLY,
            _accurate,
            offers=EVERYTHING - {"softcap"},
            note='the same with acc_policy="accurate", acc_dtype=torch.float32 (bfloat16, float16) and '
            "allow_retain_graph=True",
            why_not=_torch_has_it,
        ),
        written_loss(
            "liger",
            LIGER,
            _liger,
            switch=SWITCH,
            offers=LIGER_OFFERS,
            note=f"fused{INTERPRETED}; {IN_FLOAT32}",
            package="liger-kernel",
            why_not=why_no_liger,
        ),
        written_loss(
            "liger-float32",
            LIGER,
            _liger_float32,
            switch=SWITCH,
            offers=LIGER_OFFERS,
            note="the same with accum_dtype=torch.float32",
            package="liger-kernel",
            why_not=why_no_liger,
        ),
        written_loss(
            "cce",
            "import torch; from cut_cross_entropy import linear_cross_entropy",
            _cut,
            "cut_cross_entropy",
            offers=frozenset({*LOW, "softcap", "sum", "mean", *MEASURED}),
            note=f"{CUT_NOTE}; {IN_FLOAT32}",
            package="cut-cross-entropy",
        ),
        written_loss(
            "torchtune",
            f"{F_ONLY}; from torchtune.modules.loss import CEWithChunkedOutputLoss",
            _tune,
            "torchtune.modules.loss",
            offers=frozenset({*LOW, "bias", "mean", *MEASURED}),
            note=f"8 chunks, not compiled; it has only a mean; {IN_FLOAT32}",
            package="torchtune",
        ),
        written_loss("seqpar", "import torch, seqpar", _formula, note="`linear_cross_entropy`", package="seqpar"),
        Adapter("seqpar-engine", engine_loss, note="`LossCompute` with your own generator", package="seqpar"),
    )
}
