"""Training steps over several ranks, each with a mistake that was published, written anew from its description.

Of the twelve findings of Megatron-LM#7452 here are 1 (megatron_737), 2 (megatron_7452), 3 to 5 (_mtp_counts, _padding,
_recompute), 9 (megatron_7513) and 10 to 12 (_router, _replicated, _layers); 8 is about the norm of gradients
(megatron_7452_norm in tests/seqpar/testing/test_same_step.py), and 6 and 7 are not here. `OTHER` are siblings of
published ones.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from conformance.layout_adapter import EVERY_LAYOUT, LayoutAdapter
from conformance.layout_adapters import (
    Both,
    Loss,
    accumulated,
    over_survivors,
    pipelined,
    run_micro_batches,
    seqpar_loss,
    sum_over_time,
    torch_loss,
    torch_step,
    train,
    trunk,
    wrapped,
)
from seqpar.distributed.collectives import (
    copy_to_group,
    group_gather,
    group_max,
    group_sum,
    rank_in,
    sum_from_group,
    world_size,
)

HEAD = "head.weight"


def counted(work):
    """The targets of each micro-batch that count."""
    return [(target != work.ignore_index).sum() for _, target in work.micro_batches]


def own_tokens(work):
    """How many of this rank's targets count."""
    return sum(counted(work))


def step_tokens(work):
    """How many of all ranks' targets count."""
    return group_sum(own_tokens(work), work.token_group).clamp(min=1)


def rows(work):
    """The number of all ranks' targets, ignored ones too."""
    return sum(target.numel() for _, target in work.micro_batches) * world_size(work.token_group)


def both_of(work):
    return Both(work.model, Loss(work, torch_loss))


def vocabulary_of(work, *mistakes):
    return Both(trunk(work), VocabLoss(work, **dict.fromkeys(mistakes)))


def wrapped_both(work):
    return wrapped(both_of(work), work)


def factor_of(wrong=lambda work, number: 1, both=wrapped_both):
    """A step that is right but for this factor of each micro-batch's gradient, given the work and the batch's number.

    Its mean loss is as it should be.
    """

    def step(work):
        module, total, count = both(work), torch.zeros((), dtype=torch.float64), step_tokens(work)
        for number, batch in enumerate(work.micro_batches):
            loss = module(*batch)
            right = world_size(work.token_group) / float(count)
            (loss * right * wrong(work, number) * work.loss_scale).backward()
            total += loss.detach()
        return group_sum(total, work.token_group) / count

    return step


def divided_by(divisor):
    """The factor of a sum that is divided by this number, and by no tokens; its mean over the ranks is taken."""
    return lambda work, number: step_tokens(work) / world_size(work.token_group) / float(divisor(work, number))


def last_micro_batch_only(work):
    """Gradients are set to zero before every micro-batch."""
    both = wrapped_both(work)

    def emptied(work, number):
        both.zero_grad()
        return 1

    return factor_of(emptied, lambda work: both)(work)


def own_over_shifted(work, number):
    """A loss of the next but one targets: normalised by those of this rank, and weighted by its others."""
    shifted = sum((target[:, 1:] != work.ignore_index).sum() for _, target in work.micro_batches).clamp(min=1)
    return own_tokens(work) / shifted.double()


def of_row(work, number):
    """The tokens of the ranks that a weight is sharded over, and not of those that replicate it, per such rank."""
    near = work.token_mesh.get_group("near")
    return group_sum(own_tokens(work), near).clamp(min=1) / world_size(near)


def skips_a_rank_without_tokens(work):
    if not own_tokens(work):
        return None
    return torch_step(work)


def nothing(work):
    torch_step(work)


def raises_on_one_rank(work):
    if rank_in(work.token_group) == 1:
        raise KeyError("nobody")


