"""TokenLoss, chunks, criteria and placement, each on its own."""

import functools
import itertools
import math
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import seqpar
from seqpar.core.chunks import cut_rows, cut_time, rows_per_chunk
from seqpar.core.reach import function_in, is_of_library
from seqpar.core.row_independence import Answer, Precision, change_in_company, largest_difference, precision_of
from seqpar.core.token_loss import sum_of_parts
from seqpar.multi_device import placement
from seqpar.rows.conventions import CONVENTIONS
from tests.seqpar.published import Smoothing


def token_loss(total, tokens, nll=None, correct=None):
    return seqpar.TokenLoss(*(None if v is None else torch.tensor(v) for v in (total, tokens, nll, correct)))


def test_token_losses_add_field_by_field_and_not_as_tuples():
    a, b = token_loss(1.5, 2, 1.0, 1), token_loss(2.5, 3, 2.0, 0)
    assert [t.item() for t in a + b] == [4.0, 5, 3.0, 1]
    assert len(a + b) == 4
    assert [t.item() for t in sum([a, b, b])] == [6.5, 8, 5.0, 1]
    assert (a + token_loss(1.0, 1)).nll is None
    with pytest.raises(TypeError):
        a + 1
    assert isinstance(a, tuple)  # what DDP, FSDP2 and DataParallel look into


def test_the_sum_of_parts_has_the_fields_that_all_of_them_have():
    parts = [seqpar.TokenLoss(torch.tensor(float(n)), torch.tensor(n), torch.tensor(0.5)) for n in range(1, 4)]
    assert sum_of_parts(parts) == (6, 6, 1.5, None)
    assert sum_of_parts([*parts, parts[0]._replace(nll=None)]) == (7, 7, None, None)
    assert sum_of_parts(parts[:1]) == parts[0]


def test_the_mean_divides_once_and_has_no_nan():
    assert token_loss(6.0, 3).mean == 2
    assert token_loss(0.0, 0).mean == 0
    assert not token_loss(6.0, 3)._replace(total=torch.ones((), requires_grad=True)).detach().total.requires_grad


MANY = 2**24 + 1
"""The first whole number that float32 cannot hold."""


def test_counts_are_exact_where_float32_is_not():
    hidden = torch.zeros(2, 1, requires_grad=True)
    empty = seqpar.TokenLoss.zero(torch.float32, hidden.device, tells=True)
    one = empty._replace(tokens=torch.tensor(1), correct=torch.tensor(1))
    many = one._replace(tokens=torch.tensor(MANY - 1), correct=torch.tensor(MANY - 1))
    for loss in (many + one, sum([one, many]), many.detach() + one):
        assert (loss.tokens, loss.correct) == (MANY, MANY)

    def per_chunk(params, rows, chunk):
        return (many if chunk.start else one)._replace(total=rows[0].sum())

    for needs_gradient in (True, False):
        chunks = [slice(0, 1), slice(1, 2)]
        loss = seqpar.chunked_gradient(per_chunk, chunks, [hidden.requires_grad_(needs_gradient)], [], empty)
        assert (loss.tokens, loss.correct) == (MANY, MANY)


