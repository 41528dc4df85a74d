"""One autograd node, one backward: what the engine promises to the training loop around it."""

import gc

import pytest
import torch
from torch import nn

import seqpar

pytestmark = pytest.mark.usefixtures("nothing_on_the_default_device")


def small(rows=12, width=4, vocab_size=9, **options):
    torch.manual_seed(3)
    generator = nn.Linear(width, vocab_size).double()
    hidden = torch.randn(rows, width, dtype=torch.float64, requires_grad=True)
    target = torch.randint(vocab_size, (rows,))
    return seqpar.LossCompute(generator, seqpar.CrossEntropy(), **options), generator, hidden, target


def test_a_second_backward_is_a_clear_error_not_a_wrong_number():
    engine, generator, hidden, target = small(chunk_tokens=5)
    loss = engine(hidden, target).total
    loss.backward(retain_graph=True)
    first = generator.weight.grad.clone()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    assert torch.equal(generator.weight.grad, first)


@pytest.mark.parametrize("devices", [None, ["cpu"] * 2])
@pytest.mark.parametrize("first", ["hidden", "weight"])
def test_gradients_may_be_asked_for_in_backwards_of_their_own_each_with_its_factor(first, devices):
    """As the zero-bubble pipelines do: hidden's gradient at once, the parameters' when the rank would wait."""
    engine, generator, hidden, target = small(chunk_tokens=5, devices=devices)
    plain = torch.nn.functional.cross_entropy(generator(hidden), target, reduction="sum")
    expected = dict(zip(("hidden", "weight"), torch.autograd.grad(plain, (hidden, generator.weight)), strict=True))
    wanted = {"hidden": hidden, "weight": generator.weight}
    total = engine(hidden, target).total
    for factor, name in zip((2.0, 0.25), sorted(wanted, key=lambda name: name != first), strict=True):
        (grad,) = torch.autograd.grad(total, wanted[name], torch.tensor(factor).double(), retain_graph=True)
        torch.testing.assert_close(grad, factor * expected[name], rtol=1e-12, atol=1e-14)
    (bias_grad,) = torch.autograd.grad(total, generator.bias, retain_graph=True)
    torch.testing.assert_close(bias_grad.sum(), torch.zeros(()).double(), rtol=0, atol=1e-12)
    for tensor in (hidden, generator.weight, generator.bias):
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(total, tensor, retain_graph=True)


def test_a_gradient_of_no_tokens_may_be_asked_for_once_as_well():
    engine, generator, hidden, target = small()
    total = engine(hidden, torch.full_like(target, -100)).total
    for tensor in (hidden, generator.weight):
        (grad,) = torch.autograd.grad(total, tensor, retain_graph=True)
        assert torch.equal(grad, torch.zeros_like(tensor))
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(total, tensor, retain_graph=True)


def test_a_stored_gradient_is_freed_when_it_is_handed_out():
    def stored():
        gc.collect()
        shapes = [tuple(o.shape) for o in gc.get_objects() if type(o) is torch.Tensor and not o.is_nested]
        return shapes.count(tuple(hidden.shape)), shapes.count(tuple(generator.weight.shape))

    engine, generator, hidden, target = small(rows=12, width=23, vocab_size=29, chunk_tokens=5)
    hidden_before, weight_before = stored()
    total = engine(hidden, target).total
    assert stored() == (hidden_before + 1, weight_before + 1)
    torch.autograd.grad(total, hidden, retain_graph=True)
    assert stored() == (hidden_before, weight_before + 1)
    torch.autograd.grad(total, generator.weight, retain_graph=True)
    assert stored() == (hidden_before, weight_before)


class Experts(nn.Module):
    """Sends rows to a second layer, which is in a plain list and so not registered."""

    def __init__(self):
        super().__init__()
        self.first, self.head, self.others = nn.Linear(4, 4), nn.Linear(4, 9), [nn.Linear(4, 4).double()]

    def forward(self, x):
        mine = self.first(x)
        there = x[..., :1] > 5
        if there.any():
            mine = torch.where(there, self.others[0](x), mine)
        return self.head(mine)


class Rare(nn.Module):
    """A criterion with a factor for one class that is in a list."""

    def __init__(self):
        super().__init__()
        self.factors = [torch.ones((), dtype=torch.float64, requires_grad=True)]

    def forward(self, scores, target):
        losses = nn.functional.cross_entropy(scores, target, reduction="none")
        if (target == 8).any():
            losses = torch.where(target == 8, losses * self.factors[0], losses)
        return losses.sum()


