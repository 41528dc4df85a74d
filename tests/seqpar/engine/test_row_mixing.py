"""The first call finds a generator that mixes rows, says what it mixes, and refuses none that treats each row alone."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import seqpar
from tests.on_device import seeds
from tests.seqpar.engine.pairs import Head, Made, batch

V = 9


class Projecting(nn.Module):
    """Something done to hidden (rows, 4) or (batch, time, 4), and a projection."""

    def __init__(self, change, **parts):
        super().__init__()
        self.change, self.linear = change, nn.Linear(4, V)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, hidden, **per_token):
        return self.linear(self.change(self, hidden, **per_token))


def normalised(self, hidden):
    return self.norm(hidden.flatten(0, -2)).view(hidden.shape)


MIXING = {
    "a running sum over time": ((lambda self, x: x.cumsum(1)), {}, 3, "other time steps"),
    "the next step": ((lambda self, x: x + x.roll(1, 1)), {}, 3, "other time steps"),
    "the mean of the batch taken off": ((lambda self, x: x - x.mean(0)), {}, 3, "other sequences"),
    "a softmax over the batch": ((lambda self, x: x.softmax(0)), {}, 3, "other sequences"),
    "the mean of everything": ((lambda self, x: x - x.mean((0, 1))), {}, 3, "other time steps and in other"),
    "a convolution": (
        lambda self, x: self.part(x.mT).mT,
        {"part": nn.Conv1d(4, 4, 3, padding=1)},
        3,
        "other time steps",
    ),
    "a recurrence": (lambda self, x: self.part(x)[0], {"part": nn.GRU(4, 4, batch_first=True)}, 3, "other time steps"),
    "batch normalisation": (normalised, {"norm": nn.BatchNorm1d(4)}, 3, r"\(BatchNorm1d takes statistics"),
    "batch normalisation without running statistics": (
        normalised,
        {"norm": nn.BatchNorm1d(4, track_running_stats=False).eval()},
        3,
        r"\(BatchNorm1d takes statistics",
    ),
    "a running sum over rows": ((lambda self, x: x.cumsum(0)), {}, 2, "in other rows"),
    "the mean of the rows": ((lambda self, x: x - x.mean(0)), {}, 2, "in other rows"),
    "batch normalisation of rows": (normalised, {"norm": nn.BatchNorm1d(4)}, 2, "BatchNorm1d"),
    "a detached mean": ((lambda self, x: x - x.mean(0).detach()), {}, 3, "the other tokens and their order"),
    "a position": (
        (lambda self, x: x + torch.arange(x.size(1)).to(x).unsqueeze(1)),
        {},
        3,
        "the other tokens and their order",
    ),
}


def case(name):
    change, parts, dims, where = MIXING[name]
    torch.manual_seed(0)
    lead = (3, 5) if dims == 3 else (15,)
    return Projecting(change, **copy.deepcopy(parts)), torch.randn(*lead, 4), torch.randint(V, lead), where


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_generator_that_mixes_is_refused_on_the_first_call_and_told_what_it_mixes(name, dtype):
    generator, hidden, target, where = case(name)
    engine = seqpar.LossCompute(generator.to(dtype), seqpar.CrossEntropy(), chunk_tokens=5)
    with pytest.raises(ValueError, match=f"the generator mixes rows: .*{where}.*before the engine"):
        engine(hidden.to(dtype), target)


@pytest.mark.parametrize("name", [n for n in MIXING if "normalisation" not in n])
@pytest.mark.parametrize("devices", [None, ["cpu"] * 2])
def test_it_is_found_in_evaluation_as_well(name, devices):
    generator, hidden, target, _ = case(name)
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy(), devices).eval()
    with torch.no_grad(), pytest.raises(ValueError, match="the generator mixes rows"):
        engine(hidden, target)


def test_it_is_found_beside_a_masked_class():
    generator, hidden, target, _ = case("a detached mean")
    with torch.no_grad():
        generator.linear.bias[V - 1] = -torch.inf
    with pytest.raises(ValueError, match="the generator mixes rows: a token's scores change"):
        seqpar.LossCompute(generator, seqpar.CrossEntropy())(hidden, target % (V - 1))


@pytest.mark.parametrize("name", ["a running sum over time", "the mean of the batch taken off"])
def test_time_chunks_are_no_way_round_it(name):
    generator, hidden, target, _ = case(name)
    with pytest.raises(ValueError, match="the generator mixes rows"):
        seqpar.LossCompute(generator, seqpar.CrossEntropy(), chunk_size=2)(hidden, target)


def test_batch_normalisation_mixes_in_training_alone():
    generator, hidden, target, _ = case("batch normalisation")
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy()).eval()
    loss = engine(hidden, target).total
    torch.testing.assert_close(
        loss, F.cross_entropy(generator(hidden).flatten(0, 1), target.flatten(), reduction="sum")
    )
    before = copy.deepcopy(generator.state_dict())
    with pytest.raises(ValueError, match="BatchNorm1d takes statistics"):
        engine.train()(hidden, target)
    assert all(torch.equal(before[name], value) for name, value in generator.state_dict().items())


GATED = {
    "a running sum": lambda gate, x: gate * x.cumsum(0),
    "a detached mean": lambda gate, x: gate * x.mean(0).detach().expand_as(x),
    "a neighbour": lambda gate, x: gate * x.roll(1, 0),
    "a gate whose entries must differ": lambda gate, x: (gate - gate.mean()) * x.cumsum(0),
}


@pytest.mark.parametrize("name", GATED)
def test_mixing_behind_a_gate_that_is_closed_is_refused(name):
    generator = Head(before=lambda self, x: x + GATED[name](self.late["gate"], x))
    with pytest.raises(ValueError, match="the generator mixes rows"):
        seqpar.LossCompute(generator, seqpar.CrossEntropy())(*batch())


def test_mixing_beside_dropout_that_only_values_show_is_refused():
    generator = Head(before=lambda self, x: F.dropout(x, 0.5, self.training) + x.mean(0).detach())
    with pytest.raises(ValueError, match=r"the generator mixes rows: a token's scores change with the other tokens"):
        seqpar.LossCompute(generator, seqpar.CrossEntropy())(*batch())


def test_a_closed_gate_before_a_row_of_its_own_passes():
    generator = Head(before=lambda self, x: x + self.late["gate"] * x.tanh())
    assert seqpar.LossCompute(generator, seqpar.CrossEntropy())(*batch()).total.isfinite()
    assert not generator.late["gate"].any()


def by_share(self, hidden, mask):
    """Divided by the largest share of a source in the batch, which only a few rows differ in."""
    share = mask.to(hidden).mean(-1)
    return self.linear(hidden) * (share / share.amax()).unsqueeze(-1)


def test_rows_whose_masks_differ_in_their_sum_alone_are_asked_about():
    mask = torch.ones(4, 6, 5, dtype=torch.bool)
    mask[..., -1] = False
    mask[1, 3] = True
    mask[2, 1, 1:] = False
    hidden, target = torch.randn(4, 6, 4), torch.randint(V, (4, 6))
    with pytest.raises(ValueError, match="generator mixes rows"):
        seqpar.LossCompute(Made(by_share, linear=nn.Linear(4, V)), seqpar.CrossEntropy(), chunk_tokens=5)(
            hidden, target, mask=mask
        )


class Copying(nn.Module):
    """A row's own gate between its vocabulary and what it attends to, with dropout."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.linear, self.gate, self.dropout = nn.Linear(4, V), nn.Linear(4, 1), nn.Dropout(dropout)

    def forward(self, hidden, attention, source):
        gate = self.gate(self.dropout(hidden)).sigmoid()
        copied = torch.zeros(*hidden.shape[:-1], V).to(hidden).scatter_add(-1, source, attention)
        return (gate * self.linear(hidden).softmax(-1) + (1 - gate) * copied).log()


