"""The bits that every entry point leaves, as hashes by name; as a program it prints them, those of the kernels too."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqpar
from tests.seqpar.kernels.interpreted import DEVICE, kernels

N, D, V = 300, 24, 500
DTYPES = (torch.float32, torch.bfloat16)
Results = Iterable[Tensor | None]


class Inputs:
    """The same numbers in every call and process."""

    def __init__(self, rows: int, vocab_size: int, dtype: torch.dtype, device: str) -> None:
        generator = torch.Generator().manual_seed(7)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        self.hidden = drawn(rows, D).requires_grad_()
        self.head = nn.Linear(D, vocab_size, device=device, dtype=dtype)
        with torch.no_grad():
            self.head.weight.copy_(drawn(vocab_size, D))
            self.head.bias.copy_(drawn(vocab_size))
        self.teacher = drawn(rows, D), drawn(vocab_size, D)
        self.target = torch.randint(vocab_size, (rows,), generator=generator).to(device)
        self.target[::5] = -100
        self.factor = drawn(rows).float()

    def gradients(self, total: Tensor, *more: Tensor | None) -> Results:
        """The loss, what stands beside it, and the gradients of all leaves."""
        total.backward()
        return [total, *more, self.hidden.grad, self.head.weight.grad, self.head.bias.grad]


class Own(nn.Module):
    """A generator without a closed form."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(hidden).tanh() * 3.0


SMOOTHED = seqpar.LabelSmoothing(0.1, "torch", ignore_index=-100)


def of_loss(x: Inputs, **options: Any) -> Results:
    loss = seqpar.linear_cross_entropy(x.hidden, x.head.weight, x.target, bias=x.head.bias, chunk_tokens=64, **options)
    return x.gradients(loss.total, loss.nll, loss.correct, loss.tokens)


def of_scores(x: Inputs, call: Callable[..., Any]) -> Results:
    scores = call(entropy=True, rank=True)
    total = (scores.log_prob * x.factor).sum() + scores.entropy.sum()
    return x.gradients(total, scores.log_prob, scores.entropy, scores.rank)


def surrogate(scores: Any, factor: Tensor) -> Tensor:
    return -scores.log_prob * factor - 0.01 * scores.entropy


def of_engine(x: Inputs, generator: nn.Module, devices: list[str] | None = None) -> Results:
    loss = seqpar.LossCompute(generator, SMOOTHED, devices, chunk_tokens=64)(x.hidden, x.target)
    return x.gradients(loss.total, loss.nll, loss.correct)


def of_2018(x: Inputs) -> Results:
    hidden = x.hidden.detach().view(10, -1, D).requires_grad_()
    optimizer = torch.optim.SGD(x.head.parameters(), 0.1)
    compute = seqpar.MultiGPULossCompute(x.head, SMOOTHED, [DEVICE, DEVICE], optimizer)
    total = compute(hidden, x.target.view(10, -1), int((x.target >= 0).sum()))
    return [torch.tensor(total), hidden.grad, *x.head.parameters()]


def of_distillation(x: Inputs) -> Results:
    loss = seqpar.linear_distillation(**linear_of(x), teacher=seqpar.TeacherHidden(*x.teacher), divergence="forward_kl")
    return x.gradients(loss.total)


def of_any_loss(x: Inputs) -> Results:
    """`chunked_gradient` of a loss that is written by hand."""

    def per_chunk(params: Any, rows: Any, chunk: Any) -> seqpar.TokenLoss:
        loss = F.cross_entropy(F.linear(rows[0], *params).float(), x.target[chunk], reduction="sum")
        return seqpar.TokenLoss(loss, (x.target[chunk] >= 0).sum())

    chunks = [slice(start, start + 64) for start in range(0, N, 64)]
    empty = seqpar.TokenLoss(torch.zeros((), device=DEVICE), torch.tensor(0, device=DEVICE))
    loss = seqpar.chunked_gradient(per_chunk, chunks, [x.hidden], [x.head.weight, x.head.bias], empty=empty)
    return x.gradients(loss.total)


