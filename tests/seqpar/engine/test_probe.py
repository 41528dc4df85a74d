"""The first call finds a generator that mixes rows, and a criterion that does not add up; and nothing else."""

import copy
import pickle
import re
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import seqpar
from seqpar.core.chunks import cut_rows
from seqpar.engine import probe
from seqpar.rows.scores import RowFunction
from seqpar.rows.smoothing import CrossEntropyOfScores, class_weights, soft_target
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


def over_the_batch(change):
    return lambda self, hidden: change(hidden)


MIXING = {
    "a running sum over time": (over_the_batch(lambda x: x.cumsum(1)), {}, 3, "other time steps"),
    "the next step": (over_the_batch(lambda x: x + x.roll(1, 1)), {}, 3, "other time steps"),
    "the mean of the batch taken off": (over_the_batch(lambda x: x - x.mean(0)), {}, 3, "other sequences"),
    "a softmax over the batch": (over_the_batch(lambda x: x.softmax(0)), {}, 3, "other sequences"),
    "the mean of everything": (over_the_batch(lambda x: x - x.mean((0, 1))), {}, 3, "other time steps and in other"),
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
    "a running sum over rows": (over_the_batch(lambda x: x.cumsum(0)), {}, 2, "in other rows"),
    "the mean of the rows": (over_the_batch(lambda x: x - x.mean(0)), {}, 2, "in other rows"),
    "batch normalisation of rows": (normalised, {"norm": nn.BatchNorm1d(4)}, 2, "BatchNorm1d"),
    "a detached mean": (over_the_batch(lambda x: x - x.mean(0).detach()), {}, 3, "the other tokens and their order"),
    "a position": (
        over_the_batch(lambda x: x + torch.arange(x.size(1)).to(x).unsqueeze(1)),
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


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, V)

    def forward(self, hidden):
        return self.linear(hidden).mul_(2).add_(1).clamp_(-50, 50)


ALONE = {
    "dropout": lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(4, V)),
    "dropout of a function": lambda: Projecting(lambda self, x: F.dropout(x, 0.5)),
    "half of everything": lambda: Projecting(lambda self, x: F.dropout(x, 0.9), part=nn.Dropout(0.9)),
    "layers": lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, V), nn.LogSoftmax(-1)),
    "a softmax": lambda: nn.Sequential(nn.Linear(4, V), nn.Softmax(-1)),
    "a convolution of width 1": lambda: Projecting(lambda self, x: self.part(x.mT).mT, part=nn.Conv1d(4, 4, 1)),
    "in place": InPlace,
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


