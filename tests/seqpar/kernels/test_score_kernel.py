"""The Triton kernels of token scores have the plain scores and every gradient: on a GPU, else in the interpreter."""

from collections import defaultdict
from dataclasses import replace
from statistics import median
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import seqpar
from seqpar.kernels import row_kernel
from seqpar.testing import assert_same_gradients
from seqpar.testing.ranks import ranks
from seqpar.testing.strategies import vocabulary_splits
from tests.seqpar.distributed.test_vocab_parallel import assert_close, freeze_projection, masked_shard, scores
from tests.seqpar.kernels.interpreted import DEVICE, IN_RANKS, KERNELS, NUMPY_SAYS, kernels, moved
from tests.seqpar.linear.score_cases import ScoreCase, assert_scores, plain_scores, score_cases, weighted
from tests.seqpar.recording import recorded

EXAMPLES = 16 if DEVICE == "cpu" else 8  # every other vocabulary is another kernel, which a GPU must compile
BLOCKS = st.sampled_from([4, row_kernel.LARGEST_BLOCK])
"""Classes at once: every row in some steps, or in one."""
USED = st.sampled_from(["all", "all", "log_prob", "entropy", "log_probs_at"])

pytestmark = [pytest.mark.unswitched, pytest.mark.filterwarnings(NUMPY_SAYS)]


@st.composite
def kernel_cases(draw: st.DrawFn) -> ScoreCase:
    """No more than the largest class is asked for: more need torch."""
    case = draw(score_cases())
    return replace(case, top_k=None if case.top_k is None else 1)


def on_device(case):
    """The tensors, and the options with theirs; the plain ones are made beside them."""
    options = {name: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for name, t in case.options.items()}
    return moved(case.tensors()), options


@pytest.mark.kernels
@settings(max_examples=EXAMPLES)
@given(kernel_cases(), USED, st.sampled_from([None, 1, 3]), BLOCKS, st.booleans())
def test_scores_and_gradients_are_the_plain_ones(case, used, chunk_tokens, block, frozen):
    tensors, options = on_device(case)
    if frozen:
        freeze_projection(tensors)
    found = []

    def by_kernel():
        found[:] = [seqpar.token_scores(**tensors, **options, chunk_tokens=chunk_tokens)]
        return weighted(found[0], case.linear.seed, used)

    with kernels() as launched, patch.object(row_kernel, "LARGEST_BLOCK", block):
        assert_same_gradients(
            by_kernel,
            lambda: weighted(plain_scores(**tensors, **options), case.linear.seed, used),
            {name: tensors[name] for name in ("hidden", "weight", "bias") if name in tensors},
        )
    ignored = tensors["target"] == case.linear.padding
    assert_scores(found[0], plain_scores(**tensors, **options), ignored)
    assert set(launched) <= KERNELS
    assert bool(launched) == bool((~ignored).any())


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
def test_one_kernel_reads_the_logits_and_one_writes_each_gradient(frozen, entropy):
    torch.manual_seed(0)
    hidden = torch.randn(5, 4, dtype=torch.float64, device=DEVICE, requires_grad=True)
    weight = torch.randn(7, 4, dtype=torch.float64, device=DEVICE, requires_grad=not frozen)
    target = torch.randint(7, (5,), device=DEVICE)

    def total(scores):
        # The gradient of a sum arrives as one number that stands for all rows
        return scores.log_prob.sum() + (scores.entropy.sum() if entropy else 0.0)

    options = {"ignore_index": -100, "softcap": None, "temperature": 1.0}
    with kernels() as launched:
        assert_same_gradients(
            lambda: total(seqpar.token_scores(hidden, weight, target, entropy=entropy, chunk_tokens=2)),
            lambda: total(plain_scores(hidden, weight, target, **options)),
            {"hidden": hidden, "weight": weight} if not frozen else {"hidden": hidden},
        )
    assert sorted(launched) == sorted(["_row_sums", "_row_gradient"] * 3)
    # Of the entropy nothing is kept in forward
    assert launched[:2] == ["_row_sums", "_row_gradient" if frozen and not entropy else "_row_sums"]


@pytest.mark.parametrize("frozen", [False, True])
def test_every_option_at_once_and_classes_that_are_given_twice(frozen):
    torch.manual_seed(0)
    sizes = {"hidden": (4, 3), "weight": (9, 3), "bias": (9,)}
    tensors = moved({name: torch.randn(size).double().requires_grad_() for name, size in sizes.items()})
    if frozen:
        freeze_projection(tensors)
    options = {
        "target": torch.tensor([3, 0, 8, 2]), "ids": torch.tensor([[3, 1, 1], [5, 0, 7], [2, 2, 2], [0, 1, 4]]),
        "temperature": torch.tensor([0.5, 2.0, 1.0, 0.7]).double(),
    }  # fmt: skip
    options = {name: t.to(DEVICE) for name, t in options.items()} | {"softcap": 1.5, "ignore_index": 2}
    with kernels(), patch.object(row_kernel, "LARGEST_BLOCK", 4):
        assert_same_gradients(
            lambda: weighted(seqpar.token_scores(**tensors, **options, entropy=True), 0),
            lambda: weighted(plain_scores(**tensors, **options), 0),
            tensors,
        )


