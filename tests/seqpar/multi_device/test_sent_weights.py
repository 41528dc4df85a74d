"""Weights that are sent to the second accelerator before the model computes: once, beside it, and the right ones."""

import gc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import seqpar
from seqpar.multi_device import sent_weights
from tests import emulated
from tests.seqpar.multi_device.test_streams import TWO, Own, races

pytestmark = pytest.mark.skipif(
    torch._C._get_privateuse1_backend_name() != emulated.NAME, reason="needs the emulated accelerators"
)
VOCAB, WIDTH = 50, 16


class Copies(TorchDispatchMode):
    """Lists the copies of a weight to the second device, each by the stream of the first on which it runs."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        is_copy = function is torch.ops.aten._to_copy.default and args[0].shape == (VOCAB, WIDTH)
        if is_copy and (args[0].device.index, made.device.index) == (0, 1):
            self.found.append(torch.accelerator.current_stream(0).stream_id)
        return made


class Model:
    """A trunk whose embedding is the generator's weight, if they are `tied`, and a step over both devices."""

    def __init__(self, tied, generator=torch.nn.Linear):
        torch.manual_seed(0)
        self.trunk = torch.nn.Sequential(torch.nn.Embedding(VOCAB, WIDTH), torch.nn.Linear(WIDTH, WIDTH)).to(TWO[0])
        self.generator = generator(WIDTH, VOCAB).to(TWO[0])
        if tied:
            self.generator.weight = self.trunk[0].weight
        self.engine = seqpar.LossCompute(self.generator, seqpar.CrossEntropy(), TWO, chunk_tokens=8)
        self.spread = seqpar.DataParallel(self.trunk, TWO, gather_outputs=False)
        self.parameters = list(dict.fromkeys([*self.trunk.parameters(), *self.generator.parameters()]))
        self.tokens = torch.randint(VOCAB, (2, 6, 9))

    def step(self, prefetch, between=lambda: None, rows=6):
        if prefetch:
            self.engine.prefetch()
        between()
        loss = self.engine(self.spread(self.tokens[0, :rows]), self.tokens[1, :rows])
        (loss.total / loss.tokens).backward()
        found = [loss.total.detach(), *(p.grad.clone() for p in self.parameters)]
        with torch.no_grad():
            for p in self.parameters:
                p -= 0.1 * p.grad
                p.grad = None
        return found


@pytest.mark.parametrize("rows", [6, 1], ids=["both devices", "a batch that is too small for both"])
@pytest.mark.parametrize("generator", [torch.nn.Linear, Own])
@pytest.mark.parametrize("tied", [False, True])
def test_steps_have_the_same_bits_and_no_race_with_weights_sent_ahead(tied, generator, rows):
    ahead, plain = Model(tied, generator), Model(tied, generator)
    for _ in range(3):
        for one, other in zip(ahead.step(True, rows=rows), plain.step(False, rows=rows), strict=True):
            assert torch.equal(one, other)
    assert races() == []


@pytest.mark.parametrize(("tied", "prefetch", "sent"), [(True, False, 2), (True, True, 1), (False, True, 2)])
def test_a_weight_that_both_have_is_sent_once_and_beside_the_model(tied, prefetch, sent):
    model = Model(tied)
    model.step(prefetch=False)  # the engine calls the pair once, to compare it with its formula
    with Copies() as copies:
        model.step(prefetch)
    # That of the embedding, if it has one of its own, is sent when it is needed, on the stream of the model
    assert len(copies.found) == sent
    assert [stream != 0 for stream in copies.found].count(True) == int(prefetch)
    assert copies.found[0] == (sent_weights._side_stream(TWO[0]).stream_id if prefetch else 0)


@pytest.mark.parametrize("change", ["in place", "other memory"])
def test_a_weight_that_changes_meanwhile_is_sent_again(change):
    ahead, plain = Model(tied=True), Model(tied=True)

    def between(model):
        def run():
            torch.accelerator.synchronize(0)
            if change == "in place":
                with torch.no_grad():
                    model.generator.weight.mul_(2)
            else:
                model.generator.weight.data = model.generator.weight.data * 2

        return run

    found = ahead.step(prefetch=True, between=between(ahead))
    for one, other in zip(found, plain.step(prefetch=False, between=between(plain)), strict=True):
        assert torch.equal(one, other)


def test_scores_take_the_weights_that_were_sent_and_let_go_of_them():
    model = Model(tied=False)
    hidden, target = torch.randn(12, WIDTH), torch.randint(VOCAB, (12,))
    wanted = model.engine.token_scores(hidden, target).log_prob
    model.engine.prefetch()
    with Copies() as copies:
        assert torch.equal(model.engine.token_scores(hidden, target).log_prob, wanted)
    assert copies.found == []
    with Copies() as copies:
        model.engine.token_scores(hidden, target)
    assert len(copies.found) == 1


def test_nothing_that_was_sent_outlives_the_call_of_the_loss_or_the_weight():
    model = Model(tied=False)
    model.step(prefetch=True)
    assert not sent_weights._underway
    model.engine.prefetch()
    assert len(sent_weights._underway) == 2
    del model
    gc.collect()
    assert not sent_weights._underway


@pytest.mark.parametrize("devices", [None, TWO[:1], ["cpu"]], ids=str)
def test_without_a_second_accelerator_nothing_is_sent(devices):
    generator = torch.nn.Linear(WIDTH, VOCAB).to(TWO[0])
    seqpar.LossCompute(generator, seqpar.CrossEntropy(), devices).prefetch()
    if devices == ["cpu"]:  # stands for the first accelerator
        assert not any(sent.on for sent in sent_weights._underway.values())
    else:
        assert not sent_weights._underway


def test_streams_that_do_not_wait_for_each_other_are_found(monkeypatch):
    model = Model(tied=False)
    monkeypatch.setattr(sent_weights, "current_streams", lambda devices: map(sent_weights._side_stream, devices))
    model.step(prefetch=True)
    model.step(prefetch=True)
    torch.accelerator.synchronize(0)
    torch.accelerator.synchronize(1)
    found = races()
    # The copy reads what the optimizer writes, and the loss what the copy writes
    side = f"aten::copy_ on stream {sent_weights._side_stream(TWO[0]).stream_id} of device 0"
    assert any(race.startswith(f"{side} reads what aten::sub on stream 0 of device 0") for race in found)
    assert any(race.startswith(f"aten::addmm on stream 0 of device 1 reads what {side}") for race in found)


def test_what_cannot_be_replicated_is_refused_when_it_is_sent():
    engine = seqpar.LossCompute(torch.nn.LazyLinear(VOCAB), seqpar.CrossEntropy(), TWO)
    with pytest.raises(TypeError, match="lazy"):
        engine.prefetch()
