"""Every public name has an example in its docstring that runs and prints what it says."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import seqpar

PAGE = Path(__file__).parents[2] / "docs" / "api" / "integrations.md"
PACKAGES = ("seqpar", "seqpar.objectives", "seqpar.testing")
NAMES = [f"{package}.{name}" for package in PACKAGES for name in import_module(package).__all__]
ASSUMED = {"torch": torch, "nn": nn, "F": F, "seqpar": seqpar}
"""What the pages of docs/api say that the examples assume."""


def failures(docstring, name, given):
    """What doctest says of the examples of a docstring; AssertionError if there are none."""
    test = doctest.DocTestParser().get_doctest(docstring, ASSUMED | given, name, None, None)
    assert test.examples, f"the docstring of {name} has no example (>>>)"
    said = []
    torch.manual_seed(0)
    doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    return "".join(said)


@pytest.mark.parametrize("name", NAMES)
def test_the_example_of_a_public_name_prints_what_it_says(name):
    module, _, attribute = name.rpartition(".")
    assert failures(getattr(import_module(module), attribute).__doc__, name, {}) == ""
