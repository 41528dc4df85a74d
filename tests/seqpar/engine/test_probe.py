"""The first call's questions: when they are asked again, what they refuse by name, and which chunks they lead to."""

import copy
import pickle
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
from tests.seqpar.engine.pairs import Made, cross_entropy
from tests.seqpar.engine.test_row_mixing import Copying, Projecting

V = 9


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


def test_spectral_normalisation_that_is_added_later_is_refused():
    engine = seqpar.LossCompute(Switched(), Made(lambda self, z, y: cross_entropy(z, y)), chunk_tokens=5)
    hidden, target = torch.randn(12, 4), torch.randint(V, (12,))
    engine(hidden, target)
    nn.utils.spectral_norm(engine.head["generator"].linear)
    with pytest.raises(ValueError, match=r"the buffer generator\.linear\.weight_u changes"):
        engine(hidden, target)


def test_a_vocabulary_in_a_buffer_may_grow():
    generator = Made(lambda self, x: x @ self.classes.mT, classes=nn.Buffer(torch.randn(V, 4)))
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


def summed(self, logits, target):
    return cross_entropy(logits, target)


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


@pytest.mark.parametrize("devices", [None, ["cpu"] * 2])
@pytest.mark.parametrize(
    "modules",
    [
        (nn.Linear(4, V), Made(lambda *given: summed(*given).detach())),
        (Made(torch.no_grad()(lambda self, x: self.linear(x)), linear=nn.Linear(4, V)), seqpar.CrossEntropy()),
    ],
)
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
        ({"tokens": 3}, "whose tokens is an int, not a tensor"),
        ({"tokens": None}, "whose tokens is None, not a tensor"),
        ({"nll": 1.0}, "whose nll is a float, not a tensor"),
    ],
)
def test_a_token_loss_of_anything_but_tensors_is_named(counts, message):
    with pytest.raises(TypeError, match=message):
        seqpar.LossCompute(nn.Linear(4, V), Counting(**counts))(torch.randn(6, 4), torch.randint(V, (6,)))


def test_a_loss_of_nothing_has_the_gradient_0():
    hidden = torch.randn(6, 4, requires_grad=True)
    seqpar.LossCompute(nn.Linear(4, V), Made(lambda self, z, y: z.new_zeros(())))(
        hidden, torch.randint(V, (6,))
    ).total.backward()
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
