"""Masks that are given mean over split time steps what they mean on one device: values and gradients are the same."""

import functools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import seqpar
from models import TransformerConfig, beam_search, greedy, make_transformer, padding_mask, subsequent_mask
from models.sharding import split_time_steps, split_weights
from seqpar.testing.ranks import ranks

PAD, B, S, T, H = 0, 3, 5, 5, 2


def model():
    torch.manual_seed(3)
    config = TransformerConfig(8, 12, H, 2, 2, dropout=0.0, norm="pre", tie="none")
    return make_transformer(config, 9, 9, pad=PAD).double()


def tokens(target):
    generator = torch.Generator().manual_seed(4)
    src, tgt = (torch.randint(1, 9, (B, time), generator=generator) for time in (S, target))
    src[1, 3:] = PAD
    return src, tgt


def random_mask(*shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(5)) < 0.5
    mask[..., 0] = True  # nobody may be left with nothing to see
    return mask


MASKS = {
    "one row for every query": lambda time: {"tgt_mask": random_mask(1, 1, 1, time)},
    "one row for each sentence's queries": lambda time: {"tgt_mask": random_mask(B, 1, 1, time)},
    "a row for each query": lambda time: {"tgt_mask": random_mask(1, 1, time, time)},
    "a row for each query of each head": lambda time: {"tgt_mask": random_mask(B, H, time, time)},
    "causal with padding": lambda time: {
        "tgt_mask": subsequent_mask(time) & padding_mask(tokens(time)[1], 1) | torch.eye(time).bool()
    },
    "source positions": lambda time: {"src_mask": random_mask(B, 1, 1, S)},
    "a row for each source position": lambda time: {"src_mask": random_mask(B, H, S, S)},
    "both": lambda time: {"src_mask": random_mask(B, 1, 1, S), "tgt_mask": random_mask(B, 1, time, time)},
}


def outcome(whole, hidden, group=None):
    """Hidden states, and the gradients of a loss that weighs each of this rank's numbers differently."""
    weights = torch.linspace(0.5, 2.0, B * hidden["time"] * 8, dtype=torch.float64).view(B, hidden["time"], 8)
    (hidden["states"] * seqpar.split_time(weights, group)).sum().backward()
    grads = {name: p.grad for name, p in whole.named_parameters() if not name.startswith("generator")}
    return hidden["states"].detach(), grads


@functools.cache
def time_group(world):
    """Made once, in every rank."""
    return init_device_mesh("cpu", (world,), mesh_dim_names=("sequence",))["sequence"].get_group()


def over_ranks(rank, world, kind, time, by_name):
    group, split = time_group(world), model()
    split_time_steps(split, group)
    src, tgt = tokens(time)
    masks = MASKS[kind](time)
    states = split(src, tgt, **masks) if by_name else split(src, tgt, masks.get("src_mask"), masks.get("tgt_mask"))
    states, grads = outcome(split, {"states": states, "time": time}, group)
    return states, {name: seqpar.group_sum(grad, group) for name, grad in grads.items()}


@pytest.mark.parametrize(("world", "by_name"), [(2, True), (3, False)])
@pytest.mark.parametrize("kind", list(MASKS))
def test_a_given_mask_is_cut_by_queries_where_it_has_a_row_for_each(kind, world, by_name):
    for time in {T, 1 if kind.startswith("one row") else T}:
        src, tgt = tokens(time)
        whole = model()
        expected, expected_grads = outcome(whole, {"states": whole(src, tgt, **MASKS[kind](time)), "time": time})
        answers = ranks(world, over_ranks, kind, time, by_name)
        joined = seqpar.join_time([states for states, _ in answers])
        torch.testing.assert_close(joined, expected, rtol=1e-12, atol=1e-12)
        for _, grads in answers:
            torch.testing.assert_close(grads, expected_grads, rtol=1e-11, atol=1e-12)


def split_generator(rank, world):
    whole, split = model(), model()
    for parameter in split.src_embed.parameters():
        parameter.requires_grad_(False)
    split_weights(split, torch.distributed.group.WORLD)
    generator, frozen = split.generator, split.src_embed.lookup.weight
    described = (generator.in_features, generator.out_features, tuple(generator.weight.shape), frozen.requires_grad)
    kept = sum(p.untyped_storage().nbytes() for p in split.parameters())
    return described, kept, sum(p.untyped_storage().nbytes() for p in whole.parameters())


def test_a_split_generator_says_how_many_rows_it_has_and_only_parts_are_kept():
    for rows, (described, kept, whole) in zip((5, 4), ranks(2, split_generator), strict=True):
        assert described == (8, rows, (rows, 8), False)
        assert kept < 0.62 * whole


def refusals(rank, world):
    split = model()
    split_time_steps(split, time_group(world))
    (src, tgt), said = tokens(T + 1), []
    for masks in (
        {"tgt_mask": random_mask(1, 1, T, T + 1)},
        {"src_mask": random_mask(1, 1, S, S)},
        {"tgt_mask": random_mask(T + 1, T + 1)},
        {"tgt_mask": random_mask(1, 1, T + 1, T + 1).double()},
    ):
        try:
            split(src, tgt, **masks)
        except (TypeError, ValueError) as error:
            said.append(str(error))
    return said


def test_a_mask_that_fits_no_queries_is_refused_on_every_rank_with_both_numbers():
    for rows, source, dims, dtype in ranks(2, refusals):
        assert rows.startswith("tgt_mask has 5 rows of queries, but tgt has 6 time steps: pass a row for each step")
        assert source.startswith("src_mask has 5 rows of queries, but src has 5 time steps and tgt has 6 time steps")
        assert dims.startswith("tgt_mask has 2 dims, shape (6, 6), not 4")
        assert dtype.startswith("tgt_mask is torch.float64, not torch.bool")


def searches_of_split_models(rank, world):
    said = []
    for split in (split_weights, split_time_steps):
        part = model()
        split(part, torch.distributed.group.WORLD)
        for search in (greedy, beam_search):
            for given in (part, [model(), part]):
                with pytest.raises(ValueError, match="split over ranks") as caught:
                    search(given, tokens(T)[0], bos=1, eos=2)
                said.append(str(caught.value))
    return said


def test_a_split_model_is_not_searched_and_a_whole_one_is():
    for said in ranks(2, searches_of_split_models):
        assert len(said) == 8
        assert set(said) == {
            "the model is split over ranks: search within models.sharding.whole_outputs(model), where all ranks that "
            "split the vocabulary translate the same sentences"
        }
    alone = model()
    split_weights(alone, None)
    split_time_steps(alone, None)
    assert len(greedy(alone, tokens(T)[0], bos=1, eos=2)) == B