@pytest.mark.parametrize("block", [4, row_kernel.LARGEST_BLOCK])
@pytest.mark.parametrize("top_k", [1, 2])
def test_of_the_largest_classes_the_kernel_finds_the_first_and_torch_several(top_k, block):
    """Of equal classes too: 1 and 5 are of one lane of blocks of 4, 2 and 4 of two others."""
    hidden = torch.ones(3, 1, device=DEVICE, requires_grad=True)
    weight = torch.tensor([[1.0], [2.0], [2.0], [0.0], [2.0], [2.0]], device=DEVICE)
    target = torch.zeros(3, dtype=torch.long, device=DEVICE)
    with kernels() as launched, patch.object(row_kernel, "LARGEST_BLOCK", block):
        found = seqpar.token_scores(hidden, weight, target, top_k=top_k)
        found.log_prob.sum().backward()
    assert found.top_ids.tolist() == [[1, 2][:top_k]] * 3
    assert bool(launched) == (top_k == 1)


def test_without_triton_there_is_no_kernel():
    hidden, weight = torch.randn(3, 4, device=DEVICE), torch.randn(9, 4, device=DEVICE)
    target = torch.zeros(3, dtype=torch.long, device=DEVICE)
    with kernels() as launched, patch("seqpar.core.device_facts._is_installed", lambda: False):
        without = seqpar.token_scores(hidden, weight, target, entropy=True)
    assert not launched
    with kernels() as launched:
        found = seqpar.token_scores(hidden, weight, target, entropy=True)
    assert launched == ["_row_sums"]
    torch.testing.assert_close(found.entropy, without.entropy)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("masked", [slice(0, 4), slice(3, 9), slice(1, 9, 2)])
def test_classes_masked_out_by_a_bias_of_minus_infinity_have_no_part(masked, frozen):
    """Also where all classes of a step, or of a lane, are masked out."""
    torch.manual_seed(0)
    hidden = torch.randn(6, 4, dtype=torch.float64, device=DEVICE, requires_grad=True)
    weight = torch.randn(9, 4, dtype=torch.float64, device=DEVICE, requires_grad=not frozen)
    bias = torch.zeros(9, dtype=torch.float64, device=DEVICE)
    bias[masked] = -torch.inf
    kept = bias.isfinite().nonzero().flatten()
    target = kept[torch.randint(len(kept), (6,), device=DEVICE)]

    def total(scores):
        return (scores.log_prob * 3 + scores.entropy.square()).sum()

    options = {"ignore_index": -100, "softcap": None, "temperature": 1.0}
    with kernels(), patch.object(row_kernel, "LARGEST_BLOCK", 2):
        assert_same_gradients(
            lambda: total(seqpar.token_scores(hidden, weight, target, bias=bias, entropy=True)),
            lambda: total(plain_scores(hidden, weight[kept], torch.searchsorted(kept, target), **options)),
            {"hidden": hidden, "weight": weight} if not frozen else {"hidden": hidden},
        )


@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
@pytest.mark.parametrize("block", [2, 16])
def test_a_hidden_state_that_is_no_number_is_seen_in_every_score(odd, block):
    hidden = torch.ones(3, 2, device=DEVICE)
    weight = torch.linspace(-1, 1, 18, device=DEVICE).reshape(9, 2)
    hidden[1, 0] = odd
    with kernels(), patch.object(row_kernel, "LARGEST_BLOCK", block):
        found = seqpar.token_scores(hidden, weight, torch.zeros(3, dtype=torch.int64, device=DEVICE), entropy=True)
    for score in found[:2]:
        assert score.isnan().tolist() == [False, True, False]


