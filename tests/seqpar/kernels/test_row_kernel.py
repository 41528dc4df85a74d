"""The Triton kernels have the value and every gradient of the plain loss: on a GPU, else in Triton's interpreter."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import seqpar
from seqpar.core.device_facts import why_no_kernel
from seqpar.core.stored_gradients import in_own_precision, narrow
from seqpar.kernels import row_kernel
from seqpar.linear.projection import Projection
from seqpar.rows.conventions import CONVENTIONS
from seqpar.rows.scores import RowFunction, Upstream
from seqpar.testing import assert_same_gradients, assert_same_results
from seqpar.testing.ranks import ranks
from seqpar.testing.strategies import vocabulary_splits
from tests.seqpar.distributed.test_vocab_parallel import assert_answers, losses
from tests.seqpar.distributed.vocab_cases import PLAIN
from tests.seqpar.kernels.interpreted import BLOCKS, DEVICE, IN_RANKS, KERNELS, NUMPY_SAYS, kernels, moved
from tests.seqpar.linear.linear_loss import linear_cases, plain_logits, plain_loss
from tests.seqpar.linear.test_linear_cross_entropy import LEAVES
from tests.seqpar.linear.test_low_precision import LOW, both_errors
from tests.seqpar.recording import recorded

ROWS = 32 if DEVICE == "cpu" else 256  # the interpreter takes them one by one
EXAMPLES = 20 if DEVICE == "cpu" else 15  # every other vocabulary is another kernel, which a GPU must compile

pytestmark = [pytest.mark.unswitched, pytest.mark.filterwarnings(NUMPY_SAYS)]


@pytest.mark.kernels
@settings(max_examples=EXAMPLES)
@given(linear_cases(), BLOCKS)
def test_every_option_has_the_gradient_of_its_published_formula(case, block):
    tensors = moved(case.tensors())
    with kernels() as launched, patch.object(row_kernel, "LARGEST_BLOCK", block):
        assert_same_gradients(
            lambda: seqpar.linear_cross_entropy(**tensors, **case.options).total * case.upstream,
            lambda: plain_loss(**tensors, **case.options) * case.upstream,
            {name: tensors[name] for name in LEAVES if name in tensors},
        )
    assert set(launched) <= KERNELS
    assert launched or not (tensors["target"] != case.padding).any()


@pytest.mark.kernels
@settings(max_examples=EXAMPLES // 2)
@given(linear_cases(), st.booleans(), BLOCKS)
def test_counts_are_those_of_the_plain_predictions(case, grad, block):
    tensors = moved(case.tensors())
    with kernels(), torch.set_grad_enabled(grad), patch.object(row_kernel, "LARGEST_BLOCK", block):
        loss = seqpar.linear_cross_entropy(**tensors, **case.options)
    with torch.no_grad():
        logits = plain_logits(tensors["hidden"], tensors["weight"], tensors.get("bias"), case.softcap, case.temperature)
        target = tensors["target"].flatten()
        kept = target != case.padding
        nll = nn.functional.cross_entropy(logits, target, ignore_index=case.padding, reduction="sum")
    assert loss.tokens == kept.sum()
    assert loss.correct == ((logits.argmax(-1) == target) & kept).sum()
    torch.testing.assert_close(loss.nll, nll, rtol=1e-12, atol=1e-13)


EACH = [
    replace(
        PLAIN, convention=convention, weighted=weighted, padding=-100 if shares.padding else 2, z_loss=0.01,
        padding_share=0.3, softcap=2.0 if capped else None, temperature=0.5 if capped else 1.0, token_weighted=capped,
    )
    for convention, shares in CONVENTIONS.items() for weighted in (False, True) for capped in (False, True)
]  # fmt: skip
"""Every term of the kernels' formulas, where random cases may pass one by."""


@pytest.mark.parametrize("case", EACH, ids=lambda case: f"{case.convention}-{case.weighted}-{case.softcap}")
def test_each_convention_with_and_without_class_weights(case):
    tensors = moved(case.tensors())
    with kernels(), patch.object(row_kernel, "LARGEST_BLOCK", 4):
        assert_same_gradients(
            lambda: seqpar.linear_cross_entropy(**tensors, **case.options).total,
            lambda: plain_loss(**tensors, **case.options),
            {name: tensors[name] for name in LEAVES if name in tensors},
        )


@pytest.mark.kernels
def test_each_convention_with_and_without_class_weights_in_a_shard():
    per_rank = ranks(2, losses_by_kernel, [(case, [4, 7], [0, 1], False) for case in EACH], 4)
    for i, case in enumerate(EACH):
        assert_answers(case, [0, 1], [answers[i] for answers, _ in per_rank])