def head_gathered_as_if_replicated(work):
    """FSDP2's sharded head, gathered outside the forward that would reduce its gradient."""
    mesh = DeviceMesh.from_group(work.token_group, "cpu")
    fully_shard(work.model.head, mesh=mesh)
    count = group_sum(own_tokens(work), work.token_group)
    tokens, target = work.micro_batches[0]
    weight = work.model.head.weight.full_tensor()
    loss = F.cross_entropy(F.linear(work.model(tokens), weight).flatten(0, 1), target.flatten(), reduction="sum")
    (loss / count).backward()
    for name, parameter in work.model.named_parameters():
        if name != HEAD:
            parameter.grad = group_sum(parameter.grad, work.token_group)
    return group_sum(loss.detach(), work.token_group) / count


def untied(work, hidden, target):
    """The loss of a generator that has a copy of the embedding's weight."""
    logits = F.linear(hidden, work.model.head.weight.detach().clone()).flatten(0, -2)
    return F.cross_entropy(logits, target.flatten(), reduction="sum")


def tie_missed(work):
    is_tied = work.model.head.weight is getattr(work.model.embed, "weight", None)
    return train(work, untied if is_tied else torch_loss)


def shifted_again(work):
    """Targets that are the next tokens already, shifted once more within a rank's time steps."""
    shifted = [(tokens, F.pad(t[:, 1:], (0, 1), value=work.ignore_index)) for tokens, t in work.micro_batches]
    work.micro_batches[:] = shifted
    return torch_step(work)


def never_divided_in_the_pipeline(work):
    """The schedule runs backward from the sum; only the number that is reported is divided."""
    count = own_tokens(work)
    reported = pipelined(work, lambda hidden, target: torch_loss(work, hidden, target) * count)
    return None if reported is None else reported / count


def divided_by_micro_batches_too(work):
    reported = pipelined(work, lambda hidden, target: torch_loss(work, hidden, target) / len(work.micro_batches))
    return None if reported is None else reported * len(work.micro_batches)


def no_gradient_sum(tensor, group):
    """The sum over the ranks as `torch.distributed.all_reduce` has it, of which autograd knows nothing."""
    return tensor + (group_sum(tensor.detach(), group) - tensor.detach())


