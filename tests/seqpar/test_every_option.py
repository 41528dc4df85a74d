"""Every option does something: each parameter of each public function is changed alone, and the outcome differs.

The parameters are those of the signatures, so one that is added without an entry fails. `option_calls.CALLS` holds a
call of each function; `option_values.OPTIONS` what each parameter is changed to, and where its effect is seen if not in
the numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

import seqpar
from seqpar import names
from seqpar.testing.ranks import ranks
from tests.on_device import Nowhere
from tests.seqpar.option_calls import (
    CALLS,
    WATCH,
    Arguments,
    Call,
    D,
    See,
    Seen,
    V,
    accumulated,
    dot,
    leaf,
    linear_arguments,
    plain,
    t,
    tokens,
)
from tests.seqpar.option_values import OPTIONS, OVER_RANKS


def shard_loss(shard: seqpar.VocabShard) -> object:
    return plain(seqpar.linear_cross_entropy(**linear_arguments(), vocab=shard))


def refusal(function: Callable[..., Any], *arguments: Any, **given: Any) -> str:
    try:
        function(*arguments, **given)
    except RuntimeError as error:
        return str(error)
    return "agreed"


def step(group: Any, agree: Mapping[str, object] | None = None) -> object:
    return accumulated(micro_batches=[t(1, 3)], loss_of=dot, tokens_of=lambda _: 3, group=group, agree=agree)


def copied(group: dist.ProcessGroup | None) -> object:
    tensor = leaf(1, 3)
    return plain(torch.autograd.grad((seqpar.copy_to_group(tensor, group) ** 2).sum(), tensor))


def over_two_ranks(rank: int, world: int) -> dict[str, tuple[object, object]]:
    """Of every option that needs ranks: the outcome without it, and with it."""
    group, whole = dist.group.WORLD, t(1, 4, 8)
    loss = seqpar.TokenLoss(torch.tensor(2.0), torch.tensor(3))
    targets, cut = seqpar.next_token_targets, seqpar.split_time
    zigzag = cut(tokens()[:, :4], group, order="zigzag")
    return {
        "VocabShard.group": (
            shard_loss(seqpar.VocabShard(None, 0, V)), shard_loss(seqpar.VocabShard(group, rank * V, 2 * V))
        ),
        "VocabShard.of.group": (
            seqpar.VocabShard.of(V, None).vocab_size, seqpar.VocabShard.of(V, group).vocab_size
        ),
        "accumulate_gradients.group": (step(seqpar.THIS_PROCESS), step(group)),
        "accumulate_gradients.agree": (refusal(step, group), refusal(step, group, {"x": rank})),
        "check_agreement.facts": (
            refusal(seqpar.check_agreement, {"x": 1}, group), refusal(seqpar.check_agreement, {"x": rank}, group)
        ),
        "check_agreement.group": (
            seqpar.check_agreement({}, None, [rank]), seqpar.check_agreement({}, group, [rank])
        ),
        "copy_to_group.group": (copied(None), copied(group)),
        "group_sum.group": (plain(seqpar.group_sum(whole, None)), plain(seqpar.group_sum(whole, group))),
        "next_token_targets.group": (plain(targets(tokens() + rank, None)), plain(targets(tokens() + rank, group))),
        "next_token_targets.order": (plain(targets(zigzag, group)), plain(targets(zigzag, group, order="zigzag"))),
        "split_time.group": (plain(cut(whole, None)), plain(cut(whole, group))),
        "split_time.dim": (plain(cut(whole, group)), plain(cut(whole, group, 0))),
        "split_time.order": (plain(cut(whole, group)), plain(cut(whole, group, order="zigzag"))),
        "sum_over_ranks.group": (plain(seqpar.sum_over_ranks(loss, None)), plain(seqpar.sum_over_ranks(loss, group))),
    }  # fmt: skip


NOT_FOR_CALLERS = {"extra_repr", "named_modules"} | {
    f"VocabShard.{name}" for name in ("check", "meet", "locate", "gather", "rank")
}
"""What only torch, and the losses themselves, call."""


def parameters_of(function: Callable[..., Any]) -> set[str]:
    """The parameters of a signature, those that take many with their stars."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = inspect.signature(function).parameters.values()
    return {stars.get(each.kind, "") + each.name for each in found if each.name != "self"}


def public_parameters() -> dict[str, set[str]]:
    """Of every public function, class, and method that a public class defines."""
    found: dict[str, set[str]] = {}
    for name in names.__all__:
        public = getattr(names, name)
        if not callable(public):
            continue
        found[name] = parameters_of(public)
        methods = vars(public) if inspect.isclass(public) else {}
        for method in methods:
            called = getattr(public, method)
            shown = not method.startswith("_") or method == "__call__"
            if (
                shown
                and inspect.isroutine(called)
                and callable(called)
                and not {method, f"{name}.{method}"} & NOT_FOR_CALLERS
            ):
                found[f"{name}.{method}"] = parameters_of(called)
    return found