class Switched(nn.Module):
    """A projection of normalised hidden states that can be switched to mix rows, in several ways."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4, affine=False).eval()
        self.activation = nn.Tanh()
        self.linear = nn.Linear(4, V, bias=False)
        self.centred, self.function = False, torch.neg
        self.parts = nn.ModuleDict({"alone": nn.Identity()})

    def forward(self, hidden, context=None):
        if context is not None:
            hidden = context
        hidden = self.function(self.activation(self.norm(hidden)))
        if "mixed" in self.parts:
            hidden = hidden.cumsum(0)
        return self.linear(hidden - hidden.mean(0) if self.centred else hidden)


def without_statistics(generator):
    generator.norm.running_mean = generator.norm.running_var = None


MIXED_LATER = {
    "a hook": lambda g: g.register_forward_hook(lambda _, __, logits: logits - logits.mean(0)),
    "a hook before a part": lambda g: g.linear.register_forward_pre_hook(lambda _, args: args[0].cumsum(0)),
    "another part": lambda g: setattr(g, "activation", nn.Softmax(0)),
    "a part without its buffers": without_statistics,
    "a flag": lambda g: setattr(g, "centred", True),
    "another name of a part": lambda g: setattr(g, "parts", nn.ModuleDict({"mixed": nn.Identity()})),
    "another function": lambda g: setattr(g, "function", lambda x: x.softmax(0)),
    "a forward of its own": lambda g: setattr(g.norm, "forward", lambda x: x.softmax(0)),
}


@pytest.mark.parametrize("name", MIXED_LATER)
def test_a_generator_that_mixes_after_a_change_is_refused_in_the_next_call(name):
    generator, hidden, target = Switched(), torch.randn(12, 4), torch.randint(V, (12,))
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy(), chunk_tokens=5)
    engine(hidden, target)
    MIXED_LATER[name](generator)
    with pytest.raises(ValueError, match="the generator mixes rows"):
        engine(hidden, target)


def with_weight_on_meta(generator):
    generator.linear.weight = nn.Parameter(torch.empty(V, 4, device="meta"))


def with_statistics_on_meta(generator):
    generator.norm.running_mean = torch.empty(4, device="meta")


UNFIT_LATER = {
    "compiled": (lambda g: g.linear.compile(), "Linear is compiled, and the compiled code keeps"),
    "compiled part": (
        lambda g: setattr(g, "linear", torch.compile(g.linear)),
        "OptimizedModule is compiled, and the compiled code",
    ),
    "on the meta device": (with_weight_on_meta, r"Linear\.weight is on the meta device"),
    "a buffer on the meta device": (with_statistics_on_meta, r"BatchNorm1d\.running_mean is on the meta device"),
    "lazy": (lambda g: setattr(g, "linear", nn.LazyLinear(V)), r"LazyLinear\.weight is lazy"),
    "scripted": (
        lambda g: setattr(g, "linear", torch.jit.trace(g.linear, torch.randn(2, 4))),
        "TracedModule is scripted or traced",
    ),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.")
@pytest.mark.parametrize("name", UNFIT_LATER)
def test_a_generator_that_cannot_be_replicated_after_a_change_is_refused_in_the_next_call(name):
    generator, hidden, target = Switched(), torch.randn(12, 4), torch.randint(V, (12,))
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy(), chunk_tokens=5)
    engine(hidden, target)
    change, said = UNFIT_LATER[name]
    change(generator)
    with pytest.raises(TypeError, match=said):
        engine(hidden, target)


@pytest.mark.filterwarnings("ignore:.*torch.jit.")
@pytest.mark.parametrize("make", [torch.jit.script, lambda linear: torch.jit.trace(linear, torch.randn(2, 4))])
def test_a_scripted_module_is_refused_with_the_way_out(make):
    scripted = make(nn.Linear(4, V))
    said = "is scripted or traced and cannot be replicated; pass the module as it was before torch.jit"
    for generator, criterion in (
        (scripted, seqpar.CrossEntropy()),
        (nn.Sequential(scripted), seqpar.CrossEntropy()),
        (nn.Linear(4, V), scripted),
    ):
        with pytest.raises(TypeError, match=said):
            seqpar.LossCompute(generator, criterion)


class WithSlots(nn.Module):
    __slots__ = ("factor",)

    def forward(self, logits, target):
        self.factor = 2 * getattr(self, "factor", 1)
        return self.factor * F.cross_entropy(logits, target, reduction="sum")


@pytest.mark.parametrize("of_criterion", [WithSlots(), nn.Sequential(WithSlots())])
def test_a_module_with_slots_is_refused_with_the_way_out(of_criterion):
    said = r"^WithSlots has __slots__ \(factor\), which a replica would lack; remove __slots__ from its class$"
    with pytest.raises(TypeError, match=said):
        seqpar.LossCompute(nn.Linear(4, V), nn.ModuleList([of_criterion]))


def test_a_projection_that_is_compiled_after_the_first_call_is_refused_as_before_it():
    linear, hidden, target = nn.Linear(4, V), torch.randn(12, 4), torch.randint(V, (12,))
    engine = seqpar.LossCompute(linear, seqpar.CrossEntropy())
    engine(hidden, target)
    linear.compile()
    with pytest.raises(TypeError, match="Linear is compiled, and the compiled code keeps"):
        engine(hidden, target)


class Ordered(nn.Module):
    """A criterion whose later rows weigh more: no sum of one term a row."""

    def forward(self, logits, target):
        losses = F.cross_entropy(logits, target, reduction="none")
        return losses @ torch.linspace(1, 2, len(losses), dtype=losses.dtype)


class Alternating(nn.Module):
    """One that adds up over any halves of even size, and is no sum of one term a row."""

    def forward(self, logits, target):
        losses = F.cross_entropy(logits, target, reduction="none")
        sign = torch.ones_like(losses)
        sign[1::2] = -1
        return losses @ sign


@pytest.mark.parametrize("criterion", [Ordered, Alternating])
def test_a_criterion_that_depends_on_the_order_of_rows_is_refused(criterion):
    torch.manual_seed(0)
    engine = seqpar.LossCompute(nn.Linear(4, V), criterion())
    with pytest.raises(ValueError, match="does not add up"):
        engine(9 * torch.randn(30, 4), torch.randint(V, (30,)))


def test_a_softmax_over_classes_of_rows_is_refused_where_it_would_be_one_over_time():
    generator = nn.Sequential(nn.Linear(4, V), nn.LogSoftmax(1))
    engine = seqpar.LossCompute(generator, nn.NLLLoss(reduction="sum"), chunk_tokens=5)
    hidden, target = torch.randn(3, 5, 4), torch.randint(V, (3, 5))
    engine(hidden.flatten(0, 1), target.flatten())
    with pytest.raises(ValueError, match=r"the generator mixes rows: .*other time steps"):
        engine(hidden.requires_grad_(), target)


class PerToken(nn.Module):
    """A projection that mixes rows if it is given a context, but not with a shift."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, V)

    def forward(self, hidden, shift=0, context=0):
        return self.linear(hidden + shift + torch.as_tensor(context).cumsum(0))


