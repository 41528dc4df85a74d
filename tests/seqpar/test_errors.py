"""Every bad input gets one clear line: what, where, both numbers, the way out."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import seqpar
from seqpar.multi_device.devices import check_devices


def engine(generator=None, criterion=None, **options):
    generator = nn.Linear(4, 9) if generator is None else generator
    return seqpar.LossCompute(generator, criterion or seqpar.CrossEntropy(), **options)


def hidden(*lead):
    return torch.randn(*lead, 4)


def zeros(*shape, dtype=torch.int64):
    return torch.zeros(shape, dtype=dtype)


DEVICES = {
    "a string": ("cpu", TypeError, r"\['cpu'\]"),
    "an int": (0, TypeError, r"\[0\]"),
    "empty": ([], ValueError, "empty; this machine has cpu"),
    "meta": (["meta"], ValueError, "meta does not exist or cannot compute; this machine has cpu"),
    "a bool": ([True], TypeError, r"devices\[0\]: True is a bool"),
    "none": ([None], TypeError, "NoneType"),
    "nonsense": (["gpu0"], ValueError, "'gpu0' is not a device; this machine has cpu"),
    "another cpu": (["cpu:1"], ValueError, "because the CPU is one device"),
    "far too high": (["cpu", "cuda:99"], ValueError, r"devices\[1\]: (index 99|cuda:99)"),
    "another kind": (["xpu:0"], ValueError, "does not exist"),
}


@pytest.mark.parametrize("case", DEVICES)
def test_a_bad_device_list_says_what_exists(case):
    devices, error, message = DEVICES[case]
    with pytest.raises(error, match=message):
        engine(devices=devices)
    with pytest.raises(error, match=message.replace("devices", "device_ids")):
        seqpar.DataParallel(nn.Linear(1, 1), devices)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without a GPU")
def test_an_index_without_an_accelerator_says_so():
    with pytest.raises(ValueError, match="device 0 is an accelerator's index, and there is none"):
        check_devices([0])


@pytest.mark.unswitched
def test_good_device_lists_are_normalised():
    assert check_devices(["cpu:0", torch.device("cpu")]) == (torch.device("cpu"),) * 2


@pytest.mark.parametrize("name", ["chunk_tokens", "chunk_size"])
@pytest.mark.parametrize("size", [0, -1, 2.0, True, "5"])
def test_a_chunk_size_that_is_no_positive_int_is_refused(name, size):
    with pytest.raises(ValueError, match=f"{name} is {size!r}; it must be a whole number of at least 1"):
        engine(**{name: size})


def test_two_ways_to_cut_at_once_are_refused():
    with pytest.raises(ValueError, match="pass one of them"):
        engine(chunk_tokens=2, chunk_size=2)


def test_time_chunks_of_a_hidden_without_time_are_refused():
    with pytest.raises(ValueError, match=r"hidden has shape \(6, 4\).*chunk_tokens"):
        engine(chunk_size=2)(hidden(6), zeros(6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_a_target_of_no_integer_dtype_is_refused(dtype):
    with pytest.raises(TypeError, match=f"target has dtype {dtype}"):
        engine()(hidden(6), zeros(6, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_narrow_integer_targets_work(dtype):
    assert engine()(hidden(6), zeros(6, dtype=dtype)).tokens == 6


@pytest.mark.parametrize(("lead", "shape"), [((6,), (5,)), ((2, 3), (6,)), ((2, 3), (3, 2)), ((6,), (2, 3)), ((), ())])
def test_shapes_that_disagree_are_both_named(lead, shape):
    with pytest.raises(ValueError, match="target must have hidden's leading shape") as error:
        engine()(hidden(*lead), zeros(*shape))
    assert str(tuple(shape)) in str(error.value)
    assert str((*lead, 4)) in str(error.value)


def test_a_per_token_keyword_of_another_shape_is_named():
    with pytest.raises(
        ValueError,
        match=r"teacher has shape \(5, 4\); .* whose first dimensions .* target's shape \(6,\)",
    ):
        engine()(hidden(6), zeros(6), teacher=hidden(5))


@pytest.mark.parametrize("devices", [None, ["cpu"] * 2, ["cpu"] * 4])
@pytest.mark.parametrize("value", [9, -1, 10**9])
@pytest.mark.parametrize("first", [True, False])
def test_a_target_outside_the_vocabulary_is_named_with_its_position(devices, value, first):
    made, target = engine(devices=devices), zeros(4, 3)
    if not first:
        made(hidden(4, 3), target)  # the check does not end with the first call
    target[3, 1] = value
    with pytest.raises(IndexError, match=rf"target {value} at position \(3, 1\) is outside the vocabulary \[0, 9\)"):
        made(hidden(4, 3), target)


class Mean(nn.Module):
    def forward(self, logits, target):
        return nn.functional.cross_entropy(logits, target)


def test_a_criterion_that_takes_a_mean_is_refused_by_its_setting_and_by_its_numbers():
    with pytest.raises(ValueError, match="reduction='mean'; the criterion must sum"):
        engine(criterion=nn.CrossEntropyLoss())
    with pytest.raises(ValueError, match="takes a mean; the criterion must sum"):
        engine(criterion=Mean())(hidden(6), zeros(6))


def test_the_mean_is_found_later_if_the_first_loss_could_not_tell():
    made = engine(generator=nn.Linear(4, 1), criterion=Mean())
    assert made(hidden(6), zeros(6)).total == 0  # one class: every loss is 0
    made.head["generator"] = nn.Linear(4, 9)
    with pytest.raises(ValueError, match="takes a mean"):
        made(hidden(6), zeros(6))


class Rows(nn.Module):
    def forward(self, logits, target):
        return nn.functional.cross_entropy(logits, target, reduction="none")


class Number(nn.Module):
    def forward(self, logits, target):
        return 1.0


def test_a_criterion_must_return_one_tensor():
    with pytest.raises(ValueError, match="it must return one real number, the sum"):
        engine(criterion=Rows())(hidden(6), zeros(6))
    with pytest.raises(TypeError, match="returned a float"):
        engine(criterion=Number())(hidden(6), zeros(6))


def test_a_generator_must_return_scores_per_token():
    with pytest.raises(ValueError, match=r"the generator returned shape \(16,\) in torch.float32 for hidden \(4, 4\)"):
        engine(generator=nn.Flatten(0))(hidden(6), zeros(6))


class Turned(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 1j


class ComplexLoss(nn.Module):
    def forward(self, logits, target):
        return nn.functional.cross_entropy(logits, target, reduction="sum") * 1j


def test_scores_and_loss_are_real():
    with pytest.raises(ValueError, match=r"returned shape \(4, 9\) in torch.complex64 .* scores in a floating dtype"):
        engine(generator=Turned(4, 9))(hidden(6), zeros(6))
    with pytest.raises(TypeError, match=r"the criterion returned torch.complex64; it must return one real number"):
        engine(criterion=ComplexLoss())(hidden(6), zeros(6))


def test_functions_are_not_modules():
    with pytest.raises(TypeError, match="criterion is a function"):
        engine(criterion=nn.functional.cross_entropy)


def compiled():
    return torch.compile(nn.Linear(4, 9))


def compiled_in_place():
    module = nn.Linear(4, 9)
    module.compile()
    return module


REFUSED = {
    "compiled": (compiled, "as it was before torch.compile"),
    "compiled in place": (compiled_in_place, "as it was before torch.compile"),
    "lazy": (lambda: nn.LazyLinear(9), "run one batch through the module first"),
    "meta": (lambda: nn.Linear(4, 9, device="meta"), "to_empty"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("devices", [None, ["cpu"] * 2])
def test_a_generator_that_cannot_be_replicated_names_the_remedy(case, devices):
    make, remedy = REFUSED[case]
    with pytest.raises(TypeError, match=remedy):
        engine(make(), devices=devices)(hidden(6), zeros(6))
    with pytest.raises(TypeError, match=remedy):
        seqpar.replicate(nn.Sequential(make()), ["cpu"] * 2)


def test_scattered_hidden_and_target_must_fit():
    shards = [hidden(2), hidden(1)]
    with pytest.raises(ValueError, match=r"target has 4 rows and the scattered hidden \[2, 1\], 3 rows"):
        engine()(shards, zeros(4))
    with pytest.raises(ValueError, match="target is scattered over 1 devices and hidden over 2"):
        engine()(shards, [zeros(3)])
    with pytest.raises(TypeError, match="scatter both or neither"):
        engine()(hidden(3), [zeros(3)])


def test_scattered_inputs_are_checked_like_whole_ones():
    shards = [hidden(2), hidden(1)]
    with pytest.raises(TypeError, match=r"target has dtype torch\.float32"):
        engine()(shards, zeros(3, dtype=torch.float32))
    with pytest.raises(ValueError, match=r"hidden has shape \(2, 4\).*chunk_tokens"):
        engine(chunk_size=2)(shards, zeros(3))


def test_smoothing_settings_are_checked():
    with pytest.raises(ValueError, match=r"smoothing is 1\.0"):
        seqpar.LabelSmoothing(1.0, "torch")
    with pytest.raises(ValueError, match="convention is 'other'"):
        seqpar.LabelSmoothing(0.1, "other")
    with pytest.raises(ValueError, match="ignore_index is -100; the 'harvard' convention"):
        seqpar.LabelSmoothing(0.1, "harvard")(torch.zeros(1, 4), zeros(1))
    with pytest.raises(ValueError, match="2 classes are too few"):
        seqpar.LabelSmoothing(0.1, "harvard", ignore_index=0)(torch.zeros(1, 2), zeros(1))


def test_normalize_must_be_above_zero_where_there_are_tokens():
    generator = nn.Linear(4, 9)
    opt = torch.optim.SGD(generator.parameters(), 0.1)
    compute = seqpar.MultiGPULossCompute(generator, seqpar.CrossEntropy(), ["cpu"], opt=opt)
    with pytest.raises(ValueError, match=r"normalize is 0\.0 for 6 tokens"):
        compute(hidden(2, 3), zeros(2, 3), 0)
    compute(hidden(2, 3).requires_grad_(), torch.full((2, 3), -100), 0)  # all padding: 0 / 0 does no harm
    assert torch.isfinite(generator.weight).all()


def test_what_a_recurrent_layer_returns_is_not_scattered():
    """Of one sentence and one layer both tensors have one row, as if each were a device's."""
    torch.manual_seed(0)
    gru, lstm = nn.GRU(3, 4, batch_first=True), nn.LSTM(3, 4, batch_first=True)
    inputs, target = torch.randn(1, 5, 3), torch.randint(7, (1, 5))
    engine = seqpar.LossCompute(nn.Linear(4, 7), seqpar.CrossEntropy())
    for layer in (gru, lstm):
        with pytest.raises(
            TypeError, match=r"hidden is a tuple of 2 and the engine has no device list; [^\n]*hidden, _ ="
        ):
            engine(layer(inputs), target)
    hidden, _ = gru(inputs)
    assert engine(hidden.chunk(2), target.chunk(2)).tokens == engine([hidden], target).tokens == 5


