"""A call of each public function, with arguments that suit it and what is looked at: for `test_every_option`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.overrides import TorchFunctionMode

import seqpar

V, D = 7, 4
Arguments = dict[str, Any]
"""By name; those of `*inputs` and `**per_token` with their stars."""


def t(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def leaf(seed: int, *shape: int) -> Tensor:
    return t(seed, *shape).requires_grad_()


def linear(seed: int, inputs: int = D, outputs: int = V) -> nn.Linear:
    # No random number is drawn
    made = nn.Linear(inputs, outputs, device="meta")
    for number, (name, parameter) in enumerate([*made.named_parameters()]):
        setattr(made, name, nn.Parameter(t(seed + number, *parameter.shape)))
    return made


def smoothing() -> seqpar.LabelSmoothing:
    return seqpar.LabelSmoothing(0.1, "torch")


TARGET = torch.tensor([0, 2, 2, 5, 6, 1])
TARGET_BT = torch.tensor([[0, 2, 2, 5, 6], [1, 3, 2, -100, 4]])


class Affine(nn.Module):
    """A generator without a formula, which takes a further tensor per token; it notes the shapes it is given."""

    def __init__(self, seed: int = 2) -> None:
        super().__init__()
        self.inner = linear(seed)
        # Not a list of its own, which the engine would refuse to see growing
        self.note = list[tuple[int, ...]]().append

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return self.note.__self__  # type: ignore[attr-defined, no-any-return]

    def forward(self, hidden: Tensor, factor: Tensor | None = None, scale: float = 1.0) -> Tensor:
        self.note(tuple(hidden.shape))
        logits: Tensor = self.inner(hidden).tanh() * scale
        return logits if factor is None else logits * factor.unsqueeze(-1)


class Reducing(nn.Linear):
    """What `accumulate_gradients` takes for a wrapper that reduces gradients."""

    process_group = ProcessGroup(0, 1)
    entered = 0

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        type(self).entered += 1
        yield


class LargestLogits(TorchFunctionMode):
    """Note the most rows of vocabulary-wide numbers in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dim() > 1 and result.size(-1) == V:
            self.rows = max(self.rows, result.numel() // V)
        return result


WATCH = LargestLogits()


class Rows(nn.Module):
    """A module for any shape; it notes the shapes it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.shapes.append(tuple(x.shape))
        return 2 * x


class Doubled(nn.Module):
    """A model whose keyword matters."""

    def forward(self, x: Tensor, plus: float = 0.0) -> Tensor:
        return 2 * x + plus


class Seen(NamedTuple):
    """What a call left."""

    result: Any
    arguments: Arguments
    largest_logits: int


See = Callable[[Seen], object]


def plain(value: Any) -> object:
    """Numbers that can be compared, from whatever a call returns."""
    if isinstance(value, Tensor):
        values = None if value.is_meta else value.detach().flatten().tolist()
        return [tuple(value.shape), str(value.dtype), value.device.type, values]
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return repr(value) if isinstance(value, nn.Module) else value


def numbers(seen: Seen) -> object:
    return plain(seen.result)


def with_gradients(seen: Seen) -> object:
    """The result, and the gradients of every argument that has one, modules' parameters included."""
    leaves = [x for value in seen.arguments.values() for x in flat(value)]
    first = seen.result if isinstance(seen.result, Tensor) else seen.result[0]
    needed = leaves and first.requires_grad
    gradients = torch.autograd.grad(first.sum(), leaves, allow_unused=True) if needed else ()
    return [plain(seen.result), plain(gradients)]


def flat(value: Any) -> list[Tensor]:
    if isinstance(value, nn.Module):
        return list(value.parameters())
    if isinstance(value, (list, tuple)):
        return [x for each in value for x in flat(each)]
    if isinstance(value, dict):
        return flat(list(value.values()))
    return [value] if isinstance(value, Tensor) and value.requires_grad else []


class Call(NamedTuple):
    """A public function, arguments that suit it, and what is looked at."""

    function: Callable[..., Any]
    arguments: Callable[[], Arguments]
    see: See = with_gradients


def hidden_target() -> Arguments:
    return {"hidden": leaf(1, 2, 5, D), "target": TARGET_BT}


def linear_arguments() -> Arguments:
    return {"hidden": leaf(1, 6, D), "weight": leaf(2, V, D), "target": TARGET}


def penalised(scores: Any, factor: Tensor | None = None, **_: Any) -> Tensor:
    """A loss of every score there is."""
    loss = -scores.log_prob
    for score in (scores.entropy, None if scores.log_probs_at is None else scores.log_probs_at.sum(-1), factor):
        loss = loss if score is None else loss - 0.5 * score
    return loss


def few() -> Tensor:
    """Two classes for each row."""
    return torch.tensor([0, 3]).expand(6, 2)


def taught_by(kind: Callable[..., Any]) -> Callable[..., Any]:
    """Distillation from a teacher of this kind, which is made from the arguments."""
    return lambda **given: seqpar.linear_distillation(
        **linear_arguments(), teacher=kind(**given), divergence="forward_kl"
    )


def refuse_class_7(**given: Any) -> Any:
    return seqpar.linear_cross_entropy(**linear_arguments(), vocab=seqpar.VocabShard(**given))


def engine(**given: Any) -> seqpar.TokenLoss:
    made = seqpar.LossCompute(**given)
    made(**hidden_target())  # the first call looks at logits of its own
    WATCH.rows = 0
    return made(**hidden_target())


def called(hidden: Tensor, **given: Any) -> seqpar.TokenLoss:
    generator = Affine().to(hidden.dtype)
    if hidden.dtype == torch.float16:
        with torch.no_grad():
            generator.inner.weight *= 2e-7
    return seqpar.LossCompute(generator, smoothing())(hidden, **given)


def engine_2018(out: Any = None, targets: Any = None, normalize: float = 6.0, **given: Any) -> object:
    out = leaf(1, 2, 5, D) if out is None else out
    per_token = {name: given.pop(name) for name in list(given) if name == "factor"}
    compute = seqpar.MultiGPULossCompute(**given)
    # The first call in this situation asks the pair about rows of its own
    with torch.set_grad_enabled("opt" in given):
        compute.engine(**hidden_target())
    WATCH.rows = 0
    total = compute(out, TARGET_BT if targets is None else targets, normalize, **per_token)
    return total, [p.detach().clone() for p in given["generator"].parameters()]


def arguments_2018() -> Arguments:
    return {"generator": Affine(), "criterion": smoothing(), "devices": ["cpu"]}


def called_2018() -> Arguments:
    return {"out": leaf(1, 2, 5, D), "targets": TARGET_BT, "normalize": 6.0}


def call_2018(out: Any, targets: Any, normalize: float, **per_token: Any) -> object:
    given = arguments_2018()
    return engine_2018(
        out, targets, normalize, **given, opt=torch.optim.SGD(given["generator"].parameters(), lr=0.5), **per_token
    )


def accumulated(**given: Any) -> object:
    weight = leaf(2, 3)
    given["loss_of"] = functools.partial(given["loss_of"], weight)
    Reducing.entered = 0
    loss = seqpar.accumulate_gradients(**given)
    return plain(loss), plain(weight.grad), Reducing.entered


def dot(weight: Tensor, micro_batch: Tensor) -> seqpar.TokenLoss:
    return seqpar.TokenLoss((weight * micro_batch).sum(), torch.tensor(3))


def tanh_chunk(params: Any, rows: Any, chunk: Any) -> seqpar.TokenLoss:
    return seqpar.TokenLoss((rows[0] @ params[0]).tanh().sum(), torch.tensor(len(rows[0])))


def walk_arguments() -> Arguments:
    return {
        "per_chunk": tanh_chunk,
        "chunks": [slice(0, 3), slice(3, 6)],
        "per_token": [leaf(1, 6, D)],
        "params": [leaf(2, D)],
        "empty": seqpar.TokenLoss(torch.tensor(0.0).double(), torch.tensor(0)),
    }


def shapes_seen(seen: Seen) -> object:
    return [plain(seen.result), sorted(seen.arguments["module"].shapes)]


def applied(device_ids: Any = ("cpu",), **given: Any) -> Any:
    return seqpar.DataParallel(device_ids=device_ids, **given)(t(1, 4, D))


def raised(**given: Any) -> object:
    try:
        return seqpar.parallel_apply(**given)
    except ZeroDivisionError as error:
        return error.__notes__


def tokens() -> Tensor:
    return torch.arange(1, 13).view(2, 6)


CALLS: dict[str, Call] = {
    "CrossEntropy": Call(lambda **given: seqpar.CrossEntropy(**given)(t(1, 6, V), TARGET), dict),
    "LabelSmoothing": Call(
        lambda **given: seqpar.LabelSmoothing(**given)(t(1, 6, V), TARGET),
        lambda: {"label_smoothing": 0.1, "smoothing_convention": "torch"},
    ),
    "LabelSmoothing.forward": Call(smoothing(), lambda: {"logits": leaf(1, 6, V), "target": TARGET}),
    "LabelSmoothing.token_loss": Call(smoothing().token_loss, lambda: {"logits": leaf(1, 6, V), "target": TARGET}),
    "DataParallel": Call(applied, lambda: {"module": Affine()}, shapes_seen),
    "DataParallel.forward": Call(
        lambda *inputs, **given: seqpar.DataParallel(Affine(), ["cpu"] * 2)(*inputs, **given),
        lambda: {"*inputs": (leaf(1, 4, D),)},
        numbers,
    ),
    "data_parallel": Call(
        seqpar.data_parallel, lambda: {"module": Affine(), "inputs": t(1, 4, D), "device_ids": ["cpu"]}, shapes_seen
    ),
    "LossCompute": Call(engine, lambda: {"generator": Affine(), "criterion": smoothing()}),
    "LossCompute.forward": Call(
        called,
        hidden_target,
    ),
    "LossCompute.explain": Call(seqpar.LossCompute(linear(1), smoothing()).explain, dict, numbers),
    "LossCompute.prefetch": Call(seqpar.LossCompute(linear(1), smoothing()).prefetch, dict, numbers),
    "LossCompute.token_scores": Call(
        seqpar.LossCompute(linear(1), smoothing()).token_scores, lambda: {**hidden_target(), "**options": {}}, numbers
    ),
    "LossCompute.scored_loss": Call(
        seqpar.LossCompute(linear(1), smoothing()).scored_loss,
        lambda: {**hidden_target(), "loss": penalised, "**per_token": {}},
    ),
    "ModelWithLoss": Call(
        lambda **given: seqpar.ModelWithLoss(**given)(t(1, 2, 5, 3), target=TARGET_BT),
        lambda: {"model": linear(5, 3, D), "loss": seqpar.LossCompute(linear(1), smoothing())},
    ),
    "ModelWithLoss.forward": Call(
        lambda *inputs, **given: seqpar.ModelWithLoss(
            Doubled(), seqpar.LossCompute(Affine(), smoothing())
        )(*inputs, **given),
        lambda: {"*inputs": (t(1, 2, 5, D),), "target": TARGET_BT},
        numbers,
    ),
    "MultiGPULossCompute": Call(engine_2018, arguments_2018, numbers),
    "MultiGPULossCompute.__call__": Call(call_2018, called_2018, numbers),
    "SparseTarget": Call(
        lambda **given: seqpar.linear_cross_entropy(**linear_arguments(), soft_target=seqpar.SparseTarget(**given)),
        lambda: {"ids": few(), "probs": torch.tensor([0.75, 0.25]).expand(6, 2)},
    ),
    "TeacherHidden": Call(taught_by(seqpar.TeacherHidden), lambda: {"hidden": t(3, 6, 3), "weight": t(4, V, 3)}),
    "TeacherLogProbs": Call(
        taught_by(seqpar.TeacherLogProbs), lambda: {"function": lambda rows: t(3, 6, V).log_softmax(-1)[rows]}
    ),
    "TeacherTopK": Call(
        taught_by(seqpar.TeacherTopK),
        lambda: {"ids": few(), "log_probs": torch.tensor([-1.0, -2.0]).expand(6, 2), "rest": "one_class"},
    ),
    "TokenLoss": Call(
        lambda **given: [*seqpar.TokenLoss(**given), seqpar.TokenLoss(**given).mean],
        lambda: {"total": torch.tensor(6.0), "tokens": torch.tensor(3)},
        numbers,
    ),
    "TokenScores": Call(lambda **given: seqpar.TokenScores(**given), lambda: {"log_prob": torch.tensor(-1.0)}, numbers),
    "TokenLoss.detach": Call(lambda: None, dict),
    "TokenLoss.zero": Call(
        seqpar.TokenLoss.zero, lambda: {"dtype": torch.float64, "device": torch.device("cpu"), "tells": True}, numbers
    ),
    "VocabShard": Call(refuse_class_7, lambda: {"group": None, "start": 0, "vocab_size": V}),
    "VocabShard.of": Call(
        lambda **given: seqpar.VocabShard.of(**given).vocab_size, lambda: {"weight_rows": V, "group": None}, numbers
    ),
    "accumulate_gradients": Call(
        accumulated,
        lambda: {"micro_batches": [t(1, 3), t(2, 3)], "loss_of": dot, "tokens_of": lambda micro_batch: 3},
        numbers,
    ),
    "check_agreement": Call(
        seqpar.check_agreement, lambda: {"facts": {"a": 1}, "group": None, "numbers": (1, 2)}, numbers
    ),
    "chunked_gradient": Call(seqpar.chunked_gradient, walk_arguments),
    "copy_to_group": Call(seqpar.copy_to_group, lambda: {"tensor": leaf(1, 3), "group": None}),
    "gather": Call(seqpar.gather, lambda: {"outputs": [t(1, 2, 2), t(2, 2, 2)], "output_device": "cpu"}, numbers),
    "group_sum": Call(seqpar.group_sum, lambda: {"tensor": t(1, 3), "group": None}, numbers),
    "join_time": Call(seqpar.join_time, lambda: {"parts": [t(1, 4, 4), t(2, 4, 4)]}, numbers),
    "linear_cross_entropy": Call(seqpar.linear_cross_entropy, linear_arguments),
    "linear_distillation": Call(
        seqpar.linear_distillation,
        lambda: {
            **linear_arguments(), "teacher": seqpar.TeacherHidden(t(3, 6, 3), t(4, V, 3)), "divergence": "forward_kl"
        },
    ),
    "next_token_targets": Call(seqpar.next_token_targets, lambda: {"tokens": tokens(), "group": None}, numbers),
    "parallel_apply": Call(raised, lambda: {"modules": [Affine(2), Affine(3)], "inputs": [t(1, D), t(2, D)]}, numbers),
    "place": Call(seqpar.place, lambda: {"model": nn.Sequential(linear(1)), "parts": {"": "cpu"}}, numbers),
    "replicate": Call(
        lambda **given: [[p.detach() for p in twin.parameters()] for twin in seqpar.replicate(**given)],
        lambda: {"module": linear(1), "device_ids": ["cpu"]},
        numbers,
    ),
    "scatter": Call(seqpar.scatter, lambda: {"inputs": t(1, 4, 4), "device_ids": ["cpu"] * 2}, numbers),
    "scored_loss": Call(seqpar.scored_loss, lambda: {**linear_arguments(), "loss": penalised, "**per_token": {}}),
    "split_time": Call(seqpar.split_time, lambda: {"tensor": t(1, 4, 4), "group": None}, numbers),
    "sum_over_ranks": Call(
        seqpar.sum_over_ranks,
        lambda: {"loss": seqpar.TokenLoss(torch.tensor(2.0), torch.tensor(3)), "group": None},
        numbers,
    ),
    "time_steps": Call(seqpar.time_steps, lambda: {"time": 8, "rank": 0, "world": 2}, numbers),
    "token_scores": Call(seqpar.token_scores, linear_arguments),
}  # fmt: skip