def test_a_per_token_tensor_is_checked_under_each_of_its_names():
    engine = seqpar.LossCompute(PerToken(), seqpar.CrossEntropy(), chunk_tokens=5)
    hidden, target = torch.randn(12, 4), torch.randint(V, (12,))
    engine(hidden, target, shift=hidden)
    with pytest.raises(ValueError, match="the generator mixes rows"):
        engine(hidden, target, context=hidden)


def test_spectral_normalisation_that_is_added_later_is_refused():
    engine = seqpar.LossCompute(Switched(), Summing(torch.sum), chunk_tokens=5)
    hidden, target = torch.randn(12, 4), torch.randint(V, (12,))
    engine(hidden, target)
    nn.utils.spectral_norm(engine.head["generator"].linear)
    with pytest.raises(ValueError, match=r"the buffer generator\.linear\.weight_u changes"):
        engine(hidden, target)


class InBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("classes", torch.randn(V, 4))

    def forward(self, hidden):
        return hidden @ self.classes.mT


def test_a_vocabulary_in_a_buffer_may_grow():
    generator = InBuffer()
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy())
    hidden = torch.randn(2, 4)
    engine(hidden, torch.tensor([0, V - 1]))
    generator.classes = torch.randn(2 * V, 4)
    target = torch.tensor([0, 2 * V - 1])
    torch.testing.assert_close(
        engine(hidden, target).total, F.cross_entropy(hidden @ generator.classes.mT, target, reduction="sum")
    )


def test_a_generator_of_another_dtype_or_hidden_of_another_width_is_named_in_later_calls_too():
    generator = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, V))
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy())
    hidden, target = torch.randn(12, 4), torch.randint(V, (12,))
    engine(hidden, target)
    with pytest.raises(ValueError, match="the generator does not take hidden's last size 5"):
        engine(torch.randn(12, 5), target)
    generator.double()
    with pytest.raises(TypeError, match=r"hidden has dtype torch.float32 and the generator's parameters torch.float64"):
        engine(hidden, target)


class Strict(nn.Module):
    """Two layers, the first of which may not fit the second, or the hidden states."""

    def __init__(self, width=4, inner=4, dtype=torch.float32):
        super().__init__()
        self.first, self.second = nn.Linear(width, 4, dtype=dtype), nn.Linear(inner, V, dtype=dtype)

    def forward(self, hidden, shift=0):
        return self.second(self.first(hidden) + shift)


class Wider(Strict):
    """The same, in a dtype of its own."""

    def forward(self, hidden):
        return super().forward(hidden.double())


class Picky(Strict):
    """The same, which takes zeros alone."""

    def forward(self, hidden):
        if hidden.any():
            raise RuntimeError("too large")
        return super().forward(hidden)


