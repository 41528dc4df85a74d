"""replicate, scatter, parallel_apply, gather, data_parallel, DataParallel, place, ModelWithLoss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import seqpar
from tests.seqpar.core.odd_tensors import NO_TENSOR, SPECIAL
from tests.seqpar.public_edge.case import Case, Equals
from tests.seqpar.public_edge.criteria_table import logits, targets
from tests.seqpar.public_edge.engine_table import NO_DEVICE, NO_DEVICES, NO_MODULE, NOWHERE, UNFIT
from tests.seqpar.public_edge.tables import Odd, raises, refused, values

TWO = ["cpu", "cpu"]
THREE = ["cpu"] * 3
NO_INT = values("it must be an int", none=None, text="0", a_float=0.0, a_bool=True, a_list=[0])
ONE_NOWHERE = {label: (lambda made=made: made()[-1], words) for label, (made, words) in NOWHERE.items() if made()}


def _bad_devices(where: str, call: Callable[[Any], object]) -> list[Case]:
    cases = []
    for odd, error in ((NO_DEVICES, TypeError), (NO_DEVICE, TypeError), (NOWHERE, ValueError)):
        cases += refused(where, call, "device_ids", odd, error)
    return cases


def _compressed() -> nn.Module:
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(module.weight.detach().to_sparse_csr())
    return module


def _replicate() -> list[Case]:
    cases = refused("replicate", lambda x: seqpar.replicate(x, TWO), "module", NO_MODULE, TypeError)
    cases += _bad_devices("replicate", partial(seqpar.replicate, nn.Linear(2, 2)))
    compressed = (_compressed, "Linear.weight is torch.sparse_csr, and chunks add up")
    for label, (make, words) in (UNFIT | {"compressed": compressed}).items():
        call = partial(lambda make: seqpar.replicate(nn.Sequential(make()), TWO), make)
        cases.append(raises(f"replicate: a {label} module", call, TypeError, words))
    return cases


def _scatter() -> list[Case]:
    rows = torch.ones(6, 4)
    cases = _bad_devices("scatter", lambda x: seqpar.scatter(rows, x))
    cases += refused("scatter", lambda x: seqpar.scatter({"x": x}, TWO), "a tensor of the inputs", SPECIAL, TypeError)
    cases += refused("scatter", lambda x: seqpar.scatter(rows, TWO, x), "dim", NO_INT, TypeError)
    odd = values("must be", a_number=3, text="33", a_tensor=torch.tensor([3, 3]))
    cases += refused("scatter", lambda x: seqpar.scatter(rows, TWO, sizes=x), "sizes", odd, TypeError)
    odd = values("it must be an int", floats=[3.0, 3.0], texts=["3", "3"], none=[None, 6])
    cases += refused("scatter", lambda x: seqpar.scatter(rows, TWO, sizes=x), "sizes", odd, TypeError)
    odd = values(
        "for 6 rows on 2 devices; give at most one size", few=[3, 2], many=[2, 2, 2], negative=[-1, 7], empty=[]
    )
    cases += refused("scatter", lambda x: seqpar.scatter(rows, TWO, sizes=x), "sizes", odd, ValueError)
    for dim in (2, -3, 99):
        words = (f"dim is {dim}, and ", "(6, 4)")
        cases.append(raises(f"scatter: dim {dim}", partial(seqpar.scatter, rows, TWO, dim), ValueError, *words))
    words = ("cannot scatter along dim 0", "(6, 4)", "(5,)", "6 and 5 rows")
    call = partial(seqpar.scatter, (rows, torch.ones(5)), TWO)
    return [*cases, raises("scatter: other sizes", call, ValueError, *words)]


def _gather() -> list[Case]:
    parts = [torch.ones(2, 3), torch.ones(4, 3)]
    odd = values("it must be a list", none=None, a_tensor=torch.ones(2), text="ab", a_number=2, a_dict={0: 1})
    cases = refused("gather", lambda x: seqpar.gather(x, "cpu"), "outputs", odd, TypeError)
    cases += refused("gather", lambda x: seqpar.gather([x, x], "cpu"), "the output of replica 0", SPECIAL, TypeError)
    cases += refused("gather", lambda x: seqpar.gather(parts, "cpu", x), "dim", NO_INT, TypeError)
    cases += refused("gather", lambda x: seqpar.gather(parts, x), "output_device", ONE_NOWHERE, ValueError)
    odd = values("not a device", none=None, a_bool=True, a_float=0.5, a_list=["cpu"])
    cases += refused("gather", lambda x: seqpar.gather(parts, x), "output_device", odd, TypeError)
    for label, outputs, dim, words in (
        ("nothing", [], 0, ("outputs is empty",)),
        ("a dim that is not there", parts, 2, ("dim is 2, and ", "replica 0 has shape (2, 3)")),
        ("a dim below all", parts, -3, ("dim is -3, and ", "replica 0 has shape (2, 3)")),
        ("other widths", [torch.ones(2, 3), torch.ones(2, 4)], 0, ("(2, 3)", "replica 1 (2, 4)")),
        ("other numbers of dims", [torch.ones(2, 3), torch.ones(2)], 0, ("(2, 3)", "replica 1 (2,)")),
        ("other structures", [[torch.ones(2)], {"a": torch.ones(2)}], 0, ("replica 0 returned list", "replica 1 {")),
        ("other numbers", [3, 4], 0, ("replica 0 returned 3 and replica 1 4", "return tensors")),
        ("none and a tensor", [None, torch.ones(2)], 0, ("NoneType", "Tensor")),
    ):
        cases.append(raises(f"gather: {label}", partial(seqpar.gather, outputs, "cpu", dim), ValueError, *words))
    return cases


def _parallel_apply() -> list[Case]:
    two, inputs = [nn.Identity(), nn.Identity()], [torch.ones(2), torch.ones(2)]
    name, apply = "parallel_apply", seqpar.parallel_apply
    odd = values("it must be a list", none=None, a_module=nn.Identity(), a_number=2)
    cases = refused(name, lambda x: apply(x, inputs), "modules", odd, TypeError)
    odd = values("it must be a list", none=None, a_tensor=torch.ones(2), a_number=2)
    cases += refused(name, lambda x: apply(two, x), "inputs", odd, TypeError)
    odd = values("it must be a list", a_dict={"a": 1}, a_number=2, text="ab")
    cases += refused(name, lambda x: apply(two, inputs, x), "kwargs_tup", odd, TypeError)
    odd = values("it must be a dict", none=[None, {}], a_list=[[], []], text=["a", "b"])
    cases += refused(name, lambda x: apply(two, inputs, x), "kwargs_tup[0]", odd, TypeError)
    odd = values("it must be a module or a function", none=[None, abs], text=["a", abs], a_tensor=[torch.ones(2), abs])
    cases += refused(name, lambda x: apply(x, inputs), "modules[0]", odd, TypeError)
    for label, call in {
        "fewer inputs": partial(apply, two, inputs[:1]),
        "fewer modules": partial(apply, two[:1], inputs),
        "fewer devices": partial(apply, two, inputs, None, ["cpu"]),
        "fewer keywords": partial(apply, two, inputs, [{}]),
    }.items():
        cases.append(raises(f"{name}: {label}", call, ValueError, "there must be as many of each"))
    return cases


def _data_parallel() -> list[Case]:
    linear, rows = nn.Linear(4, 2), torch.ones(6, 4)
    cases = []
    for name, module_of, devices_of in (
        ("data_parallel", lambda x: seqpar.data_parallel(x, rows, TWO), partial(seqpar.data_parallel, linear, rows)),
        ("DataParallel", lambda x: seqpar.DataParallel(x, TWO), partial(seqpar.DataParallel, linear)),
    ):
        cases += refused(name, module_of, "module", NO_MODULE, TypeError)
        no_list: Odd = {label: made for label, made in NO_DEVICE.items() if label != "none"}
        for odd, error in ((NO_DEVICES, TypeError), (no_list, TypeError), (NOWHERE, ValueError)):
            cases += refused(name, devices_of, "device_ids", odd, error)
    cases += refused(
        "data_parallel", lambda x: seqpar.data_parallel(linear, rows, TWO, dim=x), "dim", NO_INT, TypeError
    )
    cases += refused("DataParallel", lambda x: seqpar.DataParallel(linear, TWO, dim=x), "dim", NO_INT, TypeError)
    odd = values("it must be a dict", text="ab", a_list=[1], a_number=1)
    cases += refused(
        "data_parallel",
        lambda x: seqpar.data_parallel(linear, rows, TWO, module_kwargs=x),
        "module_kwargs",
        odd,
        TypeError,
    )
    cases += refused("DataParallel", seqpar.DataParallel(linear, TWO), "a tensor of the inputs", SPECIAL, TypeError)
    cases += refused(
        "DataParallel", lambda x: seqpar.DataParallel(linear, TWO, x), "output_device", ONE_NOWHERE, ValueError
    )
    return cases


def _place() -> list[Case]:
    cases = refused("place", lambda x: seqpar.place(x, {"": "cpu"}), "model", NO_MODULE, TypeError)
    odd = values("it must be a dict", none=None, text="cpu", a_list=["cpu"], a_device=torch.device("cpu"))
    cases += refused("place", lambda x: seqpar.place(nn.Linear(2, 2), x), "parts", odd, TypeError)
    odd = values("not a device", none=None, a_bool=True, a_float=0.5, a_list=["cpu"])
    cases += refused("place", lambda x: seqpar.place(nn.Linear(2, 2), {"": x}), "parts['']", odd, TypeError)
    cases += refused("place", lambda x: seqpar.place(nn.Linear(2, 2), {"": x}), "parts['']", ONE_NOWHERE, ValueError)
    stack = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for label, parts, error, word in (
        ("a name that is not there", {"2": "cpu"}, KeyError, "'2' is not a part of Sequential"),
        ("a name that is a number", {0: "cpu"}, KeyError, "0 is not a part of Sequential"),
        ("a part left out", {"0": "cpu"}, ValueError, "1.weight is in none of the parts"),
        ("no part", {}, ValueError, "0.weight is in none of the parts"),
    ):
        cases.append(raises(f"place: {label}", partial(seqpar.place, stack, parts), error, word))
    call = lambda: seqpar.place(nn.Sequential(UNFIT["meta"][0]()), {"": "cpu"})  # noqa: E731
    return [
        *cases,
        raises("place: a meta model", call, TypeError, "0.weight is on the meta device", "to_empty"),
    ]


def _model_with_loss() -> list[Case]:
    linear, loss = nn.Linear(4, 4), seqpar.LossCompute(nn.Linear(4, 9), seqpar.CrossEntropy())
    name, rows = "ModelWithLoss", torch.ones(6, 4)
    cases = refused(name, lambda x: seqpar.ModelWithLoss(x, loss), "model", NO_MODULE, TypeError)
    cases += refused(name, lambda x: seqpar.ModelWithLoss(linear, x), "loss", NO_MODULE, TypeError)
    both = seqpar.ModelWithLoss(linear, loss)
    no_tensor = {label: made for label, made in NO_TENSOR.items() if label not in ("a list", "an LSTM's tuple")}
    cases += refused(name, lambda x: both(rows, target=x), "target", SPECIAL | no_tensor, TypeError)
    odd = values("it must be a dict", a_tensor=torch.ones(6), text="extra", a_list=[1])
    cases += refused(name, lambda x: both(rows, target=targets(6), per_token=x), "per_token", odd, TypeError)
    recurrent = seqpar.ModelWithLoss(nn.LSTM(4, 4), loss)
    words = ("hidden is a tuple of 2", "hidden, _ = gru(inputs)")
    call = partial(recurrent, rows, target=targets(6))
    return [*cases, raises(f"{name}: an LSTM's tuple", call, TypeError, *words)]


def _there_and_back(inputs: Any, dim: int = 0, devices: list[str] = THREE) -> tuple[Tensor, ...]:
    outputs = seqpar.gather(seqpar.scatter(inputs, devices, dim), "cpu", dim)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _through(module: nn.Module, rows: Tensor, parallel: bool, **options: Any) -> tuple[Tensor, ...]:
    rows = rows.detach().requires_grad_()
    run = seqpar.DataParallel(module, THREE, **options) if parallel else module
    out = run(rows)
    return out.detach(), *torch.autograd.grad(out.square().sum(), (rows, *module.parameters()))


def _equal() -> list[Case]:
    whole = {
        "rows": (logits(7, 4),),
        "fewer rows than devices": (logits(2, 4),),
        "one row": (logits(1, 4),),
        "no rows": (logits(0, 4),),
        "no features": (logits(5, 0),),
        "a vector": (logits(7),),
        "transposed": (logits(4, 7).t(),),
        "expanded": (logits(1, 4).expand(7, 4),),
        "whole numbers": (targets(7),),
        "a mask": (logits(7) > 0,),
        "two": (logits(7, 4), targets(7)),
    }
    cases = []
    for label, inputs in whole.items():
        call = partial(_there_and_back, inputs)
        cases.append(Case(f"scatter and gather: {label}", call, Equals(partial(tuple, inputs))))
    for dim in (1, -1):
        call = partial(_there_and_back, (logits(2, 7),), dim)
        cases.append(Case(f"scatter and gather: dim {dim}", call, Equals(lambda: (logits(2, 7),))))
    batches = {
        "rows": (logits(7, 4), {}),
        "one row": (logits(1, 4), {}),
        "no rows": (logits(0, 4), {}),
        "time first": (logits(3, 7, 4), {"dim": 1}),
        "transposed": (logits(4, 7).t(), {}),
        "three dimensions": (logits(5, 3, 4), {"output_device": "cpu"}),
    }
    for label, (rows, options) in batches.items():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
        call = partial(_through, module, rows, True, **options)
        cases.append(Case(f"DataParallel: {label}", call, Equals(partial(_through, module, rows, False))))
    return cases


CASES = [
    *_replicate(),
    *_scatter(),
    *_gather(),
    *_parallel_apply(),
    *_data_parallel(),
    *_place(),
    *_model_with_loss(),
    *_equal(),
]