def losses_by_kernel(rank, world, drawn, block):
    with kernels() as launched, patch.object(row_kernel, "LARGEST_BLOCK", block):
        return losses(rank, world, drawn), launched


@settings(max_examples=EXAMPLES // 3)
@given(st.data())
def test_a_vocabulary_shard_has_its_part_of_the_gradient(data):
    """Real ranks, each with the interpreter; partial sums out, the gradient in."""
    world = data.draw(st.sampled_from([2, 2, 3]))
    case = data.draw(linear_cases())
    split, block = data.draw(vocabulary_splits(case.vocab_size, world)), data.draw(BLOCKS)
    order = list(range(world))
    per_rank = ranks(world, losses_by_kernel, [(case, split, order, data.draw(st.booleans()))], block)
    assert_answers(case, order, [answers[0] for answers, _ in per_rank])
    for rows, (_, launched) in zip(split, per_rank, strict=True):
        assert set(launched) <= KERNELS
        kept = (case.tensors()["target"] != case.padding).any()
        assert bool(launched) == bool(rows and kept and IN_RANKS)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("chunks", [1, ROWS])
def test_at_most_twice_plain_torchs_own_error_at_any_number_of_chunks(dtype, chunks):
    with kernels() as launched:
        mine, theirs = both_errors(LOW[dtype], 0.1, None, chunks, ROWS // chunks, 300, ROWS)
    assert launched == ["_row_loss"] * chunks
    floor = torch.finfo(LOW[dtype]).eps / 2
    floors = [max(floor / ROWS**0.5, torch.finfo(torch.float32).eps), floor, floor, floor]
    for name, a, b, least in zip(["loss", "hidden", "weight", "bias"], mine, theirs, floors, strict=True):
        assert a <= 2 * max(b, least), (name, a, b)


def test_classes_masked_out_by_a_bias_of_minus_infinity_have_no_part():
    torch.manual_seed(0)
    made = torch.randn(6, 4, dtype=torch.float64), torch.randn(9, 4, dtype=torch.float64)
    hidden, weight = (t.to(DEVICE).requires_grad_() for t in made)
    bias, target = torch.zeros(9, dtype=torch.float64, device=DEVICE), torch.randint(5, (6,), device=DEVICE)
    bias[5:] = -torch.inf
    with kernels(), patch.object(row_kernel, "LARGEST_BLOCK", 2):
        assert_same_gradients(
            lambda: seqpar.linear_cross_entropy(hidden, weight, target, bias=bias).total,
            lambda: nn.functional.cross_entropy(hidden @ weight[:5].t(), target, reduction="sum"),
            {"hidden": hidden, "weight": weight},
        )


def test_a_hidden_state_that_is_no_number_is_seen_in_the_loss():
    hidden, weight = torch.randn(3, 4, device=DEVICE), torch.randn(9, 4, device=DEVICE)
    hidden[1, 2] = torch.nan
    with kernels():
        loss = seqpar.linear_cross_entropy(hidden, weight, torch.zeros(3, dtype=torch.int64, device=DEVICE))
    assert loss.total.isnan()


def test_the_engine_takes_the_kernel_and_says_so():
    torch.manual_seed(0)
    head = nn.Linear(4, 9).double().to(DEVICE)
    engine = seqpar.LossCompute(head, seqpar.LabelSmoothing(0.1, "fairseq"), chunk_tokens=5)
    hidden = torch.randn(12, 4, dtype=torch.float64, device=DEVICE, requires_grad=True)
    target = torch.randint(9, (12,), device=DEVICE)
    with kernels() as launched:
        assert "in one Triton kernel" in engine.explain()
        # The first call holds the closed form against the pair on a few rows
        loss = engine(hidden, target)
        launched.clear()
        engine(hidden, target)
    assert launched == ["_row_loss"] * 3
    if DEVICE == "cpu":
        torch.testing.assert_close(loss.total, engine(hidden, target).total, rtol=1e-13, atol=0)
        assert "Triton" not in engine.explain()  # nobody expects one there


def test_where_there_is_no_kernel_the_reason_is_known():
    assert why_no_kernel("mps") == "Triton has none for mps"
    assert why_no_kernel("cpu") == "Triton has none for the CPU"
    with patch("seqpar.core.device_facts._is_installed", lambda: False):
        assert why_no_kernel("cuda") == "Triton is not installed"
        assert why_no_kernel("xpu") == "Triton is not installed"
    assert why_no_kernel("cuda") == ""


@pytest.fixture
def whole_batches():
    """As while a CUDA graph is captured: no row is looked at. The real thing is in the tests of a GPU."""
    with recorded():
        yield


class Own(nn.Module):
    """A projection that the engine does not know."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, hidden):
        return self.linear(hidden)


@pytest.mark.usefixtures("whole_batches")
@settings(max_examples=EXAMPLES // 2)
@given(linear_cases(), st.booleans())
def test_rows_that_cannot_be_left_out_count_for_nothing(case, by_kernel):
    """Not even where their hidden state is no number."""
    tensors = moved(case.tensors())
    kept = tensors["target"] != case.padding
    plain = {**tensors, "hidden": tensors["hidden"].detach().clone().requires_grad_(tensors["hidden"].requires_grad)}
    with torch.no_grad():
        tensors["hidden"][~kept] = torch.nan
    names = [n for n in LEAVES if n in tensors and tensors[n].requires_grad]
    with kernels() if by_kernel else patch("seqpar.linear.projection.why_no_kernel", lambda _: "not asked for"):
        loss = seqpar.linear_cross_entropy(**tensors, **case.options)
        got = torch.autograd.grad(loss.total, [tensors[n] for n in names]) if names else ()
    reference = plain_loss(**plain, **case.options)
    expected = torch.autograd.grad(reference, [plain[n] for n in names]) if names else ()
    assert loss.tokens == kept.sum()
    for a, b in zip((loss.total, *got), (reference, *expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12 * float(b.detach().abs().max()))


@pytest.mark.usefixtures("whole_batches")
@pytest.mark.parametrize("by_kernel", [True, False])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("chunks", [{"chunk_tokens": 4}, {"chunk_size": 2}, {}])
def test_the_engine_can_be_recorded_after_its_first_call(by_kernel, own, chunks):
    torch.manual_seed(0)
    linear = nn.Linear(4, 9).double().to(DEVICE)
    criterion = nn.CrossEntropyLoss(reduction="sum", ignore_index=3)
    engine = seqpar.LossCompute(Own(linear) if own else linear, criterion, **chunks)
    hidden = torch.randn(3, 5, 4, dtype=torch.float64, device=DEVICE, requires_grad=True)
    target = torch.randint(9, (3, 5), device=DEVICE)
    with kernels() if by_kernel else patch("seqpar.linear.projection.why_no_kernel", lambda _: "not asked for"):
        if own:
            with pytest.raises(RuntimeError, match="first call of the engine is being captured"):
                engine(hidden, target)
            with recorded(False):  # a warm-up, before the graph
                engine(hidden, target)
        loss = engine(hidden, target)
        assert loss.tokens == (target != 3).sum()
        assert_same_gradients(
            lambda: engine(hidden, target).total,
            lambda: criterion(linear(hidden).flatten(0, 1), target.flatten()),
            {"hidden": hidden, **dict(linear.named_parameters())},
        )


@pytest.fixture
def nan_in_new_memory():
    """`torch.empty` is filled with nan, as torch does in its deterministic mode."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_memory_between_two_rows_is_zero_before_and_after_the_kernel(dtype):
    """The CPU's bfloat16 products may read whole tiles, beyond the end of a row."""
    hidden, weight = (torch.randn(n, 8, device=DEVICE, dtype=dtype) for n in (5, 123))
    with kernels() as launched:
        rows = Projection(weight, None, dtype, softcap=None, temperature=1.0).ask_for(RowFunction())
        product = rows.product(hidden)
        padded = product.as_strided((5, product.stride(0)), product.stride())
        assert padded.size(1) == 128
        assert (padded[:, 123:] == 0).all()
        picked = torch.arange(5, device=DEVICE).unsqueeze(1)
        read, sums = rows.sums(product, picked, None, again=True)
        rows.gradient_(read, product, picked, None, sums, Upstream(torch.ones_like(sums.best_N)))
    assert launched == ["_row_sums", "_row_gradient"]
    assert (padded[:, 123:] == 0).all()
    assert padded[:, :123].any()


@pytest.mark.usefixtures("whole_batches")
def test_a_target_that_could_not_be_checked_is_seen_in_the_loss():
    hidden, weight = torch.randn(3, 4, device=DEVICE), torch.randn(9, 4, device=DEVICE)
    with kernels():
        assert seqpar.linear_cross_entropy(hidden, weight, torch.tensor([0, 9, 1], device=DEVICE)).total.isnan()


def test_a_factor_is_multiplied_in_its_own_dtype_on_an_accelerator():
    """A number without dimensions would be converted to the gradient's: 65,536 is inf in float16."""
    for shape in [(), (3,), (3, 2)]:
        grad = torch.empty(shape, dtype=torch.float16, device="meta")
        factor = in_own_precision(torch.tensor(65_536.0), grad)
        assert torch.result_type(grad, factor) == torch.float32
        assert (grad * factor).shape == grad.shape


def test_a_gradient_that_is_written_over_half_of_its_own_sum_is_the_rounded_sum():
    for shape in [(2, 1), (2, 5), (3, 1), (7, 5), (64, 33), (600, 1_000), (601, 1_000), (5, 4, 3), (4, 0)]:
        for dtype in (torch.bfloat16, torch.float16):
            sums = torch.randn(shape)
            halves = [half.clone() for half in sums.chunk(2)]
            found = narrow(halves, dtype)
            assert torch.equal(found, sums.to(dtype))
            assert found.data_ptr() == halves[0].data_ptr()
            factor = torch.full((1,) * sums.dim(), 0.37)
            found = narrow([half.clone() for half in sums.chunk(2)], dtype, factor)
            assert torch.equal(found, (sums * factor).to(dtype))
            across = [half.clone(memory_format=torch.preserve_format) for half in sums.mT.contiguous().mT.chunk(2)]
            assert torch.equal(narrow(across, dtype), sums.to(dtype))


NEVER = (7, 8)
"""Classes that no row has."""


def with_odd_weights(convention, of_nobody):
    """A case whose class weights are no numbers where no row has the class."""
    torch.manual_seed(0)
    made = {"hidden": torch.randn(5, 4), "weight": torch.randn(9, 4), "class_weight": torch.rand(9) + 0.5}
    made = {name: t.double() for name, t in made.items()}
    made["class_weight"][[*NEVER]] = of_nobody
    target = torch.randint(1, NEVER[0], (5,))
    target[3] = 0
    return made | {"target": target}, {"smoothing_convention": convention, "ignore_index": 0, "label_smoothing": 0.0}


def in_shards(rank, world, tensors, options, by_kernel):
    start, rows = [(0, 5), (5, 4)][rank]
    tensors = tensors | {name: tensors[name][start : start + rows] for name in ("weight", "class_weight")}
    leaves = [tensors[name].requires_grad_() for name in ("hidden", "weight")]
    with kernels() if by_kernel else patch("seqpar.linear.projection.why_no_kernel", lambda _: "not asked for"):
        vocab = seqpar.VocabShard(torch.distributed.group.WORLD, start, 9)
        loss = seqpar.linear_cross_entropy(**tensors, **options, vocab=vocab)
        return float(loss.total.detach()), [g.numpy() for g in torch.autograd.grad(loss.total, leaves)]


@pytest.mark.parametrize(("convention", "of_nobody"), [("torch", float("inf")), ("harvard", float("nan"))])
@pytest.mark.parametrize("by_kernel", [True, False])
def test_the_weight_of_a_class_that_no_row_has_is_never_multiplied(convention, by_kernel, of_nobody):
    """Not even by 0, which makes nan of inf."""
    tensors, options = with_odd_weights(convention, of_nobody)
    plain = {"ignore_index": 0, "reduction": "sum"}
    shards = ranks(2, in_shards, tensors, options, by_kernel)
    tensors = moved({name: t.requires_grad_(name in LEAVES) for name, t in tensors.items()})
    hidden, weight = tensors["hidden"], tensors["weight"]
    loss = nn.functional.cross_entropy(hidden @ weight.t(), tensors["target"], tensors["class_weight"], **plain)
    expected = loss.detach(), dict(zip(LEAVES, torch.autograd.grad(loss, (hidden, weight)), strict=False))
    assert all(g.isfinite().all() for g in expected[1].values())
    with kernels() if by_kernel else patch("seqpar.linear.projection.why_no_kernel", lambda _: "not asked for"):
        got = seqpar.linear_cross_entropy(**tensors, **options).total
        grads = torch.autograd.grad(got, (hidden, weight))
    assert_same_results((got.detach(), dict(zip(LEAVES, grads, strict=False))), expected)
    joined = torch.cat([torch.from_numpy(g[1]) for _, g in shards])
    from_shards = {"hidden": torch.from_numpy(shards[0][1][0]), "weight": joined}
    assert_same_results(
        (torch.tensor(shards[0][0], dtype=torch.float64), from_shards),
        (expected[0].cpu(), {n: g.cpu() for n, g in expected[1].items()}),
    )