def of_experts(hidden, target, chunk_tokens):
    return seqpar.LossCompute(Experts().double(), seqpar.CrossEntropy(), chunk_tokens=chunk_tokens)(hidden, target)


def of_a_rare_class(hidden, target, chunk_tokens):
    return seqpar.LossCompute(nn.Linear(4, 9).double(), Rare(), chunk_tokens=chunk_tokens)(hidden, target)


def of_scores(hidden, target, chunk_tokens):
    factor = torch.ones((), dtype=torch.float64, requires_grad=True)

    def loss(scores):
        rare = scores.log_prob < -9
        return -torch.where(rare, scores.log_prob * factor, scores.log_prob) if rare.any() else -scores.log_prob

    # The weight's scores of the last row are far below those of the others
    return seqpar.scored_loss(hidden, torch.eye(9, 4).double(), target, loss, chunk_tokens=chunk_tokens)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 12])
@pytest.mark.parametrize("door", [of_experts, of_a_rare_class, of_scores])
def test_a_leaf_that_only_the_last_rows_use_is_refused(door, chunk_tokens):
    """In its first chunk each of these runs other code than in its last."""
    torch.manual_seed(3)
    hidden, target = torch.randn(12, 4).double().clamp(max=4), torch.randint(8, (12,))
    hidden[-1, 0], target[-1] = 20.0, 8
    hidden.requires_grad_()
    with pytest.raises(RuntimeError, match=r"used a tensor of shape \(.*\) that needs a gradient and is n"):
        door(hidden, target, chunk_tokens)


def test_a_second_derivative_is_a_clear_error():
    engine, _, hidden, target = small(chunk_tokens=5)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(engine(hidden, target).total, hidden, create_graph=True)


def test_forward_writes_no_gradient_and_backward_fires_each_hook_once():
    engine, generator, hidden, target = small(chunk_tokens=2, devices=["cpu"] * 3)
    fired = []
    generator.weight.register_hook(lambda _: fired.append("tensor"))
    generator.weight.register_post_accumulate_grad_hook(lambda _: fired.append("accumulated"))
    hidden.register_hook(lambda _: fired.append("hidden"))
    loss = engine(hidden, target)
    assert not fired
    assert generator.weight.grad is None
    assert hidden.grad is None
    loss.total.backward()
    assert sorted(fired) == ["accumulated", "hidden", "tensor"]


def test_the_gradient_does_not_depend_on_the_order_of_two_losses():
    engine, generator, hidden, target = small(chunk_tokens=5)
    (engine(hidden, target).total * 2 + engine(hidden, target).total * 3).backward()
    both = generator.weight.grad.clone()
    generator.weight.grad = None
    engine(hidden, target).total.backward()
    torch.testing.assert_close(both, 5 * generator.weight.grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize("devices", [None, ["cpu"] * 3])
def test_all_padding_gives_zero_and_never_nan_even_divided_by_no_tokens(devices):
    engine, generator, hidden, target = small(devices=devices)
    loss = engine(hidden, torch.full_like(target, -100))
    assert (loss.total, loss.tokens, loss.nll, loss.correct) == (0, 0, 0, 0)
    (loss.total / loss.tokens).backward()
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert torch.equal(generator.weight.grad, torch.zeros_like(generator.weight))
    assert loss.mean == 0


def test_a_criterion_alone_has_no_nan_either_where_no_token_counts():
    logits = torch.randn(6, 9, dtype=torch.float64, requires_grad=True)
    loss = seqpar.LabelSmoothing(0.1, "torch").token_loss(logits, torch.full((6,), -100))
    (loss.total / loss.tokens).backward()
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_an_empty_batch_is_a_loss_of_no_tokens(shape):
    engine, *_ = small(devices=["cpu"] * 2)
    hidden = torch.zeros(*shape, 4, dtype=torch.float64, requires_grad=True)
    loss = engine(hidden, torch.zeros(shape, dtype=torch.int64))
    loss.total.backward()
    assert loss.tokens == 0
    assert hidden.grad.shape == hidden.shape


def test_the_largest_logits_are_one_chunk_and_padding_rows_are_never_projected():
    engine, generator, _, _ = small(chunk_tokens=4)
    seen = []
    generator.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].detach().reshape(-1, 4)))
    hidden = torch.randn(3, 10, 4, dtype=torch.float64)
    target = torch.randint(9, (3, 10))
    target[:, 6:] = -100
    hidden[:, 6:] = float("nan")  # projecting one of these rows would show
    engine(hidden, target)  # the first call probes
    assert not torch.cat(seen).isnan().any()
    seen.clear()
    loss = engine(hidden, target)
    after_the_probe = seen
    assert max(len(rows) for rows in after_the_probe) <= 4
    assert sum(len(rows) for rows in after_the_probe) == 18
    assert torch.isfinite(loss.total)


