"""Every bad input of `linear_cross_entropy` is answered in one clear line."""

import pytest
import torch

import seqpar
from tests.seqpar.linear.linear_loss import on_another_device, small

BAD = {
    "float target": ({"target": torch.zeros(6)}, TypeError, "target has dtype torch.float32"),
    "bool target": ({"target": torch.zeros(6, dtype=torch.bool)}, TypeError, "target has dtype torch.bool"),
    "target's shape": ({"target": torch.zeros(5, dtype=torch.int64)}, ValueError, r"\(6, 4\) and target \(5,\)"),
    "weight's width": ({"weight": torch.zeros(9, 5)}, ValueError, r"\(6, 4\) and weight \(9, 5\)"),
    "weight's dims": ({"weight": torch.zeros(4)}, ValueError, r"\(6, 4\) and weight \(4,\)"),
    "bias's shape": ({"bias": torch.zeros(8)}, ValueError, r"bias has shape \(8,\) and weight \(9, 4\)"),
    "integer hidden": ({"hidden": torch.zeros(6, 4, dtype=torch.int64)}, TypeError, "hidden has dtype torch.int64"),
    "weight's dtype": ({"weight": torch.zeros(9, 4).bfloat16()}, TypeError, "float32 and weight torch.bfloat16"),
    "bias's dtype": ({"bias": torch.zeros(9).double()}, TypeError, "float32 and bias torch.float64"),
    "weight's device": ({"weight": on_another_device(9, 4)}, ValueError, "hidden is on cpu and weight on cuda:0"),
    "class weights": ({"class_weight": torch.ones(8)}, ValueError, r"class_weight has shape \(8,\); it must be \(9,\)"),
    "smoothing of 1": ({"label_smoothing": 1.0}, ValueError, r"label_smoothing is 1\.0"),
    "negative smoothing": ({"label_smoothing": -0.1}, ValueError, r"label_smoothing is -0\.1"),
    "convention": ({"smoothing_convention": "other"}, ValueError, "smoothing_convention is 'other'"),
    "harvard": ({"smoothing_convention": "harvard"}, ValueError, "ignore_index is -100; the 'harvard' convention"),
    "softcap 0": ({"softcap": 0.0}, ValueError, r"softcap is 0\.0"),
    "softcap inf": ({"softcap": float("inf")}, ValueError, "softcap is inf"),
    "z_loss": ({"z_loss": -1e-4}, ValueError, "z_loss is -0.0001"),
    "z_loss nan": ({"z_loss": float("nan")}, ValueError, "z_loss is nan"),
    "target too high": (
        {"target": torch.tensor([0, 0, 0, 9, 0, 0])},
        IndexError,
        r"target 9 at position \(3,\).*\[0, 9\)",
    ),
    "target negative": ({"target": torch.tensor([0, -1, 0, 9, 0, 0])}, IndexError, r"target -1 at position \(1,\)"),
    "a shard too long": ({"vocab": seqpar.VocabShard(None, 3, 9)}, ValueError, r"9 rows from class 3 on.*\[0, 9\)"),
    "a shard alone": ({"vocab": seqpar.VocabShard(None, 0, 12)}, RuntimeError, r"\[0, 9\) on rank 0.*\[0, 12\)"),
}


@pytest.mark.unswitched
@pytest.mark.parametrize("case", BAD)
def test_a_bad_input_is_one_clear_line(case):
    change, error, message = BAD[case]
    inputs = {"hidden": torch.zeros(6, 4), "weight": torch.zeros(9, 4), "target": torch.zeros(6, dtype=torch.int64)}
    with pytest.raises(error, match=message):
        seqpar.linear_cross_entropy(**(inputs | change))


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "5"])
def test_a_chunk_size_that_is_no_positive_int_is_refused(size):
    hidden, weight, target = small()
    with pytest.raises(ValueError, match=f"chunk_tokens is {size!r}; it must be a whole number of at least 1"):
        seqpar.linear_cross_entropy(hidden, weight, target, chunk_tokens=size)