class VocabLoss(nn.Module):
    """A cross-entropy over a split vocabulary, right unless told otherwise."""

    def __init__(self, work, **mistakes):
        super().__init__()
        self.head, self.work, self.mistakes = work.model.head, work, mistakes

    def forward(self, hidden, target):
        work, wrong = self.work, self.mistakes
        group, start, weight = work.vocab_group, work.start, self.head.weight
        hidden = hidden if "hidden" in wrong else copy_to_group(hidden, group)
        if "even start" in wrong:
            start = rank_in(group) * len(weight)
        if "gathered" in wrong:
            parts = group_gather(weight.detach(), group)
            parts[rank_in(group)] = weight
            weight, start = torch.cat(parts), rank_in(group) * work.vocab_size
        logits, target = F.linear(hidden, weight).flatten(0, -2), target.flatten()
        kept = target != work.ignore_index
        logits, target = logits[kept], target[kept] - start
        vocab_size = work.vocab_size
        if "padded" in wrong:
            most = -(-vocab_size // world_size(group))
            logits = F.pad(logits, (0, most - logits.size(1)))
        here = (target >= 0) & (target < logits.size(1))
        highest = group_max(logits.detach().amax(-1), group)
        total = sum_from_group((logits - highest.unsqueeze(-1)).exp().sum(-1), group)
        if "own softmax" in wrong:
            total = (logits - highest.unsqueeze(-1)).exp().sum(-1)
        lse = highest + total.log()
        if "identity" in wrong:  # log-softmax hands its gradient on as it is
            lse = lse.detach()
        index = target.where(here, 0).unsqueeze(1)
        if "picked" in wrong:
            log_probs = logits - lse.unsqueeze(1)
            return -no_gradient_sum(log_probs.gather(1, index).squeeze(1) * here, group).sum()
        picked = logits.gather(1, index).squeeze(1) * here
        nll = (lse - (picked if "own target" in wrong else sum_from_group(picked, group))).sum()
        if not work.label_smoothing or "unsmoothed" in wrong:
            return nll
        eps, mean = work.label_smoothing, sum_from_group(logits.sum(-1), group) / vocab_size
        if "local smoothing" in wrong:
            mean = logits.mean(-1)
        return (1 - eps) * nll - eps * (mean - lse).sum()


def vocabulary(*mistakes):
    def step(work):
        return accumulated(work, wrapped(vocabulary_of(work, *mistakes), work))

    return step


def head_reduced_twice(work):
    loss = torch_step(work)
    work.model.head.weight.grad = group_sum(work.model.head.weight.grad, work.token_group)
    return loss


def scaled_experts(which, times):
    """A step that is right but for the gradients of some parameters of the experts' layer."""

    def step(work):
        loss = torch_step(work)
        for name, parameter in work.model.named_parameters():
            if which in name and parameter.requires_grad:
                parameter.grad *= times(work)
        return loss

    return step


def reported(change):
    """A step whose gradients are right, and whose loss is not."""

    def step(work):
        loss = torch_step(work)
        return None if loss is None else change(work, loss)

    return step


def own_mean(work, loss):
    own = [torch_loss(work, work.model(tokens), target).detach() for tokens, target in work.micro_batches]
    return sum(own) / own_tokens(work)


def router(times):
    """A router's loss that is another one, because the ranks count otherwise than its reduction does."""

    def step(work):
        experts = work.model.experts
        right = experts.auxiliary

        def wrong(rows, group):
            loss = right(rows, group)
            return loss.detach() + (loss - loss.detach()) * times(work)

        experts.auxiliary = wrong
        return torch_step(work)

    return step


def one_parameter_of_own_time_steps(work):
    """A replicated parameter is left out of the sum over the ranks that have other time steps."""
    group, bias = work.token_group, work.model.layers[0].bias
    count = group_sum(own_tokens(work), group)
    both = wrapped(Both(trunk(work), VocabLoss(work)), work)
    total = run_micro_batches(work, both, world_size(group) / count.double())
    own = bias.grad.clone()
    sum_over_time(work)
    bias.grad = own
    return group_sum(total, group) / count


def of_next_rank(tensor, group):
    """What a collective over the wrong group would return in place of this rank's own."""
    return group_gather(tensor, group)[(rank_in(group) + 1) % world_size(group)]


def recomputed_from_another_rank(work):
    """Backward recomputes its activations from those of another rank with the same classes."""
    ((tokens, target),) = work.micro_batches
    loss = VocabLoss(work)
    work.micro_batches[:] = [(of_next_rank(tokens, work.token_group), target)]
    accumulated(work, wrapped(Both(work.model, loss), work))
    total, count = loss(work.model(tokens), target).detach(), own_tokens(work)
    return group_sum(total, work.token_group) / group_sum(count, work.token_group)


def padding_of_another_rank(work):
    ((tokens, target),) = work.micro_batches
    kept = of_next_rank(target, work.token_group) != work.ignore_index
    work.micro_batches[:] = [(tokens, target.where(kept, work.ignore_index))]
    return accumulated(work, wrapped(Both(work.model, VocabLoss(work)), work))


def layers_by_their_numbers_in_a_stage(work):
    """Weights are loaded by the layers' names within a stage, of which each begins at 0."""
    for stage in work.stages.values():
        if hasattr(stage, "layer"):
            stage.layer.load_state_dict(work.model.layers[0].state_dict())
    return torch_step(work)


def lost_tokens_counted(work):
    count = group_sum(own_tokens(work), work.token_group)
    total = run_micro_batches(work, both_of(work))
    mine = own_tokens(work)
    right = over_survivors(work, total, mine)
    survivors = group_sum(mine, work.survivors())
    for parameter in filter(lambda p: p.grad is not None, work.model.parameters()):
        parameter.grad *= survivors / count
    return right


class HiddenSummedAgain(nn.Module):
    """A model of DTensors, whose hidden gradient is taken for that of one rank's classes, and summed over them."""

    def __init__(self, work):
        super().__init__()
        self.model = trunk(work)
        self.group = work.vocab_group

    def forward(self, tokens):
        return copy_to_group(self.model(tokens), self.group)


def summed_by_the_plan_too(work):
    both = Both(HiddenSummedAgain(work), Loss(work, seqpar_loss))
    count = own_tokens(work)
    total = both.loss(both.model(work.micro_batches[0][0]), work.micro_batches[0][1]).total
    (total / count * work.loss_scale).backward()
    return total.detach() / count


MEAN_OF_RANKS_MEANS = factor_of(divided_by(lambda w, n: own_tokens(w).clamp(min=1)))
MEAN_OF_BATCHES_MEANS = factor_of(divided_by(lambda w, n: counted(w)[n].clamp(min=1) * len(w.micro_batches)))
AVERAGED_ONCE_MORE = factor_of(lambda w, n: 1 / world_size(w.token_group))
DIVIDED_BY_THE_WORLD = factor_of(lambda w, n: step_tokens(w) / group_sum(own_tokens(w), dist.group.WORLD), both_of)
# By those with the same tokens, too
MULTIPLIED_BY_ALL_RANKS = factor_of(lambda w, n: world_size(w.vocab_group), both=lambda w: wrapped(vocabulary_of(w), w))
# Averaged over the ranks that have the same experts, though those of all ranks are in them
EXPERTS_OF_EVERY_RANK = scaled_experts(".experts.", lambda work: world_size(work.expert_group))
SOURCES = {
    "automodel": "NVIDIA-NeMo/Automodel",
    "megatron": "NVIDIA/Megatron-LM",
    "miles": "radixark/miles",
    "ml_cross_entropy": "apple/ml-cross-entropy",
    "ms_swift": "modelscope/ms-swift",
    "pytorch": "pytorch/pytorch",
    "skyrl": "NovaSky-AI/SkyRL",
    "speculators": "vllm-project/speculators",
    "torchtitan": "pytorch/torchtitan",
    "transformers": "huggingface/transformers",
    "trl": "huggingface/trl",
    "veomni": "ByteDance-Seed/VeOmni",
    "verl_speco": "verl-project/verl-SpeCo",
}
"""Where each project's mistakes were published: https://github.com/SOURCE/issues/NUMBER."""
PUBLISHED = {
    "data parallel: unequal tokens": {
        "speculators_942": (MEAN_OF_RANKS_MEANS, "mean of means: each rank divides by its own tokens"),
        "trl_7245": (factor_of(both=lambda w: wrapped_both(w).module), "not reduced over ranks"),
    },
    "accumulation: unequal tokens": {
        "ms_swift_10165": (MEAN_OF_BATCHES_MEANS, "mean of means: each micro-batch is divided by its own tokens"),
        "skyrl_1504": (factor_of(divided_by(lambda w, n: len(w.micro_batches))), "not divided by the tokens"),
    },
    "FSDP2: unequal tokens": {
        "verl_speco_29": (AVERAGED_ONCE_MORE, "divided by ranks twice"),
        "miles_3231": (factor_of(divided_by(lambda w, n: 1)), "not divided by the tokens"),
        "automodel_3414": (head_gathered_as_if_replicated, "not reduced over ranks: each rank's rows of head.weight"),
    },
    "split sequence: unequal tokens": {
        "veomni_1115": (factor_of(both=both_of), "not reduced over ranks"),
        "skyrl_1420": (AVERAGED_ONCE_MORE, "divided by ranks twice"),
        "skyrl_1751": (
            factor_of(lambda w, n: world_size(w.token_group)),
            "multiplied by the number of ranks once too often",
        ),
        "ms_swift_10185": (shifted_again, "targets shifted twice"),
    },
    "data parallel: a rank without tokens": {"automodel_2468": (skips_a_rank_without_tokens, "it hangs")},
    "data parallel: tied weights": {"megatron_656": (tie_missed, "a missed tie")},
    "pipeline: unequal tokens": {
        "torchtitan_2972": (never_divided_in_the_pipeline, "not divided by the tokens"),
        "torchtitan_1733": (
            divided_by_micro_batches_too,
            "divided by the number of micro-batches as well as by the tokens",
        ),
        "megatron_7452_layers": (layers_by_their_numbers_in_a_stage, "layers of another stage"),
    },
    "split vocabulary: unequal tokens": {
        "megatron_7452": (vocabulary("gathered"), "off by log(ranks)"),
        "ms_swift_9947": (
            vocabulary("picked"),
            "gradient of one rank's classes missing: a token reaches only the classes of the rank that has its target",
        ),
        "ml_cross_entropy_42": (
            vocabulary("hidden"),
            "gradient of one rank's classes missing: the hidden gradient is not summed over the vocabulary's ranks",
        ),
        "pytorch_190746": (vocabulary("identity"), "the softmax has no gradient"),
    },
    "data x sequence: unequal tokens": {
        "megatron_7452_mtp_counts": (
            factor_of(own_over_shifted),
            "each rank's loss is scaled by a ratio of its own counts",
        ),
    },
    "data x vocabulary: unequal tokens": {
        "megatron_7452_recompute": (
            recomputed_from_another_rank,
            "a collective over the wrong group: activations of another rank",
        ),
        "megatron_7452_padding": (
            padding_of_another_rank,
            "a collective over the wrong group: padding of another rank",
        ),
        "transformers_45994": (MULTIPLIED_BY_ALL_RANKS, "multiplied by the number of ranks once too often"),
    },
    "expert parallel: unequal tokens": {
        "megatron_7452_router": (
            router(lambda work: world_size(work.expert_group)),
            "the router's auxiliary loss is 2 times the right one",
        ),
        "pytorch_160285": (EXPERTS_OF_EVERY_RANK, "a gradient is reduced twice: that of layers.0.experts."),
        "megatron_1652": (
            router(lambda work: 1 / world_size(work.expert_group)),
            "the router's auxiliary loss is 1/2 times the right one",
        ),
    },
    "sequence x vocabulary: unequal tokens": {
        "megatron_7452_replicated": (
            one_parameter_of_own_time_steps,
            "not reduced over ranks: of layers.0.bias each rank keeps the gradient of its own time steps",
        ),
    },
    "split vocabulary: label smoothing": {
        "megatron_737": (vocabulary("local smoothing"), "smoothing spread over the local classes"),
    },
    "split vocabulary: odd vocabulary": {
        "megatron_1754": (vocabulary("padded"), "padded classes are counted in the softmax"),
    },
    "data x sequence: padding on one rank only": {
        "megatron_7513": (MEAN_OF_RANKS_MEANS, "mean of means: each rank divides by its own tokens"),
    },
    "data x expert: unequal tokens": {
        "megatron_5956": (EXPERTS_OF_EVERY_RANK, "a gradient is reduced twice: that of layers.0.experts.0.weight, "),
        "megatron_5047": (
            router(lambda work: world_size(work.token_group)),
            "the router's auxiliary loss is 4 times the right one",
        ),
    },
}
"""By the check that catches it: a published mistake, named by its project and number, the step, and the cause named."""
OTHER = {
    "accumulation: unequal tokens": {"last_only": (last_micro_batch_only, "only the gradient of the last micro-batch")},
    "data parallel: unequal tokens": {
        "all_rows": (factor_of(lambda w, n: step_tokens(w) / rows(w)), "divided by all rows, including padding"),
        "two_silent": (factor_of(lambda w, n: rank_in(w.token_group) < 2), "4 ranks: ranks 2 and 3 contribute nothing"),
        "own_loss": (
            reported(own_mean),
            "not reduced over ranks: each rank reports the loss of its own tokens; only the value is wrong",
        ),
        "head_twice": (
            head_reduced_twice,
            "a gradient is reduced twice: that of head.weight is 2 times the plain one, and no other",
        ),
    },
    "FSDP2: loss scale": {"scaled_twice": (factor_of(lambda w, n: w.loss_scale), "the loss scale is applied twice")},
    "data parallel: loss scale": {"unscaled": (factor_of(lambda w, n: 1 / w.loss_scale), "the loss scale is missing")},
    "data parallel: tied weights": {
        "silent": (factor_of(lambda w, n: rank_in(w.token_group) != 1), "rank 1 contributes"),
    },
    "HSDP: unequal tokens": {
        "row_of_the_mesh": (
            factor_of(divided_by(of_row)),
            "mean of means: ranks divide by the tokens of their row of the mesh",
        ),
    },
    "sequence x vocabulary: unequal tokens": {
        "own_time": (
            factor_of(both=lambda w: wrapped(vocabulary_of(w), w)),
            "not reduced over ranks: below the generator each rank keeps the gradient of its own time steps",
        ),
    },
    "DiLoCo's inner step: unequal tokens": {"world": (DIVIDED_BY_THE_WORLD, "divided by ranks twice")},
    "a replica that goes away: unequal tokens": {
        "lost": (lost_tokens_counted, "divided by the tokens of the rank that is lost, too"),
    },
    "data x expert: unequal tokens": {
        "experts_averaged": (
            scaled_experts(".experts.", lambda work: 1 / world_size(work.data_group)),
            "a gradient is divided by ranks twice: that of layers.0.experts.0.weight, ",
        ),
    },
    "expert parallel: unequal tokens": {
        "shared_expert": (
            scaled_experts(".shared.", lambda work: world_size(work.expert_group)),
            "a gradient is reduced twice: that of layers.0.shared.weight, layers.0.shared.bias is 2 times",
        ),
    },
    "pipeline: unequal tokens": {
        "averaged_loss": (
            reported(lambda work, loss: loss / world_size(work.pipeline_group)),
            "all gradients are right, only the value is wrong: 1/2 times the plain one",
        ),
    },
    "DTensor model: unequal tokens": {
        "plan": (
            summed_by_the_plan_too,
            "a gradient is reduced twice: that of embed.weight, layers.0.weight, layers.0.bias is 2 times",
        ),
    },
    "zero bubble: unequal tokens": {"halves": (never_divided_in_the_pipeline, "not divided by the tokens")},
    "FSDP2 x vocabulary: unequal tokens": {"gathered_shards": (vocabulary("gathered"), "off by log(ranks)")},
    "HSDP x vocabulary: unequal tokens": {
        "hidden_alone": (vocabulary("hidden"), "the hidden gradient is not summed over the vocabulary's ranks"),
    },
    "FSDP2: unequal tokens": {"uphill": (factor_of(lambda w, n: -1), "the wrong sign: all gradients are -1 times")},
    "split vocabulary: unequal tokens": {
        "own_softmax": (vocabulary("own softmax"), "the softmax is over one rank's classes"),
        "own_target": (vocabulary("own target"), "the target's logit counts only on"),
    },
    "data x vocabulary: label smoothing": {"unsmoothed": (vocabulary("unsmoothed"), "label smoothing is left out")},
    "split vocabulary: odd vocabulary": {"even_start": (vocabulary("even start"), "uneven parts")},
}
"""The same of mistakes without a source, for the causes that no published one has."""
LAYOUT_MISTAKES, OTHER_MISTAKES = (
    {name: (step, about, cause) for about, of in table.items() for name, (step, cause) in of.items()}
    for table in (PUBLISHED, OTHER)
)
for name, (step, *_) in (LAYOUT_MISTAKES | OTHER_MISTAKES).items():
    globals()[name] = LayoutAdapter(name, step)
for name, step, offers in (
    ("raises_on_rank_1", raises_on_one_rank, EVERY_LAYOUT),
    ("returns_nothing", nothing, EVERY_LAYOUT),
    ("not_a_number", factor_of(lambda w, n: float("nan")), EVERY_LAYOUT),
    ("right", vocabulary(), {"split vocabulary", "data x vocabulary", "float64", "smoothing"}),
):
    globals()[name] = LayoutAdapter(name, step, offers)
