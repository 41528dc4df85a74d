"""What each parameter of a public function is changed to, and where its effect is seen: for `test_every_option`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import seqpar
from tests.seqpar.option_calls import (
    TARGET,
    TARGET_BT,
    Affine,
    Arguments,
    D,
    Reducing,
    Rows,
    See,
    Seen,
    V,
    few,
    leaf,
    linear,
    plain,
    smoothing,
    t,
    tokens,
)


class Option(NamedTuple):
    """Another value of a parameter: a function makes it from the other arguments."""

    value: Callable[[Arguments], Any]
    beside: Callable[[], Arguments] = dict
    """Other arguments that both calls have, so that it matters."""
    see: See | None = None
    refused: str = ""
    """What the error says, where the effect is that a wrong value is refused."""


def to(value: Any, **others: Any) -> Option:
    return Option(lambda _: value, **others)


def sgd(arguments: Arguments) -> torch.optim.Optimizer:
    return torch.optim.SGD(arguments["generator"].parameters(), lr=0.5)


def meta(arguments: Arguments) -> str:
    return "meta"


def kept_in_float16(seen: Seen) -> object:
    """The hidden gradient of a loss that is scaled before `backward`, as a GradScaler does it."""
    hidden = seen.arguments.get("hidden", seen.arguments.get("per_token", [None])[0])
    return plain(torch.autograd.grad(seen.result.total * 2.0**16, hidden))


def at_once(seen: Seen) -> object:
    return seen.largest_logits


def taken_again(seen: Seen) -> object:
    """Whether the gradient may be taken twice: not where it is stored."""
    hidden = seen.arguments["hidden"]
    torch.autograd.grad(seen.result.total, hidden, retain_graph=True)
    try:
        torch.autograd.grad(seen.result.total, hidden)
    except RuntimeError:
        return False
    return True


def of_weight(seen: Seen) -> object:
    """The weight's own gradient, if it gets one."""
    (grad,) = torch.autograd.grad(seen.result.total, [seen.arguments["weight"]], allow_unused=True)
    return None if grad is None else plain(grad)


def in_float16() -> Arguments:
    return {"hidden": (t(1, 6, D)).half().requires_grad_(), "weight": (t(2, V, D) * 2e-7).half()}


def twice(weight: Tensor, micro_batch: Tensor) -> seqpar.TokenLoss:
    return seqpar.TokenLoss(2 * (weight * micro_batch).sum(), torch.tensor(3))


def sine_chunk(params: Any, rows: Any, chunk: Any) -> seqpar.TokenLoss:
    return seqpar.TokenLoss((rows[0] @ params[0]).sin().sum(), torch.tensor(len(rows[0])))


def small_chunk(params: Any, rows: Any, chunk: Any) -> seqpar.TokenLoss:
    return seqpar.TokenLoss((rows[0].float() * 1e-9).sum(), torch.tensor(len(rows[0])))


LINEAR = {
    "hidden": to(leaf(8, 6, D)),
    "weight": to(leaf(8, V, D)),
    "target": to(TARGET.flip(0) - 0),
    "bias": to(leaf(8, V)),
    "ignore_index": to(2),
    "chunk_tokens": to(2, see=at_once),
}
OVER_RANKS = to(None)
"""The effect is seen in `over_two_ranks`."""

