"""What the benchmark of a call's cost counts, and the limits that hold without a clock."""

import pytest
import torch

import seqpar
from benchmarks import overhead

WAYS = {key: way for key, way in overhead.ways().items() if key[1] != overhead.PLAIN}


@pytest.mark.parametrize("key", WAYS, ids=": ".join)
def test_from_a_public_function_to_the_matrix_product_are_at_most_six_frames(key):
    WAYS[key].step()
    walk = overhead.walked(WAYS[key].loss)
    # By autograd the chunk's function and the generator's own call come in between
    assert 0 < walk.frames <= (6 if key[0] != overhead.DEEP else 7)
    assert walk.frames < walk.calls
    assert walk.files < walk.calls


@pytest.mark.parametrize("key", WAYS, ids=": ".join)
def test_a_way_has_the_loss_and_the_gradients_of_plain_torch(key):
    found = []
    for name in (key[1], overhead.PLAIN):
        way = overhead.ways()[key[0], name]
        found.append(torch.autograd.grad(way.loss(), way.leaves))
    for mine, plain in zip(*found, strict=True):
        torch.testing.assert_close(mine, plain)


def test_plain_calls_are_not_counted_as_those_of_the_library():
    linear = torch.nn.Linear(4, 4)
    assert overhead.walked(lambda: linear(torch.ones(4))) == (0, 0, 0)


def test_the_deep_generator_has_as_many_submodules_as_its_name_says():
    leaves = overhead.ways()[overhead.DEEP, overhead.PLAIN].leaves
    assert overhead.DEEP == "111 submodules"
    # hidden, six tensors a block, and the projection's two
    assert len(leaves) == 1 + 6 * overhead.BLOCKS + 2


def test_the_table_has_a_row_for_each_way(monkeypatch):
    monkeypatch.setattr(overhead, "BLOCKS", 1)
    lines = overhead.table(rounds=1, calls=1).splitlines()
    assert len(lines) == 2 + len(overhead.ways())
    assert [line.split(" | ")[1] for line in lines[2:5]] == [overhead.PLAIN, "linear_cross_entropy", "token_scores"]
    assert seqpar.LossCompute.__name__ in lines[-1]
