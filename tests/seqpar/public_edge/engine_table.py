"""`LossCompute` and `MultiGPULossCompute`: how they are made, and what they are called with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import seqpar
from tests.seqpar.core.odd_tensors import NO_TENSOR, SPECIAL
from tests.seqpar.public_edge.case import Case
from tests.seqpar.public_edge.criteria_table import NO_INDICES, ODD_DTYPES, V, logits, targets
from tests.seqpar.public_edge.tables import raises, refused, values

D = 4


class Own(nn.Module):
    """A generator without a formula, which may take more for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, V)

    def forward(self, hidden: Tensor, extra: Tensor | None = None) -> Tensor:
        return self.linear(hidden.tanh() if extra is None else hidden.tanh() + extra)


GENERATORS: dict[str, Callable[[], nn.Module]] = {"by formula": lambda: nn.Linear(D, V), "by autograd": Own}


def hidden(*lead: int) -> Tensor:
    return logits(*lead, D)


def engine(kind: str = "by formula", **options: Any) -> seqpar.LossCompute:
    torch.manual_seed(0)
    return seqpar.LossCompute(GENERATORS[kind]().double(), seqpar.CrossEntropy(), **options)


NO_MODULE = values(
    "it must be a torch.nn.Module", none=None, text="linear", a_class=nn.Linear, a_tensor=torch.ones(9, 4),
    a_list=[nn.Linear(4, 9)],
) | values("is a function; it must be a torch.nn.Module", a_function=nn.functional.cross_entropy)  # fmt: skip
SWAPPED = values(
    "the order is (generator, criterion)", ours=seqpar.CrossEntropy(), torchs=nn.CrossEntropyLoss(reduction="sum")
)
SWAPPED_BACK = values("the order is (generator, criterion)", a_linear=nn.Linear(4, 9), a_stack=nn.Sequential())
NO_SUM = values(
    "the criterion must sum: reduction='sum'", a_mean=nn.CrossEntropyLoss(), rows=nn.NLLLoss(reduction="none")
)
NO_SIZE = values(
    "is {value}; it must be a whole number of at least 1",
    zero=0, negative=-1, a_float=2.0, a_bool=True, text="5", nan=float("nan"),
) | values("it must be a whole number of at least 1", a_list=[5], a_tensor=torch.tensor(5))  # fmt: skip
NO_DEVICES = values(
    "pass a list, such as [{value}]", text="cpu", a_number=0, a_device=torch.device("cpu"), a_set={"cpu"}
)
NO_DEVICE = (
    values("[0]: True is a bool", a_bool=[True])
    | values("NoneType", none=[None])
    | values("this machine has cpu", a_float=[0.0], a_tensor=[torch.ones(1)])
)
NOWHERE = (
    values("is empty; this machine has cpu", empty=[])
    | values(": meta does not exist or cannot compute; this machine has cpu", meta=["meta"])
    | values("'gpu0' is not a device; this machine has cpu", nonsense=["gpu0"])
    | values("cpu:1 does not exist, because the CPU is one device", a_second_cpu=["cpu", "cpu:1"])
    | values("cuda:99", far_too_high=["cpu", "cuda:99"])
    | values("does not exist", another_kind=["xpu:0"])
)
UNFIT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "meta": (lambda: nn.Linear(2, 2, device="meta"), "Linear.weight is on the meta device"),
    "lazy": (lambda: nn.LazyLinear(3), "is lazy, it has no shape yet; run one batch through the module first"),
    "compiled": (lambda: torch.compile(nn.Linear(2, 2)), "as it was before torch.compile"),
    "compiled in place": (lambda: compiled_in_place(nn.Linear(2, 2)), "as it was before torch.compile"),
}
"""Modules that cannot be replicated, and what is said of them."""


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile()
    return module


def made() -> list[Case]:
    """Ways to make an engine."""
    linear, loss = nn.Linear(D, V), seqpar.CrossEntropy()
    name, multi = "LossCompute", "MultiGPULossCompute"

    def two_thousand_and_eighteen(**options: Any) -> seqpar.MultiGPULossCompute:
        return seqpar.MultiGPULossCompute(linear, loss, **{"devices": ["cpu"], **options})

    cases = []
    for odd in (NO_MODULE, SWAPPED):
        cases += refused(name, lambda x: seqpar.LossCompute(x, loss), "generator", odd, TypeError)
        cases += refused(multi, lambda x: seqpar.MultiGPULossCompute(x, loss, ["cpu"]), "generator", odd, TypeError)
    for odd in (NO_MODULE, SWAPPED_BACK):
        cases += refused(name, lambda x: seqpar.LossCompute(linear, x), "criterion", odd, TypeError)
    cases += refused(name, lambda x: seqpar.LossCompute(linear, x), "criterion", NO_SUM, ValueError)
    for size in ("chunk_tokens", "chunk_size"):
        make = partial(lambda x, size: seqpar.LossCompute(linear, loss, **{size: x}), size=size)
        cases += refused(name, make, size, NO_SIZE, ValueError)
    cases += refused(multi, lambda x: two_thousand_and_eighteen(chunk_size=x), "chunk_size", NO_SIZE, ValueError)
    for odd, error in ((NO_DEVICES, TypeError), (NO_DEVICE, TypeError), (NOWHERE, ValueError)):
        cases += refused(name, lambda x: seqpar.LossCompute(linear, loss, x), "devices", odd, error)
        cases += refused(multi, lambda x: two_thousand_and_eighteen(devices=x), "devices", odd, error)
    both = partial(seqpar.LossCompute, linear, loss, chunk_tokens=2, chunk_size=3)
    cases.append(raises(f"{name}: two ways to cut", both, ValueError, "chunk_tokens=2 and chunk_size=3: pass one"))
    for label, (make_unfit, words) in UNFIT.items():
        for devices in (None, ["cpu"] * 2):
            call = partial(
                lambda make, on: seqpar.LossCompute(make(), loss, on)(hidden(6), targets(6)), make_unfit, devices
            )
            cases.append(raises(f"{name}: a {label} generator on {devices}", call, TypeError, words))
    odd = values("it must be an optimizer with .step(), or None", text="adam", a_class=dict, a_number=0.1)
    return cases + refused(multi, lambda x: two_thousand_and_eighteen(opt=x), "opt", odd, TypeError)