def of_data_parallel(x: Inputs) -> Results:
    trunk = nn.Sequential(nn.Linear(D, D, device=DEVICE, dtype=x.hidden.dtype), nn.Dropout(0.5))
    with torch.no_grad():
        trunk[0].weight.copy_(x.teacher[0][:D])
        trunk[0].bias.zero_()
    torch.manual_seed(3)
    outputs = seqpar.DataParallel(trunk, [DEVICE, DEVICE], gather_outputs=False)(x.hidden)
    loss = seqpar.LossCompute(x.head, SMOOTHED, [DEVICE, DEVICE], chunk_tokens=64)(outputs, x.target)
    return [*x.gradients(loss.total), trunk[0].weight.grad]


def of_accumulation(x: Inputs) -> Results:
    engine = seqpar.LossCompute(x.head, SMOOTHED, chunk_tokens=64)
    halves = [slice(0, 130), slice(130, N)]
    loss = seqpar.accumulate_gradients(
        halves,
        lambda rows: engine(x.hidden[rows], x.target[rows]),
        lambda rows: (x.target[rows] >= 0).sum(),
        group=seqpar.THIS_PROCESS,
    )
    return [loss.total, x.hidden.grad, x.head.weight.grad, x.head.bias.grad]


def linear_of(x: Inputs) -> dict[str, Any]:
    return {"hidden": x.hidden, "weight": x.head.weight, "target": x.target, "bias": x.head.bias, "chunk_tokens": 64}


def engine_of(x: Inputs) -> seqpar.LossCompute:
    return seqpar.LossCompute(x.head, SMOOTHED, chunk_tokens=64)


ENTRY_POINTS: dict[str, Callable[[Inputs], Results]] = {
    "linear_cross_entropy": lambda x: of_loss(x, label_smoothing=0.1),
    'linear_cross_entropy, memory="least"': lambda x: of_loss(x, memory="least"),
    "linear_distillation": of_distillation,
    "token_scores": lambda x: of_scores(x, lambda **asked: seqpar.token_scores(**linear_of(x), **asked)),
    "scored_loss": lambda x: x.gradients(
        seqpar.scored_loss(**linear_of(x), loss=surrogate, entropy=True, factor=x.factor).total
    ),
    "LossCompute, by formula": lambda x: of_engine(x, x.head),
    "LossCompute, by autograd": lambda x: of_engine(x, Own(x.head)),
    "LossCompute.token_scores": lambda x: of_scores(
        x, lambda **asked: engine_of(x).token_scores(x.hidden, x.target, **asked)
    ),
    "LossCompute.scored_loss": lambda x: x.gradients(
        engine_of(x).scored_loss(x.hidden, x.target, surrogate, entropy=True, factor=x.factor).total
    ),
    "LossCompute, several devices": lambda x: of_engine(x, x.head, [DEVICE] * 3),
    "MultiGPULossCompute": of_2018,
    "DataParallel with LossCompute": of_data_parallel,
    "accumulate_gradients": of_accumulation,
    "chunked_gradient": of_any_loss,
}
"""Every way to a loss or to scores, with the numbers it returns and the gradients it leaves."""
OF_KERNELS = ("linear_cross_entropy", "token_scores", "scored_loss", "LossCompute, by formula")
"""Those that Triton's kernels compute."""


def digest(results: Results) -> str:
    """The hash of all bits of some tensors."""
    found = hashlib.sha256()
    for tensor in results:
        if tensor is not None:
            found.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def digests() -> dict[str, str]:
    """The hash of what each entry point leaves, in each dtype."""
    return {
        f"{name}, {str(dtype).removeprefix('torch.')}": digest(call(Inputs(N, V, dtype, DEVICE)))
        for name, call in ENTRY_POINTS.items()
        for dtype in DTYPES
    }


def digests_of_kernels() -> dict[str, str]:
    """The same of Triton's kernels, in its interpreter where there is no GPU: with few rows."""
    with kernels() as launched:
        found = {name: digest(ENTRY_POINTS[name](Inputs(6, 37, torch.bfloat16, DEVICE))) for name in OF_KERNELS}
    assert {"_row_loss", "_row_sums", "_row_gradient"} <= set(launched)
    return found


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    print(json.dumps([digests(), digests_of_kernels()]))