@pytest.mark.parametrize("devices", [None, ["cpu"] * 2])
@pytest.mark.parametrize("generator", [nn.Linear(4, 9), nn.Sequential(nn.Tanh(), nn.Linear(4, 9))])
@pytest.mark.parametrize("criterion", [seqpar.CrossEntropy(), nn.CrossEntropyLoss(reduction="sum")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", [6, 0])
def test_counts_are_int64_on_every_path(devices, generator, criterion, dtype, kept):
    target = torch.full((6,), -100)
    target[:kept] = 1
    loss = seqpar.LossCompute(generator.to(dtype), criterion, devices)(torch.randn(6, 4).to(dtype), target)
    assert loss.tokens.dtype == torch.int64
    assert loss.tokens == kept
    assert loss.correct is None or loss.correct.dtype == torch.int64
    if isinstance(criterion, seqpar.CrossEntropy):
        alone = criterion.token_loss(torch.randn(6, 9).to(dtype), target)
        assert alone.tokens.dtype == alone.correct.dtype == torch.int64


def indices(chunk, rows):
    return torch.arange(rows)[chunk].tolist()


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 70))
def test_row_chunks_are_the_kept_rows_in_order_even_and_few(kept, rows):
    mask = torch.tensor(kept, dtype=torch.bool)
    chunks = [indices(c, len(kept)) for c in cut_rows(mask, rows)]
    expected = mask.nonzero().flatten().tolist()
    assert list(itertools.chain(*chunks)) == expected
    assert len(chunks) == -(-len(expected) // rows)
    sizes = [len(c) for c in chunks]
    assert not sizes or (max(sizes) <= rows and max(sizes) - min(sizes) <= 1)


@given(st.integers(0, 6), st.integers(0, 9), st.integers(1, 11), st.integers(0, 99))
def test_time_chunks_hold_the_kept_rows_of_their_steps(batch, time, steps, seed):
    mask = torch.rand(batch, time, generator=torch.Generator().manual_seed(seed)) < 0.6
    expected = []
    for start in range(0, time, steps):
        inside = [b * time + t for t in range(start, min(time, start + steps)) for b in range(batch) if mask[b, t]]
        expected += [inside] if inside else []
    assert [indices(c, batch * time) for c in cut_time(mask, steps)] == expected


def test_rows_per_chunk_follows_the_budget_down_to_what_keeps_the_products_busy():
    assert rows_per_chunk(1_024, torch.float32, "cpu") == 4_096
    assert rows_per_chunk(1_024, torch.bfloat16, "cpu") == 4_096  # the softmax is in float32
    assert rows_per_chunk(1_024, torch.float64, "cpu") == 2_048
    assert rows_per_chunk(1_024, torch.float32, "cuda") == 131_072
    assert rows_per_chunk(1_000_000, torch.float32, "cpu") == 512
    assert rows_per_chunk(1_000_000, torch.bfloat16, "cpu") == 1_024
    assert rows_per_chunk(1_000_000, torch.float32, "cuda") == 512
    assert rows_per_chunk(1_000_000, torch.bfloat16, "cuda") == 2_048


def test_where_a_kernel_overwrites_the_logits_a_narrow_chunk_has_twice_the_rows_at_most():
    """512 MiB of logits as they are allocated; 2^22 / D rows if they take no more than 1 GiB; whole tiles of 128.

    Half of that where it has 4,096 rows and 2^22 / D.
    """
    rows = {
        (10_000, 512): 13_312,  # half of 26,843
        (16_384, 2_048): 8_192,  # half of 16,384
        (32_768, 512): 8_192,  # 512 MiB have 8,192, and so have 2^22 / 512
        (37_000, 1_024): 4_096,  # of 7,255
        (128_256, 4_096): 2_048,  # 2,093
        (128_256, 512): 4_096,  # 2^22 / 512 would be 8,192
        (256_000, 2_304): 1_792,  # 2^22 / 2,304 = 1,820
        (1_000_000, 512): 512,  # 2 x 268
        (10**9, 512): 128,
    }
    for (vocab_size, width), expected in rows.items():
        assert rows_per_chunk(vocab_size, torch.bfloat16, "cuda", width) == expected
    assert rows_per_chunk(32_768, torch.float32, "cuda", 2_048) == 4_096


@given(
    rows=st.integers(1, 6),
    vocab_size=st.integers(3, 9),
    eps=st.sampled_from([0.0, 0.1, 0.99]),
    convention=st.sampled_from([*CONVENTIONS]),
    seed=st.integers(0, 999),
    size=st.sampled_from([1.0, 30.0]),
)
def test_criteria_standing_alone_equal_their_published_formula(rows, vocab_size, eps, convention, seed, size):
    torch.manual_seed(seed)
    logits = (torch.randn(rows, vocab_size, dtype=torch.float64) * size).requires_grad_()
    target = torch.randint(vocab_size, (rows,))
    ours = seqpar.LabelSmoothing(eps, convention, ignore_index=1)(logits, target)
    plain = Smoothing(eps, convention, 1)(logits, target)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    (a,), (b,) = torch.autograd.grad(3 * ours, logits), torch.autograd.grad(3 * plain, logits)
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_torch_convention_and_cross_entropy_equal_torchs_own():
    logits, target = torch.randn(5, 7, dtype=torch.float64), torch.tensor([0, 6, -100, 3, -100])
    for eps in (0.0, 0.3):
        plain = nn.functional.cross_entropy(logits, target, label_smoothing=eps, reduction="sum")
        torch.testing.assert_close(seqpar.LabelSmoothing(eps, "torch")(logits, target), plain, rtol=1e-13, atol=0)
    plain = nn.functional.cross_entropy(logits, target, reduction="sum")
    torch.testing.assert_close(seqpar.CrossEntropy()(logits, target), plain, rtol=1e-13, atol=0)


def test_a_perfect_prediction_costs_nothing_in_the_harvard_convention():
    q = torch.tensor([[0.0, 0.9, 0.05, 0.05]], dtype=torch.float64)
    loss = seqpar.LabelSmoothing(0.1, "harvard", ignore_index=0)((q + 1e-300).log(), torch.tensor([1]))
    assert abs(loss.item()) < 1e-12


def test_a_criterions_second_derivative_is_an_error_not_a_wrong_number():
    logits = torch.randn(2, 3, requires_grad=True)
    loss = seqpar.CrossEntropy()(logits, torch.tensor([0, 1]))
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(loss, logits, create_graph=True)


class Stack(nn.Module):
    """A ResNet-like stack: a stem, two stages with a residual inside, a head; `first` and `second` may be apart."""

    def __init__(self):
        super().__init__()
        self.stem, self.first, self.second, self.head = (nn.Linear(3, 3) for _ in range(4))

    def forward(self, x, *, options=None):
        x = self.stem(x)
        x = self.first(x)
        return self.head(self.second(x))


def test_placed_parts_give_the_same_numbers_and_gradients():
    torch.manual_seed(0)
    plain, placed = Stack().double(), Stack().double()
    placed.load_state_dict(plain.state_dict())
    seqpar.place(placed, {"stem": "cpu", "first": "cpu", "second": "cpu", "head": "cpu"})
    x = torch.randn(4, 3, dtype=torch.float64)
    plain(x).sum().backward()
    placed(x).sum().backward()
    for a, b in zip(placed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=0)


@pytest.fixture
def any_device_exists(monkeypatch):
    monkeypatch.setattr(placement, "check_devices", lambda devices, _: [torch.device(d) for d in devices])


@pytest.mark.usefixtures("any_device_exists")
def test_each_tensor_goes_straight_to_its_parts_device():
    model = nn.Sequential(Stack(), nn.LSTM(3, 3), nn.BatchNorm1d(3))
    seqpar.place(model, {"": "cpu", "0.second": "meta", "2": "meta"})
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor.is_meta == name.startswith(("0.second", "2.")), name


@pytest.fixture
def fake_gpus(any_device_exists, monkeypatch):
    """Shape-only tensors that say they lie on GPUs and refuse to meet across devices: a stand-in for real ones.

    They cannot be moved inside a module or differentiated, so the parts are made where they belong; real moves are
    tested above, moves and gradients on real GPUs in test_gpu.py.
    """
    if torch.cuda.is_available():
        pytest.skip("stands in for GPUs where there are none; test_gpu.py places parts on real ones")
    monkeypatch.setattr(placement, "_move_own_tensors", lambda *_: None)
    with FakeTensorMode(), torch.no_grad():
        yield


def linear(device):
    """A layer made in place: fake GPUs have no random numbers to start it from."""
    layer = nn.Linear(3, 3)
    layer.weight, layer.bias = (nn.Parameter(torch.empty(p.shape, device=device)) for p in layer.parameters())
    return layer


class Embeds(nn.Module):
    def __init__(self, embed, rest):
        super().__init__()
        self.embed, self.rest = nn.Embedding(5, 3, device=embed), linear(rest)
        self.register_buffer("position", torch.zeros(3, device=rest))

    def forward(self, tokens, *, extra):
        return self.rest(self.embed(tokens) + self.position + extra["bias"])


@pytest.mark.usefixtures("fake_gpus")
@pytest.mark.parametrize(("outer", "inner"), [("cuda:0", "cpu"), ("cpu", "cuda:0")])
def test_what_follows_the_layers_to_the_cpu_is_waited_for(outer, inner):
    waited = {}

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten._to_copy.default:
                waited[kwargs["device"].type] = not kwargs.get("non_blocking", False)
            return function(*args, **(kwargs or {}))

    model = nn.Sequential(linear(outer), linear(inner), linear(outer))
    seqpar.place(model, {"": outer, "1": inner})
    with Copies():
        assert model(torch.empty(2, 3, device=outer)).device == torch.device(outer)
    assert waited == {"cpu": True, "cuda": False}


@pytest.mark.usefixtures("fake_gpus")
def test_an_embedding_on_the_cpu_and_the_rest_on_a_gpu():
    parts = {"": "cuda:0", "embed": "cpu"}
    inputs = torch.ones(2, 4, dtype=torch.int64), {"bias": torch.zeros(3)}
    with pytest.raises(RuntimeError, match="device"):
        Embeds("cpu", "cuda:0")(inputs[0], extra=inputs[1])
    model = seqpar.place(Embeds("cpu", "cuda:0"), parts)
    out = model(inputs[0], extra=inputs[1])
    assert str(out.device) == "cuda:0"


@pytest.mark.usefixtures("fake_gpus")
def test_a_stack_cut_in_two_runs_over_two_gpus():
    model = Stack()
    model.stem, model.first = linear("cuda:0"), linear("cuda:0")
    model.second, model.head = linear("cuda:1"), linear("cuda:1")
    x = torch.zeros(2, 3)
    with pytest.raises(RuntimeError, match="device"):
        model(x)
    seqpar.place(model, {"stem": "cuda:0", "first": "cuda:0", "second": "cuda:1", "head": "cuda:1"})
    out = model(x)
    assert str(out.device) == "cuda:1"


@pytest.mark.usefixtures("fake_gpus")
def test_a_second_placement_takes_the_place_of_the_first():
    model = nn.Sequential(linear("cpu"), nn.Sequential(linear("cuda:1"), linear("cpu")), linear("cpu"))
    seqpar.place(model, {"": "cuda:0", "1": "cuda:1", "1.1": "cpu"})
    seqpar.place(model, {"": "cpu", "1.0": "cuda:1"})
    assert model(torch.zeros(2, 3)).device.type == "cpu"


@pytest.mark.usefixtures("fake_gpus")
def test_a_placement_of_a_part_leaves_the_model_around_it_as_it_was_placed():
    model = nn.Sequential(linear("cuda:0"), nn.Sequential(linear("cuda:1"), linear("cpu")), linear("cuda:0"))
    seqpar.place(model, {"": "cuda:0", "1": "cpu"})
    seqpar.place(model[1], {"": "cpu", "0": "cuda:1"})
    assert str(model(torch.zeros(2, 3)).device) == "cuda:0"


def test_bad_placements_are_named():
    with pytest.raises(KeyError, match="'third' is not a part of Stack; its parts are"):
        seqpar.place(Stack(), {"third": "cpu"})
    with pytest.raises(ValueError, match=r"first\.weight is in none of the parts \['stem'\]"):
        seqpar.place(Stack(), {"stem": "cpu"})
    absent = "index 99 of cuda:99 is not below" if torch.cuda.is_available() else "does not exist"
    with pytest.raises(ValueError, match=rf"parts\['stem'\].*{absent}"):
        seqpar.place(Stack(), {"": "cpu", "stem": "cuda:99"})


@pytest.mark.usefixtures("any_device_exists")
def test_tied_parts_on_two_devices_are_refused():
    model = Stack()
    model.head.weight = model.stem.weight
    with pytest.raises(
        ValueError, match=r"stem\.weight and head\.weight are one tensor and were placed on cpu and meta"
    ):
        seqpar.place(model, {"": "cpu", "head": "meta"})


def last_of(number):
    found = token_loss
    for _ in range(number):
        found = functools.partial(found)
    return found


class Places:
    """Where a function stands in a class."""

    @property
    def asked(self):
        return 1

    @classmethod
    def of_class(cls):
        return 1

    @staticmethod
    def alone():
        return 1

    def method(self):
        return 1


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (token_loss, "token_loss"),
        (last_of(1), "token_loss"),
        (last_of(7), "token_loss"),
        (vars(Places)["asked"], "asked"),
        (vars(Places)["of_class"], "of_class"),
        (vars(Places)["alone"], "alone"),
        (Places().method, "method"),
        (functools.partial(Places().method), "method"),
        (functools.lru_cache(token_loss), "token_loss"),
        (Places, None),
        (Places(), None),
        (None, None),
        (len, None),
    ],
)
def test_a_function_is_found_in_what_calls_it(value, name):
    assert getattr(function_in(value), "__name__", None) == name