def test_the_rows_of_packed_sequences_are_what_the_message_says():
    torch.manual_seed(0)
    gru, lengths = nn.GRU(3, 4, batch_first=True), torch.tensor([5, 2])
    inputs, target = torch.randn(2, 5, 3), torch.randint(7, (2, 5))
    engine = seqpar.LossCompute(nn.Linear(4, 7), seqpar.CrossEntropy())
    hidden, _ = gru(pack_padded_sequence(inputs, lengths, batch_first=True))
    packed = pack_padded_sequence(target, lengths, batch_first=True)
    with pytest.raises(TypeError, match=r"hidden is a PackedSequence; pass [^\n]*hidden.data"):
        engine(hidden, target)
    with pytest.raises(
        TypeError, match=r"target is a PackedSequence; pass [^\n]*pack_padded_sequence\(target, lengths"
    ):
        engine(hidden.data, packed)
    target[1, 2:] = -100
    padded, _ = gru(inputs)
    torch.testing.assert_close(engine(hidden.data, packed.data).total, engine(padded, target).total)


@pytest.mark.parametrize("shape", [(5,), (2, 5)])
def test_probabilities_as_targets_are_sent_to_where_they_are_learnt_from(shape):
    torch.manual_seed(0)
    hidden, weight = torch.randn(*shape, 4, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)
    weight.requires_grad_()
    probs = torch.randn(*shape, 7, dtype=torch.float64).softmax(-1)
    said = (
        r"target has dtype torch.float64 and shape \([^\n]*7\), as probabilities of classes; [^\n]*linear_distillation"
    )
    with pytest.raises(TypeError, match=said):
        seqpar.LossCompute(nn.Linear(4, 7).double(), nn.CrossEntropyLoss(reduction="sum"))(hidden, probs)
    with pytest.raises(TypeError, match=said):
        seqpar.linear_cross_entropy(hidden, weight, probs)
    with pytest.raises(TypeError, match=r"as probabilities of classes"):
        seqpar.CrossEntropy()(hidden.flatten(0, -2) @ weight.detach().T, probs.flatten(0, -2))
    with pytest.raises(TypeError, match=r"it must hold class indices, int64: use target.long\(\)"):
        seqpar.linear_cross_entropy(hidden, weight, torch.ones(shape, dtype=torch.float64))
    # What the message names has the gradient that was wanted
    loss = seqpar.linear_distillation(
        hidden,
        weight,
        seqpar.TeacherLogProbs(lambda rows: probs.flatten(0, -2)[rows].log()),
        probs.argmax(-1),
        divergence="forward_kl",
    )
    plain = nn.functional.cross_entropy((hidden @ weight.T).flatten(0, -2), probs.flatten(0, -2), reduction="sum")
    found, wanted = (torch.autograd.grad(total, weight)[0] for total in (loss.total, plain))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)