PRODUCT = "(?:addmm: )?mat1 and mat2 shapes cannot be multiplied"
"""How torch refuses; since 2.15 the operator's name comes first."""


@pytest.mark.parametrize(
    ("generator", "per_token", "said"),
    [
        (Strict(inner=3), {}, rf"^{PRODUCT} \(4x4 and 3x9\)\nraised in the generator"),
        (Strict(width=3), {}, rf"^the generator does not take hidden's last size 4; it takes 3 \({PRODUCT}"),
        (Strict(), {"shift": torch.randn(3, 5, 3)}, "^The size of tensor a"),
        (Picky(), {}, "^too large\nraised in the generator"),
        (
            Strict(dtype=torch.float64),
            {},
            r"^hidden has dtype torch.float32 and the generator's parameters torch.float64",
        ),
        (Strict(width=3, dtype=torch.float64), {}, "^the generator does not take hidden's last size 4; it takes 3 "),
        (Wider(inner=3, dtype=torch.float64), {}, f"^{PRODUCT}"),
        (Wider(width=3, dtype=torch.float64), {}, "^the generator does not take hidden's last size 4; it takes 3 "),
    ],
)
def test_hidden_is_blamed_for_a_generators_failure_only_where_another_hidden_would_do(generator, per_token, said):
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy())
    with pytest.raises((RuntimeError, TypeError, ValueError), match=said):
        engine(torch.randn(3, 5, 4), torch.randint(V, (3, 5)), **per_token)


@pytest.mark.parametrize(("of_hidden", "of_generator"), [("float64", "float32"), ("float32", "float64")])
def test_float64_that_autocast_leaves_as_it_is_is_named(of_hidden, of_generator):
    engine = seqpar.LossCompute(Strict(dtype=getattr(torch, of_generator)), seqpar.CrossEntropy())
    said = f"^hidden has dtype torch.{of_hidden} and the generator's parameters torch.{of_generator}"
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=said):
        engine(torch.randn(3, 5, 4, dtype=getattr(torch, of_hidden)), torch.randint(V, (3, 5)))


@pytest.mark.parametrize("wrong", [{"attention"}, {"source"}, {"attention", "source"}])
def test_a_source_as_long_as_the_target_is_named_where_its_shape_is_the_targets_by_chance(wrong):
    engine = seqpar.LossCompute(Copying(), seqpar.CrossEntropy())
    given = {"attention": torch.rand(3, 5, 5).softmax(-1), "source": torch.randint(V, (3, 5, 5))}
    given |= {name: given[name][:, 0] for name in wrong}
    names = " and ".join(name for name in given if name in wrong)
    advice = (
        rf"{names} of shape \(3, 5\) has one number for each token, .* pass \w+\.unsqueeze\(1\)\.expand\(-1, 5, -1\)"
    )
    with pytest.raises(ValueError, match=advice):
        engine(torch.randn(3, 5, 4), torch.randint(V, (3, 5)), **given)
    right = {name: t.unsqueeze(1).expand(-1, 5, -1) if name in wrong else t for name, t in given.items()}
    engine(torch.randn(3, 5, 4), torch.randint(V, (3, 5)), **right)


def test_the_situations_used_last_are_remembered_however_many_there_are(monkeypatch):
    monkeypatch.setattr(probe, "MOST_SITUATIONS", 6)
    generator = Switched()
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy())
    hidden, target = torch.randn(12, 4), torch.randint(V, (12,))

    def is_probed():
        with mock.patch.object(probe, "_facts_of", wraps=probe._facts_of) as asked:
            engine(hidden, target)
        return asked.called

    assert is_probed()
    for _ in range(9):
        hook = generator.register_forward_hook(lambda *_: None)
        assert is_probed()
        assert not is_probed()
        hook.remove()
        assert not is_probed()
    assert len(engine._facts) == 6


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda engine: pickle.loads(pickle.dumps(engine))])
def test_a_copy_of_an_engine_finds_out_for_itself_what_it_needs(copied):
    generator = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, V))
    nn.utils.parametrize.register_parametrization(generator[0], "weight", nn.Identity())
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy())
    hidden, target = torch.randn(12, 4), torch.randint(V, (12,))
    engine(hidden, target)
    nn.utils.parametrize.remove_parametrizations(generator[0], "weight")
    other = copied(engine)
    assert other.explain().endswith("will be known after the first call")
    assert "; 0 tokens in 0 chunks of at most 1, " in engine.explain(tokens=0)
    assert other(hidden, target).total == engine(hidden, target).total