@pytest.mark.parametrize("shape", [(12,), (3, 4)])
def test_a_generator_sees_blocks_with_as_many_dimensions_as_hidden(shape):
    engine, generator, _, _ = small(chunk_tokens=5)
    dims = set()
    generator.register_forward_hook(lambda _, inputs, output: dims.add((inputs[0].dim(), output.dim())))
    engine(torch.randn(*shape, 4, dtype=torch.float64), torch.zeros(shape, dtype=torch.int64))
    assert dims == {(len(shape) + 1, len(shape) + 1)}


def test_no_gradients_means_no_graph_and_the_same_numbers():
    engine, _, hidden, target = small(chunk_tokens=5)
    with torch.no_grad():
        evaluated = engine(hidden, target)
    with torch.inference_mode():
        inferred = engine(hidden, target)
    trained = engine(hidden, target)
    assert evaluated.total.grad_fn is None
    assert trained.total.grad_fn is not None
    assert evaluated.total == inferred.total == trained.total.detach()


def test_a_parameter_out_of_the_engines_sight_is_an_error_not_a_lost_gradient():
    class Hides(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden_in_a_list = [nn.Linear(4, 9).double()]

        def forward(self, x):
            return self.hidden_in_a_list[0](x)

    _, _, hidden, target = small()
    with pytest.raises(RuntimeError, match="neither a registered parameter"):
        seqpar.LossCompute(Hides(), seqpar.CrossEntropy())(hidden, target)


def test_an_unused_parameter_keeps_no_gradient_as_in_plain_torch():
    engine, generator, hidden, target = small(chunk_tokens=5)
    generator.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
    engine(hidden, target).total.backward()
    assert generator.unused.grad is None


@pytest.mark.parametrize("chunk_tokens", [3, 12])
def test_two_parameters_that_autograd_hands_one_gradient_stay_apart(chunk_tokens):
    """With `x + a + b` autograd passes the same tensor to a and b; summing into it in place would double, and so would
    multiplying a single chunk's by the upstream factor."""

    class TwoBiases(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.zeros(12, 4, dtype=torch.float64)[0].clone())
            self.b = nn.Parameter(torch.zeros(4, dtype=torch.float64))

        def forward(self, x):
            return x + (self.a + self.b)

    generator = TwoBiases()
    _, _, hidden, target = small()
    loss = seqpar.LossCompute(generator, seqpar.CrossEntropy(), chunk_tokens=chunk_tokens)(hidden, target % 4)
    (loss.total * 3).backward()
    plain = nn.functional.cross_entropy(generator(hidden), target % 4, reduction="sum") * 3
    expected = torch.autograd.grad(plain, generator.a)[0]
    torch.testing.assert_close(generator.a.grad, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(generator.b.grad, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.unswitched
def test_dropout_on_repeated_devices_is_reproducible_and_the_probe_draws_nothing():
    generator = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 9)).double()
    _, _, hidden, target = small()

    def loss(engine):
        torch.manual_seed(7)
        return engine(hidden, target).total.item()

    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy(), ["cpu"] * 3, chunk_tokens=2)
    assert loss(engine) == loss(engine)


def test_the_core_takes_any_pure_function():
    """`chunked_gradient` alone, without the engine: squared error in chunks, one row left out."""
    x = torch.randn(7, 2, dtype=torch.float64, requires_grad=True)
    w = torch.randn(2, dtype=torch.float64, requires_grad=True)
    y = torch.randn(7, dtype=torch.float64)
    none = seqpar.TokenLoss.zero(x.dtype, x.device, tells=False)

    def per_chunk(params, rows, chunk):
        return seqpar.TokenLoss((rows[0] @ params[0] - y[chunk]).square().sum(), torch.tensor(len(rows[0])))

    loss = seqpar.chunked_gradient(per_chunk, [slice(0, 3), torch.tensor([5, 4, 3])], [x], [w], none)
    got = torch.autograd.grad(loss.total * 0.3, (x, w))
    expected = torch.autograd.grad((x[:6] @ w - y[:6]).square().sum() * 0.3, (x, w))
    assert loss.tokens == 6
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
