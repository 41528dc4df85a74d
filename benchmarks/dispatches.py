"""Count what `linear_cross_entropy` and `LossCompute` dispatch on a GPU with Triton, where there is none.

Their backward is included.

    python -m benchmarks.dispatches             # bfloat16, smoothing 0.1, a bias, no padding
    python -m benchmarks.dispatches --list      # each operator of two chunks and their call
    python -m benchmarks.dispatches --training  # a whole training step of the recipe's smallest model

The call runs on the emulated accelerator of the tests with CUDA's branches: Triton's launches are only written down, as
are products that widen, which the CPU does not have. Counted is every operator that reaches torch's dispatcher (views
and allocations too) and every launch, from the call to the gradients of hidden, weight and bias. Not counted is torch's
own: the mean that the caller differentiates, and the detaching of each `.grad`. The difference between 2 and 4 chunks
is what a chunk takes, the rest is the call's.

A training step is that of docs/results/gpu.md at d128: batch, forward, loss, backward, clipping and Adam. Attention is
one launch forward and one backward, as PyTorch's fused kernels are counted by the dispatcher; Adam is one for each of
its two groups. It is counted as it is, and with the layers compiled (`training.compile`), where each kernel that
Inductor generates for an H100 is a launch (benchmarks/generated_kernels.py).
"""

from __future__ import annotations

import argparse
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import seqpar
from seqpar.core.device_facts import FACTS
from seqpar.markdown_table import markdown_table
from tests.emulated import NAME, register

CHUNK_ROWS = 64
WIDTH, VOCAB = 32, 1008
VIEWS = (
    "view", "_unsafe_view", "split", "t", "detach", "slice", "select", "unsqueeze", "squeeze", "alias", "expand",
    "transpose", "unbind",
)  # fmt: skip
ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided")
QUESTIONS = ("promote_types", "_record_function_enter_new", "_record_function_exit")
KINDS = (
    dict.fromkeys(VIEWS, "view")
    | dict.fromkeys(ALLOCATIONS, "allocation")
    | dict.fromkeys(QUESTIONS, "question")
    | {"_local_scalar_dense": "read"}
)
"""The other operators are kernels."""


class Operator(NamedTuple):
    """One dispatch."""

    kind: str
    name: str
    logits: bool
    """Whether it reads or writes all logits of a chunk."""


class Log(TorchDispatchMode):
    """Write down every operator; products that only CUDA has return memory without numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Operator] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        kind = KINDS.get(name, "kernel")
        if name == "_to_copy" and kwargs.get("device") == torch.device("cpu"):
            kind = "read"
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if tensors and all(t.is_cpu for t in tensors) and kwargs.get("device", tensors[0].device).type == "cpu":
            # The host's own
            return func(*args, **kwargs)
        found = self.result(func, name, args, kwargs)
        passes = kind == "kernel" and any(map(is_logits, [*tensors, *tree_leaves(found)]))
        self.operators.append(Operator(kind, name, passes))
        return found

    def result(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Return what the operator does, or memory of its shape."""
        if "dtype" in func._overloadname and name in ("mm", "addmm"):
            return kwargs["out"] if "out" in kwargs else args[0].new_empty((len(args[0]), args[1].size(1))).float()
        return func(*args, **kwargs)

    def launch(self, kernel: Any, programs: int, numbers: int, device: Any, *arguments: Any, **settings: Any) -> None:
        """Take the place of a launch; only the number that the host will read is computed."""
        tensors = [t for t in arguments if isinstance(t, Tensor)]
        self.operators.append(Operator("launch", kernel.__name__, any(map(is_logits, tensors))))
        if kernel.__name__ == "_count_targets":
            with _disable_current_modes():
                arguments[-1].fill_(int((arguments[0] != arguments[3]).sum()))


def is_logits(tensor: object) -> bool:
    """Return whether it is a tensor of the shape of a chunk's logits."""
    return isinstance(tensor, Tensor) and sorted(tensor.shape[-2:]) == sorted((CHUNK_ROWS, VOCAB))


@contextlib.contextmanager
def as_on_cuda(log: Log) -> Iterator[None]:
    """Take CUDA's branches on the emulated accelerator."""
    with contextlib.ExitStack() as stack:
        for module in ("inputs", "projection"):
            stack.enter_context(patch(f"seqpar.linear.{module}.why_no_kernel", lambda kind: ""))
        stack.enter_context(patch("seqpar.kernels.row_kernel.run_programs", log.launch))
        stack.enter_context(patch.dict(FACTS, {NAME: FACTS[NAME]._replace(widens_products=True)}))
        yield