class Summing(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, logits, target):
        return self.change(F.cross_entropy(logits, target, reduction="none"))


def between(losses):
    return losses.sum() + 2 * losses.std(correction=0)


NOT_ADDITIVE = {
    "a constant": (lambda x: x.sum() + 5, "does not add up"),
    "a square": (lambda x: x.sum() ** 2, "does not add up"),
    "a root": (lambda x: x.sum().sqrt(), "does not add up"),
    "a mean": (lambda x: x.mean(), "takes a mean; the criterion must sum"),
    "the largest, as often as there are rows": (lambda x: x.max() * len(x), "does not add up"),
    "a spread": (between, "does not add up"),
}


@pytest.mark.parametrize("name", NOT_ADDITIVE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_criterion_that_does_not_add_up_is_refused_with_both_numbers(name, dtype):
    change, message = NOT_ADDITIVE[name]
    torch.manual_seed(0)
    engine = seqpar.LossCompute(nn.Linear(4, V).to(dtype), Summing(change))
    with pytest.raises(ValueError, match=rf"the criterion gives [\d.]+ for 7 rows and [\d.]+ .*{message}") as error:
        engine(9 * torch.randn(30, 4).to(dtype), torch.randint(V, (30,)))
    together, alone = (float(number) for number in re.findall(r"[\d.]+(?= for 7| as the)", str(error.value)))
    assert (together < alone) == (name in ("a constant", "a root", "a mean"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_criterion_that_adds_up_is_never_refused(dtype):
    for seed in seeds(10):
        torch.manual_seed(seed)
        for change in (torch.sum, lambda x: x.square().sum(), lambda x: (x * torch.rand_like(x)).sum()):
            hidden = torch.randn(7, 4).to(dtype)
            seqpar.LossCompute(nn.Linear(4, V).to(dtype), Summing(change))(hidden, torch.randint(V, (7,)))


def test_random_losses_that_are_equal_by_chance_are_not_refused():
    """Every other loss has the factor 2; in bfloat16 losses of any distribution are equal now and then."""
    for seed in range(20):
        torch.manual_seed(seed)
        engine = seqpar.LossCompute(nn.Linear(4, V), Summing(lambda x: x.sum() * (1 + torch.randint(2, ()))))
        engine(torch.randn(7, 4), torch.randint(V, (7,)))


class Averaging(Summing):
    mean = False

    def forward(self, logits, target):
        loss = super().forward(logits, target)
        return loss / len(target) if self.mean else loss


def to_a_mean(engine):
    engine.head["criterion"].mean = True


def to_another(engine):
    engine.head["criterion"] = Summing(torch.mean)


@pytest.mark.parametrize("change", [to_a_mean, to_another])
def test_a_criterion_that_is_a_mean_later_is_refused_in_the_next_call(change):
    engine = seqpar.LossCompute(nn.Linear(4, V), Averaging(torch.sum), chunk_tokens=5)
    hidden, target = torch.randn(12, 4), torch.randint(V, (12,))
    engine(hidden, target)
    change(engine)
    with pytest.raises(ValueError, match="it takes a mean"):
        engine(hidden, target)


class WarmedUp(nn.Module):
    """A mean whose factor is 0 at first, or infinite."""

    def __init__(self, factor):
        super().__init__()
        self.register_buffer("factor", torch.tensor(factor))

    def forward(self, logits, target):
        return F.cross_entropy(logits, target) * self.factor


@pytest.mark.parametrize("factor", [0.0, float("inf")])
def test_a_criterion_whose_first_loss_is_0_or_infinite_is_checked_in_the_next_call(factor):
    engine = seqpar.LossCompute(nn.Linear(4, V), WarmedUp(factor), chunk_tokens=5)
    hidden, target = torch.randn(12, 4), torch.randint(V, (12,))
    assert engine(hidden, target).total == factor
    engine.head["criterion"].factor.fill_(1)
    with pytest.raises(ValueError, match="it takes a mean"):
        engine(hidden, target)


class Detached(nn.Module):
    def forward(self, logits, target):
        return F.cross_entropy(logits, target, reduction="sum").detach()


def summed(self, logits, target):
    return F.cross_entropy(logits, target, reduction="sum")


RETURNED = {
    "a float": (
        nn.Linear(4, V),
        lambda *given: float(summed(*given)),
        TypeError,
        "criterion returned a float; it must return a t",
    ),
    "rows": (
        nn.Linear(4, V),
        lambda self, z, y: F.cross_entropy(z, y, reduction="none"),
        ValueError,
        "it must return one real num",
    ),
    "a complex loss": (
        nn.Linear(4, V),
        lambda *given: summed(*given) * 1j,
        TypeError,
        "the criterion returned torch.complex64; it must return one real number",
    ),
    "one dimension": (
        nn.Flatten(0),
        summed,
        ValueError,
        r"the generator returned shape \(16,\) in torch.float32 for hidden \(4, 4\)",
    ),
    "complex scores": (
        Made(lambda self, x: self.linear(x) * 1j, linear=nn.Linear(4, V)),
        summed,
        ValueError,
        rf"returned shape \(4, {V}\) in torch.complex64 .* scores in a floating dtype",
    ),
}


@pytest.mark.parametrize("name", RETURNED)
def test_what_is_returned_must_be_scores_of_each_token_and_one_real_number(name):
    generator, criterion, error, said = RETURNED[name]
    with pytest.raises(error, match=said):
        seqpar.LossCompute(generator, Made(criterion))(torch.randn(6, 4), torch.randint(V, (6,)))


class WithoutGradient(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, V)

    @torch.no_grad()
    def forward(self, hidden):
        return self.linear(hidden)


class NoLoss(nn.Module):
    def forward(self, logits, target):
        return logits.new_zeros(())


@pytest.mark.parametrize("devices", [None, ["cpu"] * 2])
@pytest.mark.parametrize("modules", [(nn.Linear(4, V), Detached()), (WithoutGradient(), seqpar.CrossEntropy())])
def test_a_loss_without_a_graph_is_an_error_in_backward_as_in_plain_torch(modules, devices):
    hidden, target = torch.randn(6, 4, requires_grad=True), torch.randint(V, (6,))
    generator, criterion = modules
    with pytest.raises(RuntimeError, match="does not require grad"):
        criterion(generator(hidden), target).backward()
    loss = seqpar.LossCompute(generator, criterion, devices)(hidden, target)
    with pytest.raises(RuntimeError, match=r"the loss does not require grad.*detached.*no_grad"):
        loss.total.backward()
    assert hidden.grad is None


class Counting(nn.Module):
    def __init__(self, **counts):
        super().__init__()
        self.counts = counts

    def token_loss(self, logits, target):
        total = F.cross_entropy(logits, target, reduction="sum")
        return seqpar.TokenLoss(total, torch.tensor(len(target)))._replace(**self.counts) if self.counts else total


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({}, "token_loss returned a Tensor; it must return a TokenLoss"),
        ({"total": 1.0}, "whose total is a float, not a tensor"),
        ({"tokens": 3}, "whose tokens is a int, not a tensor"),
        ({"tokens": None}, "whose tokens is a NoneType, not a tensor"),
        ({"nll": 1.0}, "whose nll is a float, not a tensor"),
    ],
)
def test_a_token_loss_of_anything_but_tensors_is_named(counts, message):
    with pytest.raises(TypeError, match=message):
        seqpar.LossCompute(nn.Linear(4, V), Counting(**counts))(torch.randn(6, 4), torch.randint(V, (6,)))


def test_a_loss_of_nothing_has_the_gradient_0():
    hidden = torch.randn(6, 4, requires_grad=True)
    seqpar.LossCompute(nn.Linear(4, V), NoLoss())(hidden, torch.randint(V, (6,))).total.backward()
    assert not hidden.grad.any()


@pytest.mark.parametrize("entries", [V - 1, V + 1])
@pytest.mark.parametrize("generator", [nn.Linear(4, V), nn.Sequential(nn.Dropout(0.1), nn.Linear(4, V))])
def test_class_weights_of_another_vocabulary_are_refused(entries, generator):
    criterion = nn.CrossEntropyLoss(torch.ones(entries), reduction="sum")
    with pytest.raises(ValueError, match=rf"criterion's weight has shape \({entries},\); it must be \({V},\)"):
        seqpar.LossCompute(generator, criterion)(torch.randn(6, 4), torch.randint(V - 1, (6,)))


@pytest.mark.parametrize("weight", [float("inf"), float("nan")])
@pytest.mark.parametrize("generator", [nn.Linear(4, V), nn.Sequential(nn.Linear(4, V), nn.LogSoftmax(-1))])
def test_a_weight_of_a_class_that_never_occurs_is_never_multiplied(weight, generator):
    generator = copy.deepcopy(generator).double()
    weights = torch.ones(V, dtype=torch.float64)
    weights[3] = weight
    criterion = nn.CrossEntropyLoss(weights, reduction="sum")
    hidden, target = torch.randn(20, 4, dtype=torch.float64, requires_grad=True), torch.arange(20) % 3
    (plain,) = torch.autograd.grad(criterion(generator(hidden), target), hidden)
    (ours,) = torch.autograd.grad(seqpar.LossCompute(generator, criterion)(hidden, target).total, hidden)
    assert plain.isfinite().all()
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("weight", [float("inf"), float("nan")])
@pytest.mark.parametrize("parts", [1, 3])
def test_no_weight_of_the_padding_class_or_of_another_part_is_multiplied(weight, parts):
    """The excluded class of "harvard", and on a rank the class that stands in for those that are elsewhere."""
    logits, target = torch.randn(5, V, dtype=torch.float64), torch.tensor([1, 4, 5, 8, 1])
    weight_V = torch.linspace(0.5, 2, V, dtype=torch.float64)
    q = soft_target(0.1, "harvard", 0, V)
    part = None if parts == 1 else Part()
    found = []
    for first in (1.0, weight):
        changed = weight_V.clone()
        changed[0] = first
        weights = class_weights(q, changed)
        rows, picked = RowFunction(weights=weights, split=part), target.unsqueeze(1)
        made, sums = rows.sums_(logits.clone(), picked)
        losses = CrossEntropyOfScores(q, weights)(rows.scores(sums), (changed[target],), wanted=True)
        found.append((losses.loss_N, rows.gradient_(made, picked, sums, losses.upstream)))
    assert found[0][1].isfinite().all()
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


class Part:
    """A part that holds the lower classes: a target elsewhere stands at class 0."""

    start = 0

    def locate(self, target_N, size):
        owned_N = target_N < 5
        return target_N.where(owned_N, 0), owned_N

    def gather(self, tensor):
        return tensor.unsqueeze(0)

    def rank(self):
        return 0


@pytest.mark.unswitched
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(("autocast", "most"), [(False, 512), (True, 1024)])
def test_chunks_are_sized_by_the_logits_that_will_exist(own, autocast, most, monkeypatch):
    found = []

    def recorded(kept_N, rows, *count):
        found.append(rows)
        return cut_rows(kept_N, rows, *count)

    monkeypatch.setattr("seqpar.engine.device_losses.cut_rows", recorded)
    monkeypatch.setattr("seqpar.linear.inputs.cut_rows", recorded)
    linear = nn.Linear(4, 10_000)
    hidden, target = torch.randn(3, 4), torch.randint(V, (3,))
    engine = seqpar.LossCompute(Projecting(lambda self, x: x, linear=linear) if own else linear, seqpar.CrossEntropy())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        # The first call asks on rows of its own whether the closed form is what the pair gives
        engine(hidden, target)
        found.clear()
        engine(hidden, target)
        seqpar.linear_cross_entropy(hidden, linear.weight, target, bias=linear.bias)
    assert found == [most, most]