class LogProbOf(nn.Module):
    """An adaptive softmax as a generator, as the message says."""

    def __init__(self, adaptive):
        super().__init__()
        self.adaptive = adaptive

    def forward(self, hidden):
        return self.adaptive.log_prob(hidden.flatten(0, -2)).unflatten(0, hidden.shape[:-1])


def test_an_adaptive_softmax_is_used_by_its_log_prob():
    torch.manual_seed(0)
    adaptive, summed = nn.AdaptiveLogSoftmaxWithLoss(4, 9, [3, 6], div_value=1.0).double(), nn.NLLLoss(reduction="sum")
    for pair in ((adaptive, summed), (nn.Identity(), adaptive)):
        with pytest.raises(
            TypeError, match=r"AdaptiveLogSoftmaxWithLoss is generator and criterion in one, [^\n]*log_prob"
        ):
            seqpar.LossCompute(*pair)
    hidden, target = torch.randn(2, 6, 4, dtype=torch.float64), torch.randint(9, (2, 6))
    loss = seqpar.LossCompute(LogProbOf(adaptive), summed, chunk_tokens=5)(hidden, target)
    plain = adaptive(hidden.flatten(0, 1), target.flatten()).loss * 12
    torch.testing.assert_close(loss.total, plain, rtol=1e-12, atol=0)
