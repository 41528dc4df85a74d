"""What an error's one line advises is right: the device list, packed sequences, probabilities, an adaptive softmax."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import seqpar
from seqpar.multi_device.devices import check_devices


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without a GPU")
def test_an_index_without_an_accelerator_says_so():
    with pytest.raises(ValueError, match="device 0 is an accelerator's index, and there is none"):
        check_devices([0])


@pytest.mark.unswitched
def test_good_device_lists_are_normalised():
    assert check_devices(["cpu:0", torch.device("cpu")]) == (torch.device("cpu"),) * 2


def test_no_tokens_may_be_divided_by_0():
    generator = nn.Linear(4, 9)
    opt = torch.optim.SGD(generator.parameters(), 0.1)
    compute = seqpar.MultiGPULossCompute(generator, seqpar.CrossEntropy(), ["cpu"], opt=opt)
    compute(torch.randn(2, 3, 4, requires_grad=True), torch.full((2, 3), -100), 0)
    assert torch.isfinite(generator.weight).all()


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
