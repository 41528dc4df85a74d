"""The same claims on a real CUDA device, and on two where the machine has them."""

import pytest
import torch
from torch import nn

import seqpar

pytestmark = pytest.mark.gpu


def device_lists():
    lists = [["cuda:0"], ["cuda:0"] * 2, ["cpu", "cuda:0"], ["cuda:0", "cpu", "cuda:0"]]
    if torch.cuda.device_count() > 1:
        lists += [["cuda:0", "cuda:1"], ["cuda:1", "cuda:0"], ["cuda:0", "cuda:1", "cuda:0"], [0, 1]]
    return lists


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(11, 6), nn.LSTM(6, 6, batch_first=True)

    def forward(self, tokens):
        return self.rnn(self.embed(tokens))[0]


@pytest.mark.parametrize("devices", device_lists(), ids=str)
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("gather_outputs", [True, False])
def test_trunk_and_engine_over_any_device_list_equal_one_cpu(devices, rows, gather_outputs):
    torch.manual_seed(rows)
    trunk, generator = Trunk().double(), nn.Linear(6, 11).double()
    generator.weight = trunk.embed.weight
    tokens, target = torch.randint(11, (rows, 5)), torch.randint(11, (rows, 5))
    target[0, 1:3] = -100
    plain = nn.functional.cross_entropy(
        generator(trunk(tokens)).flatten(0, 1), target.flatten(), label_smoothing=0.1, reduction="sum"
    )
    parameters = [*trunk.parameters(), generator.bias]
    expected = torch.autograd.grad(plain / 7, parameters)

    home = seqpar.scatter(tokens, devices)[0].device
    trunk.to(home), generator.to(home)
    generator.weight = trunk.embed.weight
    parameters = [*trunk.parameters(), generator.bias]
    hidden = seqpar.DataParallel(trunk, devices, gather_outputs=gather_outputs)(tokens)
    engine = seqpar.LossCompute(generator, seqpar.LabelSmoothing(0.1, "torch"), devices, chunk_tokens=4)
    loss = engine(hidden, target)
    assert loss.total.device == home
    torch.testing.assert_close(loss.total.cpu(), plain, rtol=1e-12, atol=0)
    for a, b in zip(torch.autograd.grad(loss.total / 7, parameters), expected, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-11, atol=1e-13)


def test_layers_on_cpu_and_gpu_get_their_gradients_where_they_are():
    torch.manual_seed(0)
    plain, placed = (nn.ModuleDict({"embed": nn.Embedding(5, 4), "out": nn.Linear(4, 2)}).double() for _ in range(2))
    placed.load_state_dict(plain.state_dict())
    seqpar.place(placed, {"embed": "cpu", "out": "cuda:0"})
    tokens = torch.tensor([[1, 2, 3]])
    for model in (plain, placed):
        model["out"](model["embed"](tokens)).sum().backward()
    assert placed["embed"].weight.grad.device.type == "cpu"
    assert placed["out"].weight.grad.device.type == "cuda"
    for a, b in zip(placed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-12, atol=1e-14)


def test_a_target_outside_the_vocabulary_raises_before_the_device_asserts():
    engine = seqpar.LossCompute(nn.Linear(4, 9).cuda(), seqpar.CrossEntropy(), chunk_tokens=2)
    with pytest.raises(IndexError, match=r"target 9 at position \(5,\)"):
        engine(torch.randn(6, 4, device="cuda"), torch.tensor([0, 1, 2, 3, 4, 9], device="cuda"))
    assert torch.ones(1, device="cuda").item() == 1  # the device is still alive


def test_peak_memory_is_chunks_not_all_logits():
    rows, width, vocab_size = 4_096, 64, 32_000
    generator, target = nn.Linear(width, vocab_size).cuda(), torch.randint(vocab_size, (rows,), device="cuda")
    hidden = torch.randn(rows, width, device="cuda", requires_grad=True)
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy(), chunk_tokens=256)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    engine(hidden, target).mean.backward()
    assert torch.cuda.max_memory_allocated() - before < rows * vocab_size * 4 / 2


def test_autocast_reaches_every_device():
    engine = seqpar.LossCompute(nn.Linear(8, 50).cuda(), seqpar.CrossEntropy(), ["cuda:0"] * 2, chunk_tokens=7)
    seen = set()
    engine.head["generator"].register_forward_hook(lambda _, __, output: seen.add(output.dtype))
    with torch.autocast("cuda", torch.bfloat16):
        engine(torch.randn(40, 8, device="cuda", requires_grad=True), torch.randint(50, (40,), device="cuda"))
    assert seen == {torch.bfloat16}
