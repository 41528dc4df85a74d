"""The same claims on a real CUDA device, and on two where the machine has them."""

import copy
import itertools
from unittest.mock import patch

import pytest
import torch
from torch import nn

import seqpar
from conformance.peak_memory import peak_bytes
from seqpar.core import chunked_gradient
from seqpar.core.stored_gradients import SummedGradient
from tests.seqpar.linear.score_cases import assert_scores, plain_scores
from tests.seqpar.linear.scored_cases import LOSSES, plain_scored

pytestmark = pytest.mark.gpu


def device_lists():
    """Repeated, mixed with the CPU, and every pair of distinct GPUs."""
    lists = [["cuda:0"], ["cuda:0"] * 2, ["cuda:0", "cpu"], ["cpu", "cuda:0"], ["cuda:0", "cpu", "cuda:0"]]
    pairs = itertools.permutations(range(torch.cuda.device_count()), 2)
    lists += [[f"cuda:{a}", f"cuda:{b}"] for a, b in pairs]
    if torch.cuda.device_count() > 1:
        lists += [["cuda:0", "cuda:1", "cuda:0"], [0, 1]]
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


def score_inputs(rows):
    """Inputs of a loss of scores as leaves, on the CPU; some rows are ignored."""
    random = torch.Generator().manual_seed(rows)
    drawn = {"hidden": (rows, 6), "weight": (11, 6), "bias": (11,), "old": (rows,), "advantage": (rows,)}
    leaves = {
        name: torch.randn(shape, dtype=torch.float64, generator=random, requires_grad=True)
        for name, shape in drawn.items()
    }
    target = torch.randint(11, (rows,), generator=random)
    target[1:3] = -100
    return leaves, {"target": target, "ids_weight": torch.zeros(rows, 0)}


def score_engine(leaves, devices):
    """An engine of the projection, and hidden on its first device."""
    home = seqpar.scatter(torch.zeros(1), devices)[0].device
    generator = nn.Linear(6, 11, device=home, dtype=torch.float64)
    with torch.no_grad():
        generator.weight.copy_(leaves["weight"]), generator.bias.copy_(leaves["bias"])
    return seqpar.LossCompute(generator, seqpar.CrossEntropy(), devices, chunk_tokens=4), home