A_PAIR = {
    "an LSTM's tuple": (lambda: nn.LSTM(D, D).double()(hidden(6)), "hidden is a tuple of 2 and the engine has no"),
    "a list of numbers": (lambda: [1.0, 2.0], "[0] is a float; it must be a tensor"),
    "a list of lists": (lambda: [[1.0], [2.0]], "[0] is a list of 1; hidden must be a tensor, or one tensor for each"),
}
NOT_HIDDEN = {**SPECIAL, **{k: v for k, v in NO_TENSOR.items() if k not in ("a list", "an LSTM's tuple")}}
NO_SCALE = values(
    "it must be a", none=None, text="2", a_bool=True, a_list=[1.0], many=torch.ones(2), yes=torch.tensor(True)
)
NOT_FINITE = values(
    "is ", nan=float("nan"), infinite=float("inf"), zero=0, minus_zero=-0.0, tensor_0=torch.tensor(0.0),
    tensor_nan=torch.tensor(float("nan")),
)  # fmt: skip


def _tensors(kind: str) -> list[Case]:
    """What is no tensor, or not of a dtype that is asked for."""
    ask, six, rows = engine(kind), targets(6), hidden(6)
    cases = refused(kind, lambda x: ask(x, six), "hidden", NOT_HIDDEN, TypeError)
    cases += refused(kind, lambda x: ask(x, six), "hidden", A_PAIR, TypeError)
    odd = {str(d): (partial(rows.to, d), "it must be a floating dtype") for d in ODD_DTYPES}
    cases += refused(kind, lambda x: ask(x, six), "hidden", odd, TypeError)
    cases += refused(kind, lambda x: ask([x], six), "hidden[0]", odd, TypeError)
    cases += refused(kind, lambda x: ask(rows, x), "target", NOT_HIDDEN, TypeError)
    both = values("scatter both or neither", a_list=[six], a_tuple=(six, six))
    cases += refused(kind, lambda x: ask(rows, x), "target", both, TypeError)
    odd = {str(d): (partial(six.to, d), f"has dtype {d}; it must hold class indices, int64") for d in NO_INDICES}
    cases += refused(kind, lambda x: ask(rows, x), "target", odd, TypeError)
    cases += refused(f"{kind}, scattered", lambda x: ask([rows], x), "target", odd, TypeError)
    cases += refused(kind, lambda x: ask(rows, six, loss_scale=x), "loss_scale", NO_SCALE, TypeError)
    return cases + refused(kind, lambda x: ask(rows, six, loss_scale=x), "loss_scale", NOT_FINITE, ValueError)


def _call_of(kind: str, devices: list[str] | None, target: Tensor, calls: str) -> object:
    """The first or a later call on these targets."""
    ask = engine(kind, devices=devices)
    if calls == "later":
        ask(hidden(*target.shape), torch.zeros_like(target))
    return ask(hidden(*target.shape), target)