def test_every_parameter_of_every_public_function_has_an_entry() -> None:
    expected = {function: sorted(parameters) for function, parameters in public_parameters().items()}
    assert {function: sorted(options) for function, options in OPTIONS.items()} == expected, "say what the new one does"
    assert CALLS.keys() == OPTIONS.keys()


LOCAL = [(f, name) for f, options in OPTIONS.items() for name, option in options.items() if option is not OVER_RANKS]
IN_GROUPS = {
    f"{f}.{name}" for f, options in OPTIONS.items() for name, option in options.items() if option is OVER_RANKS
}


def outcome(call: Call, arguments: Arguments, see: See) -> object:
    """What is seen of one call, if the library makes nothing on the default device."""
    given = dict(arguments)
    many = [given.pop(name) for name in list(given) if name.startswith("**")]
    positional = [each for name in list(given) if name.startswith("*") for each in given.pop(name)]
    keywords = given | {name: value for more in many for name, value in more.items()}
    with WATCH, Nowhere():
        WATCH.rows = 0
        result = call.function(*positional, **keywords)
        return see(Seen(result, arguments, WATCH.rows))


@pytest.mark.parametrize(("function", "name"), LOCAL, ids=[f"{function}.{name}" for function, name in LOCAL])
def test_an_option_that_is_changed_alone_changes_the_outcome(function: str, name: str) -> None:
    call, option = CALLS[function], OPTIONS[function][name]
    see = option.see or call.see
    before = outcome(call, call.arguments() | option.beside(), see)
    fresh = call.arguments() | option.beside()
    changed = fresh | {name: option.value(fresh)}
    if option.refused:
        with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
            outcome(call, changed, see)
        assert option.refused in " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
        return
    assert outcome(call, call.arguments() | option.beside(), see) == before, "the call itself is not repeatable"
    after = outcome(call, changed, see)
    assert after != before
    assert "'meta'" not in repr(before)
    assert ("'meta'" in repr(after)) == ("meta" in repr(changed[name])), "made without the device of the inputs"


LARGE = 60_000.0
"""Above half of float16's largest number: with a factor of 2 it would be inf."""


def large_gradients() -> dict[str, Callable[[torch.Tensor], seqpar.TokenLoss]]:
    """Of each function that has a loss scale: a loss without one, whose gradients are large in float16."""
    weight = torch.zeros(V, D).half()
    weight[0] = -LARGE
    head = torch.nn.Linear(D, V, bias=False).half()
    head.weight = torch.nn.Parameter(weight.clone())
    target = torch.zeros(6, dtype=torch.int64)
    engine = seqpar.LossCompute(head, seqpar.CrossEntropy())
    teacher = seqpar.TeacherTopK(target.unsqueeze(1), torch.zeros(6, 1), "one_class")

    def likelihood(scores: Any) -> torch.Tensor:
        return -scores.log_prob

    def walked(hidden: torch.Tensor) -> seqpar.TokenLoss:
        empty = seqpar.TokenLoss(torch.tensor(0.0), torch.tensor(0))
        return seqpar.chunked_gradient(
            lambda _, rows, __: seqpar.TokenLoss(rows[0].float().sum() * LARGE, torch.tensor(6)),
            [slice(0, 6)], [hidden], [], empty,
        )  # fmt: skip

    return {
        "LossCompute.forward": lambda hidden: engine(hidden, target),
        "LossCompute.scored_loss": lambda hidden: engine.scored_loss(hidden, target, likelihood),
        "chunked_gradient": walked,
        "linear_cross_entropy": lambda hidden: seqpar.linear_cross_entropy(hidden, weight, target),
        "linear_distillation": lambda hidden: seqpar.linear_distillation(
            hidden, weight, teacher, target, divergence="forward_kl"
        ),
        "scored_loss": lambda hidden: seqpar.scored_loss(hidden, weight, target, likelihood),
    }


@pytest.mark.parametrize("function", [f for f, options in OPTIONS.items() if "loss_scale" in options])
def test_a_gradient_that_fits_in_float16_is_not_scaled_unless_a_scale_is_given(function: str) -> None:
    hidden = torch.zeros(6, D).half().requires_grad_()
    (gradient,) = torch.autograd.grad(large_gradients()[function](hidden).total, hidden)
    assert (gradient > 0.8 * LARGE).all()
    assert gradient.isfinite().all()


def test_an_option_that_needs_ranks_changes_the_outcome_over_two_of_them() -> None:
    everyone = ranks(2, over_two_ranks)
    for found in everyone:
        assert found.keys() == IN_GROUPS
    for name in IN_GROUPS:  # the last rank's targets are the same alone
        assert any(without != with_it for without, with_it in (found[name] for found in everyone)), name