OPTIONS: dict[str, dict[str, Option]] = {
    "CrossEntropy": {"ignore_index": to(2)},
    "LabelSmoothing": {"label_smoothing": to(0.3), "smoothing_convention": to("fairseq"), "ignore_index": to(2)},
    "LabelSmoothing.forward": {"logits": to(leaf(8, 6, V)), "target": to(TARGET.flip(0))},
    "LabelSmoothing.token_loss": {"logits": to(leaf(8, 6, V)), "target": to(TARGET.flip(0))},
    "DataParallel": {
        "module": to(Affine(8)),
        "device_ids": to(["cpu", "cpu"]),
        "output_device": Option(meta, refused="output_device"),
        "dim": to(1, beside=lambda: {"module": Rows(), "device_ids": ["cpu", "cpu"]}),
        "gather_outputs": to(False),
    },
    "DataParallel.forward": {"*inputs": to((t(8, 4, D),)), "**kwargs": to({"factor": t(3, 4)})},
    "data_parallel": {
        "module": to(Affine(8)),
        "inputs": to(t(8, 4, D)),
        "device_ids": to(["cpu", "cpu"]),
        "output_device": Option(meta, refused="output_device"),
        "dim": to(1, beside=lambda: {"module": Rows(), "device_ids": ["cpu", "cpu"]}),
        "module_kwargs": to({"scale": 3.0}),
    },
    "LossCompute": {
        "generator": to(Affine(8)),
        "criterion": to(seqpar.LabelSmoothing(0.3, "torch")),
        "devices": to(["cpu", "cpu"], see=at_once),
        "chunk_tokens": to(2, see=at_once),
        "chunk_size": to(1, see=at_once),
        "vocab": to(seqpar.VocabShard(None, 0, 8), refused="can be split only by formula"),
    },
    "LossCompute.forward": {
        "hidden": to(leaf(8, 2, 5, D)),
        "target": to(TARGET_BT.flip(1)),
        "loss_scale": to(
            2.0**16, see=kept_in_float16, beside=lambda: {"hidden": t(1, 2, 5, D).half().requires_grad_()}
        ),
        "**per_token": to({"factor": t(3, 2, 5)}),
    },
    "LossCompute.explain": {"tokens": to(9)},
    "LossCompute.prefetch": {},
    "LossCompute.token_scores": {
        "hidden": to(leaf(8, 2, 5, D)),
        "target": to(TARGET_BT.flip(1)),
        "temperature": to(2.0),
        "ids": to(torch.ones(2, 5, 1, dtype=torch.int64)),
        "**options": to({"entropy": True}),
    },
    "LossCompute.scored_loss": {
        "hidden": to(leaf(8, 2, 5, D)),
        "target": to(TARGET_BT.flip(1)),
        "loss": to(lambda scores, **_: scores.lse),
        "temperature": to(2.0),
        "ids": to(torch.ones(2, 5, 1, dtype=torch.int64)),
        "entropy": to(True),
        "softcap": to(2.0),
        "loss_scale": to(0.0, refused="loss_scale is 0"),
        "**per_token": to({"factor": t(3, 2, 5)}),
    },
    "ModelWithLoss": {"model": to(linear(8, 3, D)), "loss": to(seqpar.LossCompute(linear(8), smoothing()))},
    "ModelWithLoss.forward": {
        "*inputs": to((t(8, 2, 5, D),)),
        "target": to(TARGET_BT.flip(1)),
        "per_token": to({"factor": t(3, 2, 5)}),
        "**keywords": to({"plus": 1.0}),
    },
    "MultiGPULossCompute": {
        "generator": to(Affine(8)),
        "criterion": to(seqpar.LabelSmoothing(0.3, "torch")),
        "devices": to(["cpu", "cpu"], see=at_once),
        "opt": Option(sgd),
        "chunk_size": to(2, see=at_once),
    },
    "MultiGPULossCompute.__call__": {
        "out": to(leaf(8, 2, 5, D)),
        "targets": to(TARGET_BT.flip(1)),
        "normalize": to(3.0),
        "**per_token": to({"factor": t(3, 2, 5)}),
    },
    "SparseTarget": {"ids": to(few() + 1), "probs": to(torch.tensor([0.5, 0.5]).expand(6, 2))},
    "TeacherHidden": {"hidden": to(t(8, 6, 3)), "weight": to(t(8, V, 3)), "bias": to(t(8, V))},
    "TeacherLogProbs": {"function": to(lambda rows: t(8, 6, V).log_softmax(-1)[rows])},
    "TeacherTopK": {
        "ids": to(few() + 1),
        "log_probs": to(torch.tensor([-3.0, -2.0]).expand(6, 2)),
        "rest": to("renormalize"),
    },
    "TokenLoss": {
        "total": to(torch.tensor(5.0)),
        "tokens": to(torch.tensor(4)),
        "nll": to(torch.tensor(5.0)),
        "correct": to(torch.tensor(1)),
    },
    "TokenScores": {
        "log_prob": to(torch.tensor(-2.0)),
        "entropy": to(torch.tensor(1.0)),
        "top_log_probs": to(torch.tensor([-1.0])),
        "top_ids": to(torch.tensor([1])),
        "log_probs_at": to(torch.tensor([-3.0])),
        "rank": to(torch.tensor(2)),
    },
    "TokenLoss.detach": {},
    "TokenLoss.zero": {"dtype": to(torch.float32), "device": to(torch.device("meta")), "tells": to(False)},
    "VocabShard": {
        "group": OVER_RANKS,
        "start": to(1, refused="from class 1 on"),
        "vocab_size": to(9, refused="[0, 9)"),
    },
    "VocabShard.of": {"weight_rows": to(9), "group": OVER_RANKS},
    "accumulate_gradients": {
        "micro_batches": to([t(1, 3), t(9, 3)]),
        "loss_of": to(twice),
        "tokens_of": to(lambda micro_batch: 2, refused="tokens_of counted 4 tokens in this step and the losses 6"),
        "model": to(Reducing(2, 2)),
        "group": OVER_RANKS,
        "backward": to(lambda loss: (3 * loss).backward()),
        "agree": OVER_RANKS,
    },
    "check_agreement": {"facts": OVER_RANKS, "group": OVER_RANKS, "numbers": to((3,))},
    "chunked_gradient": {
        "per_chunk": to(sine_chunk),
        "chunks": to([slice(0, 3)]),
        "per_token": to([leaf(8, 6, D)]),
        "params": to([leaf(8, D)]),
        "empty": to(seqpar.TokenLoss(torch.tensor(5.0).double(), torch.tensor(2))),
        "loss_scale": to(
            2.0**16,
            see=kept_in_float16,
            beside=lambda: {"per_token": [t(1, 6, D).half().requires_grad_()], "per_chunk": small_chunk},
        ),
    },
    "copy_to_group": {"tensor": to(leaf(8, 3)), "group": OVER_RANKS},
    "gather": {"outputs": to([t(1, 2, 2)]), "output_device": Option(meta, refused="output_device"), "dim": to(1)},
    "group_sum": {"tensor": to(t(8, 3)), "group": OVER_RANKS},
    "join_time": {"parts": to([t(2, 4, 4), t(1, 4, 4)]), "dim": to(0), "order": to("zigzag")},
    "linear_cross_entropy": {
        **LINEAR,
        "soft_target": to(seqpar.SparseTarget(few(), torch.tensor([0.75, 0.25]).expand(6, 2))),
        "label_smoothing": to(0.2),
        "smoothing_convention": to("fairseq", beside=lambda: {"label_smoothing": 0.2}),
        "z_loss": to(0.1),
        "softcap": to(2.0),
        "temperature": to(2.0),
        "class_weight": to(t(8, V).abs()),
        "token_weight": to(leaf(8, 6)),
        "loss_scale": to(2.0**16, see=kept_in_float16, beside=in_float16),
        "vocab": to(seqpar.VocabShard(None, 1, 8), refused="[1, 8)"),
        "memory": to("least", see=taken_again),
        "weight_grad": Option(
            lambda a: torch.zeros_like(a["weight"]).detach(), beside=lambda: {"memory": "least"}, see=of_weight
        ),
    },
    "linear_distillation": {
        **LINEAR,
        "target": to(torch.tensor([0, 2, -100, 5, 6, 1])),
        "teacher": to(seqpar.TeacherHidden(t(8, 6, 3), t(8, V, 3))),
        "divergence": to("reverse_kl"),
        "beta": to(0.1, beside=lambda: {"divergence": "jsd", "beta": 0.5}),
        "temperature": to(2.0),
        "token_weight": to(leaf(8, 6)),
        "loss_scale": to(2.0**16, see=kept_in_float16, beside=in_float16),
        "vocab": to(seqpar.VocabShard(None, 1, 8), refused="[1, 8)"),
    },
    "next_token_targets": {
        "tokens": to(tokens() + 1),
        "group": OVER_RANKS,
        "order": OVER_RANKS,
        "ignore_index": to(0),
    },
    "parallel_apply": {
        "modules": to([Affine(2), Affine(8)]),
        "inputs": to([t(1, D), t(8, D)]),
        "kwargs_tup": to([{"scale": 2.0}, {}]),
        "devices": to(["meta", "cpu"], refused="meta"),
    },
    "place": {"model": to(nn.Sequential(linear(1), nn.Tanh())), "parts": to({}, refused="0.weight")},
    "replicate": {"module": to(linear(8)), "device_ids": to(["cpu", "cpu"])},
    "scatter": {"inputs": to(t(8, 4, 4)), "device_ids": to(["cpu"] * 3), "dim": to(1), "sizes": to([3, 1])},
    "scored_loss": {
        **LINEAR,
        "loss": to(lambda scores, **_: scores.lse),
        "softcap": to(2.0),
        "temperature": to(2.0),
        "entropy": to(True),
        "ids": to(torch.tensor([[1], [4], [4], [3], [0], [5]])),
        "vocab": to(seqpar.VocabShard(None, 1, 8), refused="[1, 8)"),
        "loss_scale": to(2.0**16, see=kept_in_float16, beside=in_float16),
        "**per_token": to({"factor": t(3, 6)}),
    },
    "split_time": {"tensor": to(t(8, 4, 4)), "group": OVER_RANKS, "dim": OVER_RANKS, "order": OVER_RANKS},
    "sum_over_ranks": {
        "loss": to(seqpar.TokenLoss(torch.tensor(5.0), torch.tensor(3))),
        "group": OVER_RANKS,
    },
    "time_steps": {"time": to(6), "rank": to(1), "world": to(4), "order": to("zigzag")},
    "token_scores": {
        **LINEAR,
        "softcap": to(2.0),
        "temperature": to(2.0),
        "entropy": to(True),
        "top_k": to(2),
        "ids": to(torch.tensor([[1], [4], [4], [3], [0], [5]])),
        "product_dtype": to(torch.float32),
        "rank": to(True),
        "batch_invariant": to(True, see=at_once),
        "vocab": to(seqpar.VocabShard(None, 1, 8), refused="[1, 8)"),
    },
}