def _shapes(kind: str) -> list[Case]:
    """What does not fit together."""
    ask, steps, six = engine(kind), engine(kind, chunk_size=2), targets(6)
    by_rows = ("hidden has shape (6, 4)", "chunk_size=2", "for rows use chunk_tokens")
    of_teacher = ("teacher has shape (5, 4); ", " whose first dimensions ", "target's shape (6,)")

    def case(label: str, call: Callable[[], object], error: type[Exception], *words: str) -> Case:
        return raises(f"{kind}: {label}", call, error, *words)

    cases = []
    for a, b in [((6,), (5,)), ((2, 3), (6,)), ((2, 3), (3, 2)), ((6,), (2, 3)), ((), ()), ((0,), (1,)), ((1,), ())]:
        words = ("target must have hidden's leading shape", str((*a, D)), str(b))
        cases.append(case(f"shapes {a} and {b}", partial(ask, hidden(*a), targets(*b)), ValueError, *words))
    for bad in (V, -1, 10**9):
        words = (f"target {bad} at position (3, 1) is outside the vocabulary [0, {V})",)
        target = targets(4, 3)
        target[3, 1] = bad
        for devices in (None, ["cpu"] * 2, ["cpu"] * 4):
            for calls in ("first", "later"):
                call = partial(_call_of, kind, devices, target, calls)
                cases.append(case(f"a target of {bad} in the {calls} call on {devices}", call, IndexError, *words))
    wide, half = logits(6, D + 1), hidden(6).float()
    return [
        *cases,
        case("another width", partial(ask, wide, six), ValueError, "hidden", f"{D + 1}", f"{D}"),
        case("another width, scattered", partial(ask, [wide], six), ValueError, "hidden", f"{D + 1}", f"{D}"),
        case("another dtype", partial(ask, half, six), TypeError, "hidden has dtype torch.float32", "torch.float64"),
        case("nothing scattered", partial(ask, [], []), ValueError, "hidden is an empty list"),
        case("a scattered vector", partial(ask, [torch.ones(6)], six), ValueError, "hidden[0] has shape (6,)"),
        case(
            "scattered float32",
            partial(ask, [hidden(3), hidden(3).float()], six),
            ValueError,
            "hidden[1] torch.float32",
        ),
        case(
            "scattered float64",
            partial(ask, [hidden(3).float(), hidden(3)], six),
            ValueError,
            "hidden[1] torch.float64",
        ),
        case(
            "scattered sizes",
            partial(ask, [hidden(2), hidden(3)], six),
            ValueError,
            "target has 6 rows and the scattered hidden [2, 3], 5 rows",
        ),
        case(
            "scattered apart",
            partial(ask, [hidden(3)] * 2, [six]),
            ValueError,
            "target is scattered over 1 devices and hidden over 2",
        ),
        case(
            "a scattered number", partial(ask, [hidden(6)], [3]), TypeError, "target[0] is an int; it must be a tensor"
        ),
        case(
            "a GRU's tuple",
            partial(ask, nn.GRU(D, D).double()(hidden(6)), six),
            TypeError,
            "a tuple of 2",
            "hidden, _ = gru",
        ),
        case("time steps of rows", partial(steps, hidden(6), six), ValueError, *by_rows),
        case("time steps of a device's", partial(steps, [hidden(6)], six), ValueError, *by_rows),
        case("a keyword that none takes", partial(ask, hidden(6), six, teacher=hidden(5)), ValueError, *of_teacher),
    ]


def _per_token() -> list[Case]:
    ask, six, rows = engine("by autograd"), targets(6), hidden(6)
    odd = {label: made for label, made in NOT_HIDDEN.items() if label != "none"}  # which passes through
    cases = refused("by autograd", lambda x: ask(rows, six, extra=x), "extra", odd, TypeError)
    for shape in [(5, D), (), (1, D), (6 * D,)]:
        words = ("extra", str(shape), "target's shape (6,)")
        call = partial(ask, rows, six, extra=logits(*shape))
        cases.append(raises(f"by autograd: extra of shape {shape}", call, ValueError, *words))
    return cases


NO_NORMALIZE = values(
    "normalize", none=None, text="6", a_bool=True, a_list=[6], many=torch.ones(2), a_complex_one=torch.ones(1) * 1j
)
NOTHING_TO_DIVIDE_BY = values(
    "normalize is", nan=float("nan"), infinite=float("inf"), below_0=-6.0, tensor_nan=torch.tensor(float("nan")),
) | values("normalize is 0.0 for 6 tokens; it must be above 0", zero=0, tensor_0=torch.tensor(0))  # fmt: skip


def _normalize() -> list[Case]:
    linear = nn.Linear(D, V).double()
    opt = torch.optim.SGD(linear.parameters(), 0.0)
    compute = seqpar.MultiGPULossCompute(linear, seqpar.CrossEntropy(), ["cpu"], opt)
    cases = []
    for odd, error in ((NO_NORMALIZE, TypeError), (NOTHING_TO_DIVIDE_BY, ValueError)):
        call = lambda x: compute(hidden(2, 3), targets(2, 3), x)  # noqa: E731
        cases += refused("MultiGPULossCompute", call, "normalize", odd, error)
    return cases


def _split() -> list[Case]:
    """What is a list for each device, where each rank has one."""
    ask, rows, six = engine(vocab=seqpar.VocabShard(None, 0, V)), hidden(6), targets(6)
    words = "is a list of 1; it must be a tensor"
    return [
        raises(f"a split vocabulary: {argument} of {name} in a list", partial(call, *given), TypeError, words)
        for name, call in {"the loss": ask, "the scores": ask.token_scores}.items()
        for argument, given in {"hidden": ([rows], six), "target": (rows, [six])}.items()
    ]


CASES = [
    *made(),
    *_split(),
    *(case for kind in GENERATORS for case in (*_tensors(kind), *_shapes(kind))),
    *_per_token(),
    *_normalize(),
]