@settings(max_examples=EXAMPLES // 3)
@given(kernel_cases())
def test_rows_that_cannot_be_left_out_count_for_nothing(case):
    """As while a CUDA graph is captured, and whatever their hidden states are."""
    tensors, options = on_device(case)
    ignored = tensors["target"] == case.linear.padding
    plain = {**tensors, "hidden": tensors["hidden"].detach().clone().requires_grad_(tensors["hidden"].requires_grad)}
    with torch.no_grad():
        tensors["hidden"][ignored] = torch.nan
    names = [name for name in ("hidden", "weight", "bias") if name in tensors and tensors[name].requires_grad]
    expected = plain_scores(**plain, **options)
    with kernels(), recorded():
        found = seqpar.token_scores(**tensors, **options)
        got = torch.autograd.grad(weighted(found, 0), [tensors[n] for n in names]) if names else ()
    assert_scores(found, expected, ignored)
    right = torch.autograd.grad(weighted(expected, 0), [plain[n] for n in names]) if names else ()
    for ours, theirs in zip(got, right, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12 * float(theirs.abs().max()))


def test_a_target_that_could_not_be_checked_is_seen_in_its_score():
    hidden, weight = torch.randn(3, 4, device=DEVICE), torch.randn(9, 4, device=DEVICE)
    target = torch.tensor([0, 9, 1], device=DEVICE)
    with kernels(), recorded():
        found = seqpar.token_scores(hidden, weight, target, ids=target.flip(0).unsqueeze(1))
    assert found.log_prob.isnan().tolist() == [False, True, False]
    assert found.log_probs_at.isnan().flatten().tolist() == [False, True, False]


def scores_by_kernel(rank, world, drawn, block):
    with kernels() as launched, patch.object(row_kernel, "LARGEST_BLOCK", block):
        return scores(rank, world, drawn), launched


@pytest.mark.kernels
@settings(max_examples=EXAMPLES // 3)
@given(st.data())
def test_a_vocabulary_shard_has_its_part_of_the_gradient(data):
    """Real ranks, each with the interpreter: its own sums out, the gradient in."""
    world = data.draw(st.sampled_from([2, 2, 3]))
    case = data.draw(kernel_cases())
    split = data.draw(vocabulary_splits(case.linear.vocab_size, world))
    used, chunk_tokens, frozen = data.draw(USED), data.draw(st.sampled_from([None, 3])), data.draw(st.booleans())
    whole = case.tensors()
    if frozen:
        freeze_projection(whole)
    expected = plain_scores(**whole, **case.options)
    leaves = [name for name, t in whole.items() if t.requires_grad]
    total = weighted(expected, case.linear.seed, used)
    gradients = torch.autograd.grad(total, [whole[name] for name in leaves]) if leaves else ()
    right = dict(zip(leaves, gradients, strict=True))
    answers = ranks(world, scores_by_kernel, [(case, split, used, chunk_tokens, frozen)], data.draw(BLOCKS))
    counted = bool((whole["target"] != case.linear.padding).any())
    for rows, (((found, grads),), launched) in zip(split, answers, strict=True):
        found = seqpar.TokenScores(*(None if t is None else torch.as_tensor(t) for t in found))
        assert_scores(found, expected, whole["target"] == case.linear.padding)
        assert set(launched) <= KERNELS
        assert bool(launched) == bool(rows and counted and IN_RANKS)
        if "hidden" in right:
            assert_close("the gradient of hidden", grads["hidden"], right["hidden"])
    for name in {"weight", "bias"} & set(leaves):
        together = torch.cat([torch.as_tensor(grads[name]) for ((_, grads),), _ in answers])
        assert_close(f"the gradient of {name}", together, right[name])


def masked_by_kernel(rank, world, frozen):
    with kernels() as launched:
        answers = masked_shard(rank, world, frozen)
    assert bool(launched) == IN_RANKS
    return answers


@pytest.mark.parametrize("frozen", [False, True])
def test_a_rank_whose_classes_are_all_masked_adds_nothing(frozen):
    expected = masked_shard(0, 1, frozen)
    for answers in ranks(2, masked_by_kernel, frozen):
        for what, got, plain in zip(("log_prob", "entropy", "hidden"), answers, expected, strict=True):
            assert_close(what, got, torch.as_tensor(plain))


def test_batch_invariant_scores_have_the_same_bits_in_any_batch(monkeypatch):
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 4, device=DEVICE), torch.randn(19, 4, device=DEVICE)
    target = torch.randint(19, (6,), device=DEVICE)

    def of(rows):
        scores = seqpar.token_scores(hidden[rows], weight, target[rows], entropy=True, batch_invariant=True)
        return torch.stack(scores[:2])

    tiles = (
        patch("seqpar.linear.invariant_scores.INVARIANT_ROWS", 4),
        patch("seqpar.linear.token_scores.INVARIANT_ROWS", 4),
    )
    with kernels() as launched, tiles[0], tiles[1]:
        every = of(slice(None))
        assert torch.equal(of([5]), every[:, [5]])
    assert launched == ["_row_sums"] * 3


DRAWS = 3


def problem(dtype, shape, seed, scale, options):
    """hidden, weight and bias in a low precision, a target, and the factors of a loss of all scores."""
    rows, width, vocab_size = shape
    random = torch.Generator().manual_seed(seed)
    sizes = {"hidden": (rows, width), "weight": (vocab_size, width), "bias": (vocab_size,)}
    leaves = {name: torch.randn(size, generator=random) for name, size in sizes.items()}
    leaves["hidden"] *= scale
    leaves["weight"] /= width**0.5
    made = {name: t.to(DEVICE, dtype).requires_grad_() for name, t in leaves.items()}
    target = torch.randint(vocab_size, (rows,), generator=random).to(DEVICE)
    ids = torch.randint(vocab_size, (rows, 2), generator=random).to(DEVICE)
    given = {"target": target, "ids": ids, "temperature": 1.0, "softcap": None, **options}
    if given["temperature"] is None:
        given["temperature"] = (0.5 + torch.rand(rows, generator=random)).to(DEVICE)
    factors = torch.randn(4, rows, generator=random, dtype=torch.float64).to(DEVICE)
    return made, given, factors


def plain_in_dtype(hidden, weight, bias, target, ids, temperature, softcap):
    """The scores as they are usually written: products in the dtype, the softmax in float32 or wider."""
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.unsqueeze(1)
    log_p = (logits / temperature).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return seqpar.TokenScores(
        log_p.gather(1, target.unsqueeze(1)).squeeze(1), entropy, log_probs_at=log_p.gather(1, ids)
    )


def results(function, leaves, given, factors):
    found = function(**leaves, **given)
    columns = torch.stack([found.log_prob, found.entropy, *found.log_probs_at.unbind(1)])
    gradients = torch.autograd.grad((columns.double() * factors).sum(), list(leaves.values()))
    names = ("log_prob", "entropy", "first", "second", *leaves)
    return {name: t.detach().double() for name, t in zip(names, [*columns, *gradients], strict=True)}


def assert_at_most_twice_plain_torchs_error(dtype, shape, seed, scale, options, **ours):
    """Errors of scores and gradients relative to float64, as medians over some draws: one of them may be luck."""

    def by_kernel(**given):
        return seqpar.token_scores(**given, entropy=True, **ours)

    errors = {by_kernel: defaultdict(list), plain_in_dtype: defaultdict(list)}
    for draw in range(seed, seed + DRAWS):
        leaves, given, factors = problem(dtype, shape, draw, scale, options)
        wide = {name: t.detach().double().requires_grad_() for name, t in leaves.items()}
        right = results(plain_in_dtype, wide, given, factors)
        for way, found in errors.items():
            with kernels() as launched:
                mine = results(way, leaves, given, factors)
            assert set(launched) == (KERNELS - {"_row_before", "_row_loss"} if way is by_kernel else set())
            for name in mine:
                found[name].append(float((mine[name] - right[name]).norm() / right[name].norm()))
    for name, of_draws in errors[by_kernel].items():
        # A result cannot be expected nearer than its own rounding: float32 for scores, the dtype for gradients
        rounding = torch.finfo(dtype if name in leaves else torch.float32).eps / 2
        plain = median(errors[plain_in_dtype][name])
        assert median(of_draws) <= 2 * max(plain, rounding), (name, of_draws, plain)


LOW = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SETTINGS = st.fixed_dictionaries(
    {"temperature": st.sampled_from([1.0, 0.7, None]), "softcap": st.sampled_from([None, 5.0])}
)


@pytest.mark.kernels
@settings(max_examples=EXAMPLES // 2, derandomize=True)
@given(
    LOW,
    st.tuples(st.integers(8, 12), st.integers(2, 8), st.integers(3, 40)),
    st.integers(0, 2**16),
    st.sampled_from([1.0, 10.0]),
    SETTINGS,
)
def test_in_low_precision_the_error_is_at_most_twice_that_of_plain_torch(dtype, shape, seed, scale, options):
    """On the same examples always: with so few numbers, a search finds some that are off by more, by luck."""
    with patch.object(row_kernel, "LARGEST_BLOCK", 16):
        assert_at_most_twice_plain_torchs_error(dtype, shape, seed, scale, options, chunk_tokens=7)


@pytest.mark.parametrize("softcap", [4.0, 1000.0])
def test_a_softcap_above_the_logits_costs_no_digits(softcap):
    assert_at_most_twice_plain_torchs_error(torch.float32, (16, 4, 40), 0, 1.0, {"softcap": softcap})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [50_257, 151_936])
@pytest.mark.parametrize("options", [{}, {"temperature": None, "softcap": 30.0}])
def test_at_real_sizes_the_error_is_at_most_twice_that_of_plain_torch(dtype, vocab_size, options):
    assert_at_most_twice_plain_torchs_error(dtype, (1024, 512, vocab_size), 0, 1.0, options, chunk_tokens=256)