@pytest.mark.parametrize(
    ("code", "is_library"),
    [
        (torch, True),
        (nn.functional.cross_entropy, True),
        (nn.Linear, True),
        (seqpar.LossCompute, True),
        (itertools, False),
        (types.ModuleType("torchmetrics"), False),
        (types.ModuleType("torch.extra"), True),
        (token_loss, False),
        (Places, False),
        (Places(), False),
        (types.SimpleNamespace(__module__=None), False),
    ],
)
def test_the_code_of_libraries_is_told_by_its_package(code, is_library):
    assert is_of_library(code) == is_library


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.0], [1.0, 2.5], 0.2),
        ([1.0, -4.0], [2.0, -2.0], 0.5),
        ([1.0, math.inf], [1.5, 3.0], 1 / 3),
        ([-math.inf, 4.0], [-math.inf, 2.0], 0.5),
        ([math.nan], [1.0], 0.0),
        ([0.0], [0.0], 0.0),
        ([], [], 0.0),
        ([1.0], [1.0 + 1e-9], 1e-9),
    ],
)
def test_the_largest_difference_is_relative_to_the_largest_number_that_is_finite_in_both(a, b, expected):
    a, b = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    for one, other in ((a, b), (b, a)):
        assert largest_difference(one, other) == pytest.approx(expected, rel=1e-3)
    high = torch.tensor([60_000.0]).half()
    assert largest_difference(high, -high) == 2


EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}


@pytest.mark.parametrize(
    ("dtypes", "least", "coarsest", "smallest"),
    [
        # Results without a graph, which may have been computed in the least precise dtype
        ([torch.float64], torch.float64, torch.float64, 2.0**-1074),
        ([torch.float64], torch.float32, torch.float32, 2.0**-149),
        ([torch.bfloat16], torch.float32, torch.bfloat16, 2.0**-133),
        # Results of a computation in these dtypes, one after the other
        ([torch.float64, torch.float64], torch.bfloat16, torch.float64, 2.0**-1074),
        ([torch.float64, torch.bfloat16, torch.float64], torch.float64, torch.bfloat16, 2.0**-133),
        ([torch.float32, torch.float16, torch.float32], torch.float32, torch.float16, 2.0**-24),
        ([torch.float16, torch.float32, torch.float64], torch.float64, torch.float16, 2.0**-24),
    ],
)
def test_the_precision_of_a_result_is_that_of_the_coarsest_dtype_in_its_graph(dtypes, least, coarsest, smallest):
    result = torch.ones(3, dtype=dtypes[0], requires_grad=len(dtypes) > 1)
    for dtype in dtypes[1:]:
        result = (2 * result).to(dtype)
    found = precision_of(result, least)
    assert found.eps == EPS[coarsest]
    assert found.smallest == smallest
    assert found.rounding == min(10_000 * found.eps, math.sqrt(found.eps))