ALONE = {
    "dropout": lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(4, V)),
    "dropout of a function": lambda: Projecting(lambda self, x: F.dropout(x, 0.5)),
    "half of everything": lambda: Projecting(lambda self, x: F.dropout(x, 0.9), part=nn.Dropout(0.9)),
    "layers": lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, V), nn.LogSoftmax(-1)),
    "a softmax": lambda: nn.Sequential(nn.Linear(4, V), nn.Softmax(-1)),
    "a convolution of width 1": lambda: Projecting(lambda self, x: self.part(x.mT).mT, part=nn.Conv1d(4, 4, 1)),
    "in place": lambda: Made(lambda self, x: self.linear(x).mul_(2).add_(1).clamp_(-50, 50), linear=nn.Linear(4, V)),
    "masked classes": lambda: Projecting(lambda self, x: x, part=nn.Identity()),
    "large": lambda: Projecting(lambda self, x: x * 1e4),
    "zero": lambda: Projecting(lambda self, x: x * 0),
    "bfloat16 inside": lambda: Projecting(lambda self, x: x.bfloat16().square().to(x.dtype)),
}


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize(
    ("dtype", "lead"),
    [
        (torch.float64, (6, 7)),
        (torch.float32, (6, 7)),
        (torch.bfloat16, (6, 7)),
        (torch.float16, (42,)),
        (torch.bfloat16, (1, 1)),
        (torch.float32, (1,)),
    ],
)
def test_a_generator_that_treats_rows_alone_is_never_refused(name, dtype, lead):
    for seed in seeds(2):
        torch.manual_seed(seed)
        engine = seqpar.LossCompute(ALONE[name]().to(dtype), seqpar.LabelSmoothing(0.1, "torch"))
        hidden, target = (torch.randn(*lead, 4) * 3).to(dtype).requires_grad_(), torch.randint(V, lead)
        assert engine(hidden, target).tokens == target.numel()
        assert engine.eval()(hidden, target).tokens == target.numel()