@pytest.mark.parametrize("devices", device_lists(), ids=str)
@pytest.mark.parametrize("rows", [1, 3, 17])
def test_a_loss_of_scores_over_any_device_list_equals_one_cpu(devices, rows):
    leaves, rest = score_inputs(rows)
    options = {"ignore_index": -100, "softcap": None, "temperature": 0.7, "ids": None, "entropy": True}
    plain = plain_scored("surrogate", leaves | rest, **options)
    expected = torch.autograd.grad(plain / 7, list(leaves.values()))

    engine, home = score_engine(leaves, devices)
    generator = engine.head["generator"]
    moved = {n: leaves[n].detach().to(home).requires_grad_() for n in ("hidden", "old", "advantage")}
    per_token = {"old": moved["old"], "advantage": moved["advantage"], "ids_weight": rest["ids_weight"].to(home)}
    loss = engine.scored_loss(
        moved["hidden"], rest["target"].to(home), LOSSES["surrogate"], entropy=True, temperature=0.7, **per_token
    )
    assert loss.total.device == home
    torch.testing.assert_close(loss.total.cpu(), plain, rtol=1e-12, atol=1e-13)
    ours = [moved["hidden"], generator.weight, generator.bias, moved["old"], moved["advantage"]]
    for a, b in zip(torch.autograd.grad(loss.total / 7, ours), expected, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("devices", device_lists(), ids=str)
def test_scores_and_ranks_over_any_device_list_are_those_of_one_cpu(devices):
    leaves, rest = score_inputs(17)
    target = rest["target"]
    given = {name: leaves[name] for name in ("hidden", "weight", "bias")} | {"target": target}
    options = {"temperature": 1.0, "softcap": 5.0, "entropy": True, "top_k": 3, "rank": True}
    engine, home = score_engine(leaves, devices)
    found = engine.token_scores(leaves["hidden"].detach().to(home), target.to(home), **options)
    on_cpu = seqpar.TokenScores(*(None if t is None else t.detach().cpu() for t in found))
    with torch.no_grad():
        assert_scores(on_cpu, plain_scores(**given, ignore_index=-100, **options), target == -100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_invariant_scores_have_the_same_bits_in_any_company(dtype):
    """The libraries choose a kernel by the shape, and not every kernel rounds a row in the same way."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 96, device="cuda").to(dtype) for n in (300, 5_000))
    target = torch.randint(5_000, (300,), device="cuda")
    target[::7] = -100

    def of(some):
        options = {"entropy": True, "top_k": 3, "rank": True}
        return seqpar.token_scores(hidden[some], weight, target[some], batch_invariant=True, **options)

    whole = of(slice(None))
    for some in (slice(17, 18), slice(40, 140), torch.randperm(300, device="cuda")):
        for name, part in of(some)._asdict().items():
            if part is not None:
                assert torch.equal(part, getattr(whole, name)[some]), name


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
    peak = peak_bytes(lambda: engine(hidden, target).mean.backward(), "cuda")
    assert peak < rows * vocab_size * 4 / 2


def test_autocast_reaches_every_device():
    engine = seqpar.LossCompute(nn.Linear(8, 50).cuda(), seqpar.CrossEntropy(), ["cuda:0"] * 2, chunk_tokens=7)
    seen = set()
    engine.head["generator"].register_forward_hook(lambda _, __, output: seen.add(output.dtype))
    with torch.autocast("cuda", torch.bfloat16):
        engine(torch.randn(40, 8, device="cuda", requires_grad=True), torch.randint(50, (40,), device="cuda"))
    assert seen == {torch.bfloat16}


def small_step(devices, chunk_tokens=7):
    """A trunk and an engine over `devices`; returns a function from (tokens, target) to loss and all gradients."""
    torch.manual_seed(0)
    home = seqpar.scatter(torch.zeros(1), devices)[0].device
    trunk = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 64), nn.Tanh()).to(home)
    generator = nn.Linear(64, 50).to(home)
    engine = seqpar.LossCompute(generator, seqpar.LabelSmoothing(0.1, "torch"), devices, chunk_tokens=chunk_tokens)
    model = seqpar.DataParallel(trunk, devices, gather_outputs=False)
    parameters = [*trunk.parameters(), *generator.parameters()]

    def step(tokens, target):
        loss = engine(model(tokens), target)
        return [loss.total.detach(), *torch.autograd.grad(loss.total / loss.tokens, parameters)]

    return step


@pytest.mark.parametrize("devices", [d for d in device_lists() if d[0] != "cpu"], ids=str)
@pytest.mark.parametrize("side_stream", [False, True])
def test_fifty_steps_from_pinned_memory_have_the_same_bits(devices, side_stream):
    """A copy that is read before it has arrived, or a gradient added before it is there, would change some of them."""
    step = small_step(devices)
    random = torch.Generator().manual_seed(1)
    tokens, target = (torch.randint(50, (64, 33), generator=random) for _ in range(2))
    seen = set()
    home = seqpar.scatter(torch.zeros(1), devices)[0].device
    for _ in range(50):
        busy = torch.randn(2048, 2048, device=home)
        stream = torch.cuda.Stream(home) if side_stream else torch.cuda.current_stream(home)
        stream.wait_stream(torch.cuda.current_stream(home))
        with torch.cuda.stream(stream):
            busy = busy @ busy  # what follows is queued behind it, so a copy that nobody waits for comes too late
            sent = [t.pin_memory().to(home, non_blocking=True) for t in (tokens, target)]
            found = step(*sent)
        torch.cuda.current_stream(home).wait_stream(stream)
        seen.add(tuple(t.cpu().flatten().view(torch.uint8).numpy().tobytes() for t in found))
    assert len(seen) == 1


class Own(nn.Linear):
    """A projection that the engine does not know."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_host_synchronisation_inside_the_walk():
    hidden = torch.randn(2_000, 64, device="cuda", requires_grad=True)
    target = torch.randint(500, (2_000,), device="cuda")
    target[::3] = -100
    known = nn.Linear(64, 500).cuda()
    weights = torch.rand(2_000, device="cuda", requires_grad=True)
    scale = torch.tensor(8.0, device="cuda")
    losses = {
        "by formula": lambda: seqpar.LossCompute(known, seqpar.LabelSmoothing(0.1, "fairseq"), chunk_tokens=64),
        "by autograd": lambda: seqpar.LossCompute(Own(64, 500).cuda(), seqpar.CrossEntropy(), chunk_tokens=64),
        "linear": lambda: lambda h, t, loss_scale: seqpar.linear_cross_entropy(
            h, known.weight, t, bias=known.bias, token_weight=weights, z_loss=1e-4, softcap=30.0, temperature=2.0,
            class_weight=torch.ones(500, device="cuda"), loss_scale=loss_scale, chunk_tokens=64,
        ),
    }  # fmt: skip
    walk = chunked_gradient.sum_over_chunks

    def watched(*arguments):
        try:
            torch.cuda.set_sync_debug_mode("error")
            return walk(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    for make in losses.values():
        loss = make()
        loss(hidden, target, loss_scale=scale)  # what looks at the first call, and compiles, has done so
        with patch.object(chunked_gradient, "sum_over_chunks", watched):
            got = loss(hidden, target, loss_scale=scale)
        try:
            torch.cuda.set_sync_debug_mode("error")
            (got.total * scale).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_under_autocast_with_a_gradscaler_is_the_plain_one(dtype):
    """As near to float64's as plain torch's own step under the same autocast, by a factor of two."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(16, 32), nn.Tanh()), nn.Linear(32, 400)
    x, target = torch.randn(300, 16), torch.randint(400, (300,))
    criterion = seqpar.LabelSmoothing(0.1, "torch")

    def gradients(how):
        kind = torch.float64 if how == "exact" else torch.float32
        trunk, generator = (copy.deepcopy(m).to("cuda", kind) for m in made)
        parameters = [*trunk.parameters(), *generator.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.0)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**12, enabled=how != "exact")
        engine = seqpar.LossCompute(generator, criterion, chunk_tokens=64)
        with torch.autocast("cuda", dtype, enabled=how != "exact"):
            hidden = trunk(x.to("cuda", kind))
            if how == "ours":
                loss = engine(hidden, target.cuda(), loss_scale=scaler.get_scale() / 300).total / 300
            else:
                loss = nn.functional.cross_entropy(generator(hidden), target.cuda(), label_smoothing=0.1)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return [p.grad.double() for p in parameters]

    truth = gradients("exact")
    ours, plain = ([float((a - b).norm() / b.norm()) for a, b in zip(gradients(how), truth, strict=True)]
                   for how in ("ours", "plain"))  # fmt: skip
    for a, b in zip(ours, plain, strict=True):
        assert a <= 2 * max(b, torch.finfo(dtype).eps / 2)


@pytest.mark.parametrize("loss", ["engine", "linear"])
def test_a_model_with_the_loss_inside_compiles_into_one_graph(loss):
    torch.manual_seed(0)
    trunk, generator = nn.Linear(16, 32).cuda(), nn.Linear(32, 400).cuda()
    engine = seqpar.LossCompute(generator, seqpar.LabelSmoothing(0.1, "torch"), chunk_tokens=64)
    x, target = torch.randn(300, 16, device="cuda"), torch.randint(400, (300,), device="cuda")

    def total(x, target):
        if loss == "engine":
            return engine(trunk(x).tanh(), target).total
        options = {"bias": generator.bias, "label_smoothing": 0.1, "chunk_tokens": 64}
        return seqpar.linear_cross_entropy(trunk(x).tanh(), generator.weight, target, **options).total

    parameters = [*trunk.parameters(), *generator.parameters()]
    eager = torch.autograd.grad(total(x, target), parameters)
    compiled = torch.autograd.grad(torch.compile(total, fullgraph=True)(x, target), parameters)
    for a, b in zip(compiled, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class Training:
    """Some steps of SGD on batches with more and more padding."""

    def __init__(self, how):
        torch.manual_seed(0)
        self.how = how
        self.trunk = nn.Linear(16, 32).double().cuda()
        generator = (Own if how == "by autograd" else nn.Linear)(32, 400).double().cuda()
        self.parameters = [*self.trunk.parameters(), *generator.parameters()]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1)
        self.engine = seqpar.LossCompute(generator, seqpar.LabelSmoothing(0.1, "torch"), chunk_tokens=64)
        self.batches = [(torch.randn(300, 16).double().cuda(), torch.randint(400, (300,)).cuda()) for _ in range(4)]
        for i, (_, target) in enumerate(self.batches):
            target[torch.rand(300) < 0.2 * i] = -100
        self.start = self.values()

    def values(self):
        return [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def restart(self):
        for p, q in zip(self.parameters, self.start, strict=True):
            p.copy_(q)

    def loss(self, x, target):
        hidden = self.trunk(x).tanh()
        if self.how != "of scores":
            return self.engine(hidden, target)
        per_token = {"old": x[:, 0] - 6, "advantage": x[:, 1], "ids_weight": x[:, :0]}
        return self.engine.scored_loss(hidden, target, LOSSES["surrogate"], entropy=True, **per_token)

    def step(self, x, target):
        loss = self.loss(x, target)
        loss.mean.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return loss


@pytest.mark.parametrize("how", ["by formula", "by autograd", "of scores"])
def test_a_training_step_can_be_recorded_in_a_cuda_graph_and_replayed_on_other_data(how):
    """The graph takes every row, and those that are ignored count for nothing."""
    training = Training(how)
    expected = [[t.item() for t in training.step(*batch)] for batch in training.batches]
    ends = training.values()
    static = [t.clone() for t in training.batches[0]]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            training.step(*static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = training.step(*static)
    training.restart()
    for (x, target), (total, tokens, nll, correct) in zip(training.batches, expected, strict=True):
        static[0].copy_(x), static[1].copy_(target)
        graph.replay()
        assert (recorded.tokens.item(), recorded.correct.item()) == (tokens, correct)
        torch.testing.assert_close(recorded.total.item(), total, rtol=1e-12, atol=0)
        torch.testing.assert_close(recorded.nll.item(), nll, rtol=1e-12, atol=0)
    for p, end in zip(training.parameters, ends, strict=True):
        torch.testing.assert_close(p, end, rtol=1e-11, atol=1e-13)


def test_the_weight_gradient_is_added_up_in_float32_without_a_rounding_between():
    """256 products of 1 + 2^-9: in bfloat16 each would be rounded to 1."""
    sums = SummedGradient(torch.bfloat16, chunks=256)
    part = torch.tensor([[1.0, 2.0**-9]], device="cuda", dtype=torch.bfloat16)
    ones = torch.ones(2, 1, device="cuda", dtype=torch.bfloat16)
    for _ in range(256):
        sums.add_product(part, ones)
    (total,) = sums.parts
    assert total.dtype == torch.float32
    assert total.item() == 256 * (1 + 2.0**-9)
