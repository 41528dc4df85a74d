"""The checker of spmd_types passes right steps on a fake group of 8 ranks, and refuses wrong ones.

A fake group carries no other rank's numbers, so what compares them is told that all of them agree.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import seqpar
from seqpar.distributed import accumulate
from seqpar.distributed.collectives import copy_to_group, group_sum, join_from_group, sum_from_group

spmd = pytest.importorskip("spmd_types", reason="needs spmd_types (pip install spmd_types)")
checker = pytest.importorskip("spmd_types.checker")

from spmd_types import I, P, R, V  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from tests.seqpar.distributed.spmd_types_of_ours import apply_spmd_types  # noqa: E402

pytestmark = pytest.mark.unswitched
CLASSES = 8


@pytest.fixture
def groups(monkeypatch):
    """Data x vocabulary, 2 x 4 ranks, while the checker looks on."""
    apply_spmd_types()
    monkeypatch.setattr(seqpar.VocabShard, "check", lambda *given, **keywords: None)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("data", "vocab"))
        with spmd.set_current_mesh(mesh), checker.typecheck():
            yield mesh.get_group("data"), mesh.get_group("vocab")
    finally:
        dist.destroy_process_group()


def typed(shape, groups, *types):
    tensor = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    spmd.assert_type(tensor, dict(zip(groups, types, strict=True)))
    return tensor


def targets(groups, *types, high=CLASSES):
    target = torch.randint(high, (6,))
    spmd.assert_type(target, dict(zip(groups, types, strict=True)))
    return target


def types_of(tensor, groups):
    return tuple(spmd.get_axis_local_type(tensor, group) for group in groups)


def test_the_collectives_carry_their_types_and_refuse_others(groups):
    data, _ = groups
    weight = typed((3, 4), groups, I, I)
    assert types_of(copy_to_group(weight, data), groups) == (R, I)
    partial = typed((3,), groups, P, I)
    assert types_of(sum_from_group(partial, data), groups) == (I, I)
    assert types_of(group_sum(partial, data), groups) == (R, I)
    own = typed((3, 4), groups, V, I)
    assert types_of(join_from_group(own, [3, 3], 0, data), groups) == (R, I)
    for wrong in (
        lambda: copy_to_group(own, data),
        lambda: sum_from_group(weight, data),
        lambda: group_sum(own, data),
        lambda: join_from_group(weight, [3, 3], 0, data),
    ):
        with pytest.raises(spmd.SpmdTypeError):
            wrong()


def split_vocabulary(groups, hidden=(V, I), weight=(R, V)):
    vocab = seqpar.VocabShard(groups[1], 0, CLASSES)
    given = typed((6, 4), groups, *hidden), typed((2, 4), groups, *weight), targets(groups, V, I)
    return seqpar.linear_cross_entropy(*given, vocab=vocab)


def test_a_split_vocabulary_gives_the_same_sums_on_every_rank_of_it(groups):
    loss = split_vocabulary(groups)
    assert {types_of(t, groups) for t in loss} == {(P, I)}
    loss.total.backward()


@pytest.mark.parametrize(
    ("hidden", "weight", "why"),
    [
        ((V, R), (R, V), "expects its input to be I on axis mesh_vocab, but it is R"),
        (
            (V, I),
            (I, V),
            r"hidden V and a weight I on axis mesh_data: .* its own tokens: copy_to_group\(weight, group\)",
        ),
        ((V, V), (R, V), "expects its input to be I on axis mesh_vocab, but it is V"),
    ],
)
def test_a_loss_whose_gradients_would_be_summed_twice_or_not_at_all_is_refused(groups, hidden, weight, why):
    with pytest.raises(spmd.SpmdTypeError, match=why):
        split_vocabulary(groups, hidden, weight)


def test_a_split_vocabulary_without_its_group_is_refused(groups):
    hidden, weight = typed((6, 4), groups, V, I), typed((2, 4), groups, R, V)
    with pytest.raises(spmd.SpmdTypeError, match=r"the ranks have other classes: pass vocab=VocabShard"):
        seqpar.linear_cross_entropy(hidden, weight, targets(groups, V, I, high=2))


def test_scores_of_a_split_vocabulary_are_the_same_on_every_rank_of_it(groups):
    vocab = seqpar.VocabShard(groups[1], 0, CLASSES)
    given = typed((6, 4), groups, V, I), typed((2, 4), groups, R, V), targets(groups, V, I)
    scores = seqpar.token_scores(*given, entropy=True, vocab=vocab)
    assert types_of(scores.log_prob, groups) == types_of(scores.entropy, groups) == (V, I)


def test_a_split_sequence_has_a_copied_weight_and_a_summed_loss(groups):
    data, _ = groups
    weight = copy_to_group(typed((CLASSES, 4), groups, I, I), data)
    hidden = typed((6, 4), groups, V, I)
    loss = seqpar.linear_cross_entropy(hidden, weight, targets(groups, V, I))
    assert types_of(loss.total, groups) == (P, I)
    total = sum_from_group(loss.total, data)
    assert types_of(total, groups) == (I, I)
    total.backward()


@pytest.fixture
def two_ranks_alike(monkeypatch):
    """A fake group exchanges nothing: the other rank has as many micro-batches, and the tokens are this rank's."""
    monkeypatch.setattr(
        accumulate, "_exchange_counts", lambda count, tokens, *given: accumulate._Step([count] * 2, tokens)
    )


@pytest.mark.usefixtures("two_ranks_alike")
def test_accumulated_gradients_return_the_sums_of_all_ranks(groups):
    data, _ = groups
    weight = typed((CLASSES, 4), groups, R, I)

    def loss_of(target):
        return seqpar.linear_cross_entropy(typed((6, 4), groups, V, I), weight, target)

    micro_batches = [targets(groups, V, I), targets(groups, V, I, high=3)]
    loss = seqpar.accumulate_gradients(micro_batches, loss_of, len, group=data)
    assert {types_of(t, groups) for t in loss} == {(R, I)}
    assert weight.grad is not None


@pytest.mark.usefixtures("two_ranks_alike")
def test_sums_that_are_whole_already_are_not_summed_again(groups):
    data, _ = groups
    weight = typed((CLASSES, 4), groups, R, I)

    def summed(target):
        loss = seqpar.linear_cross_entropy(typed((6, 4), groups, V, I), weight, target)
        return loss._replace(total=sum_from_group(loss.total, data))

    with pytest.raises(spmd.SpmdTypeError, match="got losses that are I on axis mesh_data; it sums P"):
        seqpar.accumulate_gradients([targets(groups, V, I)], summed, len, group=data)