def operators(chunks: int, padding: float = 0.0, by_engine: bool = False) -> list[Operator]:
    """Return what one call with so many chunks dispatches, with its backward; `by_engine` is that of `LossCompute`."""
    device = torch.device(NAME, 0)
    rows = chunks * CHUNK_ROWS
    hidden = torch.zeros(rows, WIDTH, dtype=torch.bfloat16, device=device, requires_grad=True)
    head = torch.nn.Linear(WIDTH, VOCAB, device=device, dtype=torch.bfloat16)
    target = torch.zeros(int(rows / (1 - padding)), dtype=torch.int64, device=device)
    if padding:
        target[rows:] = -100
        hidden = torch.zeros(len(target), WIDTH, dtype=torch.bfloat16, device=device, requires_grad=True)
    upstream = torch.ones((), device=device)
    function = partial(seqpar.linear_cross_entropy, weight=head.weight, bias=head.bias, label_smoothing=0.1)
    loss_of: Callable[..., seqpar.TokenLoss] = partial(function, chunk_tokens=CHUNK_ROWS)
    if by_engine:
        loss_of = seqpar.LossCompute(head, seqpar.LabelSmoothing(0.1, "torch"), chunk_tokens=CHUNK_ROWS)
        loss_of(hidden, target=target)  # the first call compares the pair with its closed form
    log = Log()
    with as_on_cuda(log), log:
        loss = loss_of(hidden, target=target)
        torch.autograd.grad(loss.total, (hidden, head.weight, head.bias), upstream)
    return log.operators


def training_operators() -> Iterator[tuple[str, list[Operator]]]:
    """Yield what a training step at d128 dispatches as it is, with layers that are compiled, and under autocast."""
    from benchmarks.generated_kernels import fused_attention, noted_launches, register_compiler
    from benchmarks.seq2seq_peers import SIZES, Compiled, Ours, batches

    ways = (
        ("training step", Ours, "float32"),
        ("with compiled layers", Compiled, "float32"),
        ("in bfloat16", Ours, "bf16"),
    )
    register_compiler()
    config, vocab_size = SIZES["d128"]
    batch = next(batches(vocab_size, 300, "similar"))
    log = Log()
    noted = noted_launches(log, lambda name: log.operators.append(Operator("launch", "generated", False)))
    with noted, patch("torch.nn.functional.scaled_dot_product_attention", fused_attention()):
        for what, kind, precision in ways:
            yield what, _launched(kind(config, vocab_size, precision, f"{NAME}:0"), batch, log)


def _launched(model: Any, batch: Any, log: Log) -> list[Operator]:
    model.step(batch)  # the first call looks at some logits
    log.operators.clear()
    with as_on_cuda(log), log:
        model.step(batch)
    return [operator for operator in log.operators if operator.kind in ("kernel", "launch", "read")]


def tell_training() -> None:
    """Print a training step's launches and reads, and the most frequent, in each way."""
    for what, found in training_operators():
        for (kind, name), count in Counter((operator.kind, operator.name) for operator in found).most_common(20):
            print(f"{count:5} {kind:8}{name}")
        kinds = Counter(operator.kind for operator in found)
        print(f"{what}: {kinds['kernel'] + kinds['launch']} launches, {kinds['read']} reads")


def counted(padding: float = 0.0, by_engine: bool = False) -> tuple[int, int]:
    """Return the dispatches of a chunk and of a call."""
    two, four = (len(operators(chunks, padding, by_engine)) for chunks in (2, 4))
    chunk = (four - two) // 2
    return chunk, two - 2 * chunk


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the counts by kind, and in the last line those of a chunk and of a call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print each operator")
    parser.add_argument("--training", action="store_true", help="a training step instead")
    options = parser.parse_args(arguments)
    register()
    if options.training:
        tell_training()
        return
    if options.list:
        for operator in operators(2):
            print(f"{operator.kind:11}{operator.name}{', all logits' if operator.logits else ''}")
    rows = []
    for chunks in (1, 2, 4):
        found = operators(chunks)
        kinds = Counter(operator.kind for operator in found)
        passes = sum(operator.logits for operator in found) / chunks
        shown = [str(kinds[kind]) for kind in ("kernel", "launch", "read", "view", "allocation")]
        rows.append([str(chunks), *shown, str(len(found)), f"{passes:g}"])
    kinds_shown = ["kernels", "launches", "reads", "views", "allocations"]
    print(markdown_table(["chunks", *kinds_shown, "all", "operators on all logits, a chunk"], rows))
    padded = counted(padding=0.25)
    print(f"\nwith a quarter of padding: chunk {padded[0]}, call {padded[1]}")
    print("LossCompute: chunk {}, call {}".format(*counted(by_engine=True)))
    print("chunk {}, call {}".format(*counted()))


if __name__ == "__main__":
    main()