def test_per_token_keywords_are_regrouped_with_the_rows():
    torch.manual_seed(0)
    hidden, target = torch.randn(3, 5, 4, requires_grad=True), torch.randint(V, (3, 5))
    attention, source = torch.randn(3, 5, 6).softmax(-1).requires_grad_(), torch.randint(V, (3, 5, 6))
    for dropout in (0.0, 0.5):
        engine = seqpar.LossCompute(Copying(dropout), seqpar.CrossEntropy(), chunk_tokens=4)
        engine(hidden, target, attention=attention, source=source).total.backward()
    assert attention.grad.isfinite().all()


@pytest.mark.parametrize("name", ["dropout", "dropout of a function"])
def test_the_probe_leaves_random_state_modes_and_buffers_as_they_were(name):
    torch.manual_seed(0)
    generator = nn.Sequential(nn.BatchNorm1d(4).eval(), ALONE[name]())
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy())
    hidden, target = torch.randn(12, 4, requires_grad=True), torch.randint(V, (12,))
    losses, modes = [], [part.training for part in generator.modules()]
    for _ in range(2):
        torch.manual_seed(1)
        losses.append(engine(hidden, target).total)
    assert losses[0] == losses[1]  # the first call has drawn what the second draws
    assert [part.training for part in generator.modules()] == modes
    assert generator[0].num_batches_tracked == 0


def test_the_question_waits_for_the_first_row_that_is_kept():
    generator, hidden, target, _ = case("a running sum over time")
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy())
    assert engine(hidden, torch.full_like(target, -100)).tokens == 0
    with pytest.raises(ValueError, match="the generator mixes rows"):
        engine(hidden[:1, :1], target[:1, :1])


@pytest.mark.parametrize(("wanted", "rows"), [(True, 116), (False, 92)])
def test_the_probe_is_made_once_and_calls_no_more_rows_than_it_needs(wanted, rows):
    calls = []
    engine = seqpar.LossCompute(Projecting(lambda self, x: calls.append(x.numel() // 4) or x), seqpar.CrossEntropy())
    hidden, target = torch.randn(40, 10, 4, requires_grad=True), torch.randint(V, (40, 10))
    with torch.set_grad_enabled(wanted):
        engine(hidden, target)
        assert sum(calls) <= 400 + rows
        calls.clear()
        engine(hidden, target)
        assert sum(calls) == 400


def test_a_softmax_over_classes_of_rows_is_refused_where_it_would_be_one_over_time():
    generator = nn.Sequential(nn.Linear(4, V), nn.LogSoftmax(1))
    engine = seqpar.LossCompute(generator, nn.NLLLoss(reduction="sum"), chunk_tokens=5)
    hidden, target = torch.randn(3, 5, 4), torch.randint(V, (3, 5))
    engine(hidden.flatten(0, 1), target.flatten())
    with pytest.raises(ValueError, match=r"the generator mixes rows: .*other time steps"):
        engine(hidden.requires_grad_(), target)


def shifted(self, hidden, shift=0, context=0):
    """A projection that mixes rows if it is given a context, but not with a shift."""
    return self.linear(hidden + shift + torch.as_tensor(context).cumsum(0))


def test_a_per_token_tensor_is_checked_under_each_of_its_names():
    engine = seqpar.LossCompute(Made(shifted, linear=nn.Linear(4, V)), seqpar.CrossEntropy(), chunk_tokens=5)
    hidden, target = torch.randn(12, 4), torch.randint(V, (12,))
    engine(hidden, target, shift=hidden)
    with pytest.raises(ValueError, match="the generator mixes rows"):
        engine(hidden, target, context=hidden)