def answer(values, *gradients, eps=1e-6):
    return Answer(torch.tensor(values), tuple(torch.tensor(each) for each in gradients), Precision(eps, eps))


@pytest.mark.parametrize(
    ("together", "alone", "rows", "expected"),
    [
        (answer(3.0), answer([1.0, 2.0]), None, (0.0, 0.0)),
        (answer(3.6), answer([1.0, 2.0]), None, (0.2, 0.0)),
        # Relative to the terms, which may cancel
        (answer(0.5), answer([1.0, -1.0]), None, (0.25, 0.0)),
        (answer(1.0), answer([0.0, 0.0]), None, (1 / torch.finfo(torch.float32).tiny, 0.0)),
        (answer(math.inf), answer([1.0, 2.0]), None, (0.0, 0.0)),
        (answer(3.0), answer([1.0, math.nan]), None, (0.0, 0.0)),
        (answer(5.0), answer([1.0, 2.0]), [0, 1, 1], (0.0, 0.0)),
        (answer([2.0, 1.0]), answer([1.0, 2.0]), [1, 0], (0.0, 0.0)),
        (answer([2.0, 1.0]), answer([1.0, 2.0]), None, (0.5, 0.0)),
        (answer(3.0, [1.0, 2.0], [4.0]), answer([1.0, 2.0], [1.0, 1.0], [4.0]), None, (0.0, 0.5)),
        (answer(3.0, [4.0], [2.0, 1.0]), answer([1.0, 2.0], [4.0], [1.0, 2.0]), None, (0.0, 0.5)),
        (answer(3.0, [2.0, 1.0]), answer([2.0, 1.0], [1.0, 2.0]), [1, 0], (0.0, 0.0)),
        # At most 16 roundings of the largest number, a gradient or a value, are left of terms that cancel
        (answer(0.0, [5.0, 1.0], [7e-5, 0.0]), answer([0.0, 0.0], [5.0, 1.0], [0.0, 7e-5]), None, (0.0, 0.0)),
        (answer(0.0, [5.0, 1.0], [9e-5, 0.0]), answer([0.0, 0.0], [5.0, 1.0], [0.0, 0.0]), None, (0.0, 1.0)),
        (answer(0.0, [5.0, 1.0], [0.0, 0.0]), answer([0.0, 0.0], [5.0, 1.0], [0.0, 9e-5]), None, (0.0, 1.0)),
        (answer(6.0, [7e-5]), answer([5.0, 1.0], [-7e-5]), None, (0.0, 0.0)),
        (answer(6.0, [9e-5]), answer([5.0, 1.0], [-9e-5]), None, (0.0, 2.0)),
    ],
)
def test_rows_in_company_are_compared_with_the_same_rows_alone(together, alone, rows, expected):
    change = change_in_company(together, alone, None if rows is None else torch.tensor(rows))
    assert change[:2] == pytest.approx(expected)
    assert change.is_rounding == (max(expected) == 0)
    assert ("a row's gradient changes" in str(change)) == (expected[1] > 0)
    for one, other in ((1e-6, 0.25), (0.25, 1e-6)):
        of_both = change_in_company(answer(1.0, eps=one), answer([1.0], eps=other))
        assert of_both.rounding == 0.5
