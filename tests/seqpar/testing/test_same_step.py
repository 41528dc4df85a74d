"""assert_same_step passes right trainers in every layout, and names what is wrong with those of published mistakes."""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from datasets import Dataset
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from trl import DPOConfig, DPOTrainer

import seqpar
from seqpar.integrations.accumulate import accumulate_step
from seqpar.integrations.trl import SeqparScores
from seqpar.testing import Layout, assert_same_step
from seqpar.testing.forks import autograd_works_in_a_fork
from seqpar.testing.step_run import Watch
from tests.fenced import fenced
from tests.seqpar.integrations.tiny_models import tiny
from tests.seqpar.integrations.trainer_runs import ONE_STEP
from tests.seqpar.integrations.trl_runs import examples, words

pytestmark = pytest.mark.unswitched


@pytest.fixture(autouse=True, scope="module")
def forks():
    """A trainer that another process cannot import is inherited by a fork, which must be able to train it."""
    if not autograd_works_in_a_fork():
        pytest.skip("autograd does not work in a fork: a test before compiled, in torch's build for CUDA")


PAGE = Path(__file__).parents[3] / "docs" / "same-step.md"
LENGTHS = (1, 4, 2, 5, 3, 3)
SENTENCES = [torch.randint(9, (n, 2), generator=torch.Generator().manual_seed(i)) for i, n in enumerate(LENGTHS)]
"""Of 18 tokens, each (input, target)."""


class Loop:
    """One step of a loop that is right in one process, and has a mistake in any other layout."""

    def __init__(self, layout, mistake, optimizer, clipped):
        self.layout, self.clipped = layout, clipped
        self.mistake = mistake if layout.parts > 1 else ""
        self.model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)).to(layout.dtype)
        if layout.kind == "fsdp2":
            fully_shard(self.model)
        self.optimizer = optimizer(self.model.parameters(), lr=0.1 * (layout.ranks if mistake == "rate" else 1))

    @property
    def wrapped(self):
        if self.layout.ranks == 1 or self.mistake == "unwrapped" or self.layout.kind == "fsdp2":
            return self.model
        return DistributedDataParallel(self.model)

    def over_ranks(self, number):
        """The sum over ranks that have other sentences."""
        number = torch.as_tensor(number, dtype=torch.float64)
        if self.layout.ranks > 1 and self.layout.kind != "tensor parallel":
            dist.all_reduce(number)
        return number

    def differentiated(self, total, rows, tokens):
        ranks = self.layout.ranks
        if self.layout.kind == "tensor parallel" and self.mistake != "world":
            ranks = 1
        return {
            "means": total / rows / self.layout.accumulation,
            "sums": total,
            "accumulation": total * ranks / tokens / self.layout.accumulation,
            "deaf": total / tokens,  # as a loss that stores its gradient and ignores the upstream factor
        }.get(self.mistake, total * ranks / tokens)

    def step(self):
        batches = self.layout.micro_batches(SENTENCES)
        if self.layout.kind == "tensor parallel":
            batches = [self.layout.step(SENTENCES)]
        batches = [torch.cat(batch) for batch in batches]
        tokens, reported, wrapped = self.over_ranks(sum(map(len, batches))), 0.0, self.wrapped
        for batch in batches:
            if self.mistake == "last":
                self.optimizer.zero_grad()
            inputs = self.dropped(wrapped, batch[:, 0])
            total = F.cross_entropy(inputs, batch[:, 1], reduction="sum")
            loss = self.differentiated(total, len(batch), tokens)
            loss.backward()
            reported += loss.detach() if self.mistake == "world" else total.detach() / tokens
        if self.mistake == "norm":  # as that of a parameter which is divided over ranks, and counted on one of them
            nn.utils.clip_grad_norm_(self.model[0].parameters(), self.clipped)
        elif self.clipped:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clipped)
        self.optimizer.step()
        return self.over_ranks(reported) * (4 if self.mistake == "reported" else 1)

    def dropped(self, wrapped, inputs):
        scores = wrapped(inputs)
        return F.dropout(scores, 0.5) if DROPOUT else scores


DROPOUT = []


def trainer(mistake="", optimizer=torch.optim.AdamW, clipped=0.0):
    def make_trainer(layout):
        loop = Loop(layout, mistake, optimizer, clipped)
        return loop.model, loop.step

    return make_trainer


def changed(change):
    """A builder of a right loop whose model or step is changed."""

    def make_trainer(layout):
        loop = Loop(layout, "", torch.optim.AdamW, 0.0)
        return loop.model, change(loop) or loop.step

    return make_trainer


def not_loaded(loop):
    for parameter in loop.model.parameters():
        nn.init.zeros_(parameter)


def head_of_zeros(loop):
    nn.init.zeros_(loop.model[1].weight)


def no_rate(loop):
    loop.optimizer.param_groups[0]["lr"] = 0.0


def constant(loop):
    return lambda: 2.5 * (loop.step() > 0)


def evaluates(loop):
    return lambda: 1.5


def two_steps(loop):
    return lambda: loop.step() + loop.step()


def silent(loop):
    return lambda: print(loop.step())


def on_the_first_rank(loop):
    """As where only the main process has an optimizer, or reaches its step."""
    if dist.is_initialized() and dist.get_rank() > 0:
        loop.optimizer.step = lambda: None


def part_on_the_other_ranks(loop):
    if dist.is_initialized() and dist.get_rank() > 0:
        loop.optimizer = torch.optim.AdamW(loop.model[0].parameters(), lr=0.1)


def decay_of_its_own(loop):
    """As of a decay that is divided by the number of micro-batches where the loss is."""

    @torch.no_grad()
    def step(right=loop.step):
        loss = torch.enable_grad()(right)()
        for parameter in loop.model.parameters():
            parameter.mul_(1 - 0.01 / loop.layout.parts)
        return loss

    return step


def clipped_by_itself(loop):
    def step(right=loop.optimizer.step):
        norm = torch.stack([p.grad.norm() for p in loop.model.parameters()]).norm()
        for parameter in loop.model.parameters():
            parameter.grad *= 0.01 / norm
        right()

    loop.optimizer.step = step


def clipped_by(how):
    """As where k micro-batches have k times the gradient, and a clipping hides it."""

    def change(loop):
        def step(right=loop.optimizer.step):
            parameters = [*loop.model.parameters()]
            for parameter in parameters:
                parameter.grad *= loop.layout.parts
            norm = nn.utils.get_total_norm([p.grad for p in parameters])
            if how == "norm":
                nn.utils.clip_grad_norm_(parameters, 1e-3)
            elif how == "known norm":
                nn.utils.clip_grads_with_norm_(parameters, 1e-3, norm)
            elif how == "value":
                nn.utils.clip_grad_value_(parameters, 1e-9)
            right()

        loop.optimizer.step = step

    return change


def with_codes(loop, changes=False):
    """As quantised weights, which are frozen and of whole numbers."""
    for name, dtype in (("codes", torch.uint8), ("used", torch.bool)):
        loop.model.register_parameter(name, nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False))

    def step(right=loop.step):
        loss = right()
        if changes and loop.layout.parts > 1:
            loop.model.codes.data[1:] -= 1
        return loss

    return step


def with_a_gate(size):
    """As a parameter of very small gradients, which is decayed for each micro-batch."""

    def change(loop):
        loop.model.gate = nn.Parameter(torch.ones(3, dtype=loop.layout.dtype))
        loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1)
        loop.model[1].register_forward_hook(
            lambda module, given, scores: scores + size * loop.model.gate.sum() * scores
        )

        def step(right=loop.step):
            loss = right()
            with torch.no_grad():
                loop.model.gate.mul_(0.9**loop.layout.parts)
            return loss

        return step

    return change


def trains_what_is_frozen(loop):
    loop.model[0].weight.requires_grad_(loop.layout.accumulation > 1)


def decays_for_each_micro_batch(loop):
    def step(right=loop.step):
        loss = right()
        with torch.no_grad():
            loop.model[1].weight.mul_(0.5**loop.layout.accumulation)
        return loss

    return step


class Lookahead(torch.optim.Optimizer):
    """An optimizer that steps another one."""

    def __init__(self, parameters, lr):
        self.inner = torch.optim.AdamW(parameters, lr=lr)
        super().__init__(self.inner.param_groups, {})

    def step(self, closure=None):
        return self.inner.step(closure)


def sharded(parameters, lr):
    """ZeRO's first stage: each rank steps its own share, and is sent the others."""
    if not dist.is_initialized():
        return torch.optim.AdamW(parameters, lr=lr)
    # torch warns of its own torch.jit.script when it is imported
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=lr)


class Phases(nn.Module):
    """Complex weights, which a step may differentiate with wrong imaginary parts."""

    def __init__(self, dtype, times):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(9, 4, dtype=dtype.to_complex()) * (1 + 0.3j))
        self.weight.register_hook(lambda g: torch.complex(g.real, times * g.imag))

    def forward(self, x):
        return (x.to(self.weight.dtype) @ self.weight.T).abs()


def with_complex_weights(loop, times=1):
    loop.model[1] = Phases(loop.layout.dtype, times if loop.layout.parts > 1 else 1)
    loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=0.1)


class Own:
    """An optimizer that is none of torch's."""

    def __init__(self, parameters, lr):
        self.parameters, self.lr = [*parameters], lr

    def step(self):
        with torch.no_grad():
            for parameter in self.parameters:
                parameter -= self.lr * parameter.grad


WIDE, SINGLE, HALF = torch.float64, torch.float32, torch.bfloat16
TWO_PARTS, THREE_PARTS, FOUR_PARTS = (Layout(accumulation=n) for n in (2, 3, 4))
TWO_RANKS, TENSOR_PARALLEL = Layout(ranks=2), Layout(ranks=2, kind="tensor parallel")
LAYOUTS = [FOUR_PARTS, TWO_RANKS, Layout(ranks=2, accumulation=2, kind="fsdp2")]


class Step(NamedTuple):
    """A step of a trainer in some layouts."""

    make_trainer: Any
    layouts: list[Layout]
    said: str = ""
    """The pattern of what is said of a wrong one."""
    dtypes: tuple[torch.dtype, ...] = (WIDE,)


RIGHT = {
    "a loop in every layout": Step(trainer(), LAYOUTS, dtypes=(WIDE, SINGLE, HALF)),
    "ranks with the same sentences, where nothing is multiplied": Step(trainer(), [TENSOR_PARALLEL]),
    "frozen weights of whole numbers": Step(changed(with_codes), [TWO_PARTS]),
    "complex weights": Step(changed(with_complex_weights), [TWO_PARTS], dtypes=(WIDE, SINGLE)),
    "an optimizer that steps another": Step(trainer(optimizer=Lookahead), [TWO_PARTS, TWO_RANKS]),
    "an optimizer whose ranks step a share": Step(trainer(optimizer=sharded), [TWO_PARTS, TWO_RANKS]),
    "an optimizer that is none of torch's": Step(trainer(optimizer=Own), [TWO_PARTS]),
    # As that of a head of zeros, or of DPO, where the policy is the reference
    "a loss that is alike for all sentences in the first step": Step(changed(head_of_zeros), [TWO_PARTS]),
}


def each_dtype(steps):
    """Each step in each of its dtypes."""
    return [pytest.param(one, dtype, id=f"{name}, {dtype}") for name, one in steps.items() for dtype in one.dtypes]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("right", "dtype"), each_dtype(RIGHT))
def test_a_right_step_passes(right, dtype):
    assert_same_step(right.make_trainer, right.layouts, dtype=dtype)


STAYS = "Likely cause: no optimizer steps it there"
WRONG = {
    "transformers_45994": Step(trainer("world"), [Layout(ranks=4, kind="tensor parallel")],
        "the world size: all gradients are 4 times the plain ones, multiplied by the number of ranks once too often"),
    "unsloth_zoo_434": Step(trainer("deaf"), [TWO_RANKS], "all gradients are 1/2 times the plain ones, averaged over"),
    "miles_3231": Step(trainer("sums"), [Layout(ranks=2, kind="fsdp2")],
        "a sum instead of a mean: all gradients are 9 times the plain ones, and the step has 18 tokens"),
    "trl_7245": Step(trainer("unwrapped"), [TWO_RANKS],
        "not reduced over ranks: each rank keeps the gradient of its own tokens; in rank 0 it has the gradient of "
        "sentences 0, 1, 2 alone, of 6"),
    "speculators_942": Step(trainer("means"), [TWO_RANKS], "mean of means: each micro-batch is divided by its own tok"),
    "ms_swift_10165": Step(trainer("means"), [THREE_PARTS], "mean of means: each micro-batch is divided by its o"),
    "unsloth_zoo_1023": Step(trainer("accumulation"), [THREE_PARTS],
        "accumulation: all gradients are 1/3 of the plain ones, as if divided by that many micro-batches"),
    "megatron_7452_norm": Step(trainer("norm", clipped=1e-3), [TWO_RANKS], "other settings of the optimizer, or clip"),
    "last": Step(trainer("last"), [THREE_PARTS], "only the gradient of the last micro-batch is kept: it has the"),
    "clipped": Step(trainer("sums", clipped=1e-3), [THREE_PARTS], "all gradients are 18 times the plain ones"),
    "reported": Step(trainer("reported"), [TWO_RANKS], "only the value is wrong: 4 times the plain one"),
    "rate": Step(trainer("rate"), [TWO_RANKS], "other settings of the optimizer"),
    "a rank whose weights stay behind": Step(changed(on_the_first_rank), [TWO_RANKS],
        rf"{STAYS}.*\n2 ranks: 0\.weight is not changed by the step, in rank 1; the", (WIDE, HALF)),
    "a part whose weights stay behind": Step(changed(part_on_the_other_ranks), [TWO_RANKS],
        rf"{STAYS}.*\n2 ranks: 1\.weight is not changed by the step, in rank", (WIDE, HALF)),
    "weights that are changed beside the optimizer": Step(changed(decay_of_its_own), [TWO_PARTS],
        r"Likely cause: clipping, or what changes the weights beside the opt(.|\n)*"
        r"2 micro-batches: 0\.weight is off by 0\.0"),
    "gradients that a trainer clips by itself": Step(changed(clipped_by_itself), [TWO_PARTS],
        r"the gradients have the norm 0\.01 with other weights as well, for one s"),
    **{f"clipped by {how or 'nothing'} of torch's, which hides a factor": Step(changed(clipped_by(how)), [TWO_PARTS],
        "accumulation: all gradients are 2 times the plain ones") for how in ("", "norm", "known norm", "value")},
    "frozen weights that change": Step(changed(partial(with_codes, changes=True)), [TWO_PARTS],
        r"codes is off by 1 after the step, whose update is 0 large; the first"),
    **{f"a parameter with a gradient of {size}": Step(changed(with_a_gate(size)), [FOUR_PARTS],
        r"gate is off by 0\.[\d]+ after the step, whose update is 0\.1 large") for size in (1e-3, 1e-12)},
    "what is frozen is trained": Step(changed(trains_what_is_frozen), [TWO_PARTS],
        r"0\.weight has a gradient and differs after the step, and in one process it has none", (WIDE, SINGLE, HALF)),
    "a decay for each micro-batch": Step(changed(decays_for_each_micro_batch), [TWO_PARTS],
        r"1\.weight is off by [\d.]+ after the step, whose update is", (WIDE, SINGLE, HALF)),
    "means, an optimizer that steps another": Step(trainer("means", optimizer=Lookahead), [TWO_RANKS], "mean of means"),
    "means, ranks that step a share": Step(trainer("means", optimizer=sharded), [TWO_RANKS], "mean of means"),
    "the state of an optimizer inside another": Step(trainer("rate", optimizer=Lookahead), [TWO_RANKS],
        r"Likely cause: other settings of the optimizer(.|\n)*"
        r"the lr of 0\.weight is off by 0\.1 where the reference is 0\.1 large"),
    "an optimizer of ones own": Step(trainer("sums", optimizer=Own), [TWO_PARTS], r"the update of 0\.weight is off"),
    "imaginary parts": Step(changed(partial(with_complex_weights, times=2)), [TWO_PARTS],
        r"the gradient of 1\.weight is", (WIDE, SINGLE)),
    # NeMo Automodel#3701
    "not loaded": Step(changed(not_loaded), LAYOUTS, "nothing is trained: every gradient is 0"),
    "constant": Step(changed(constant), LAYOUTS,
        r"nothing is trained: the loss is 2\.5 with other weights as well, for one sentence as for all"),
    "no rate": Step(changed(no_rate), LAYOUTS,
        "nothing is trained: no parameter changes; there are gradients; is the first step's learning rate 0"),
    "evaluates": Step(changed(evaluates), LAYOUTS,
        "nothing is trained: no parameter changes; no optimizer had a gradient"),
    "two steps": Step(changed(two_steps), LAYOUTS,
        r"0\.weight was stepped twice; make_trainer's function must train for"),
    "no trainer": Step(lambda layout: nn.Linear(2, 2), LAYOUTS,
        "make_trainer returned a Linear; it must return two things: the model"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("wrong", "dtype"), each_dtype(WRONG))
def test_a_wrong_step_is_caught_and_its_cause_named(wrong, dtype):
    with pytest.raises(AssertionError, match=wrong.said):
        assert_same_step(wrong.make_trainer, wrong.layouts, dtype=dtype)


@pytest.mark.parametrize(
    ("make_trainer", "layouts", "options", "error", "said"),
    [
        (changed(silent), LAYOUTS, {}, ValueError, "the step returned no loss; return the loss that the trainer rep"),
        (trainer(), "ddp", {}, TypeError, "it must be a list such as"),
        (trainer(), [], {}, ValueError, "layouts is empty"),
        (trainer(), LAYOUTS, {"dtype": torch.int64}, ValueError, r"dtype is torch\.int64"),
        (trainer(), LAYOUTS, {"rtol": -1.0}, ValueError, r"^rtol is -1\.0"),
        (3, LAYOUTS, {}, TypeError, r"^make_trainer is"),
    ],
)
def test_what_is_no_trainer_layout_or_tolerance_is_refused_in_a_line(make_trainer, layouts, options, error, said):
    with pytest.raises(error, match=said):
        assert_same_step(make_trainer, layouts, **options)


def test_a_failure_names_the_first_module_and_the_call_that_shows_it():
    with pytest.raises(AssertionError, match=r"the gradient of 0.weight is off by [\d.]+ where the reference is") as e:
        assert_same_step(trainer("world"), [FOUR_PARTS, TENSOR_PARALLEL])
    assert "the first module that differs is 0, and 2 of 2 parameters do" in str(e.value)
    assert "_step(trainer.<locals>.make_trainer, [Layout(ranks=2, kind='tensor parallel')])" in str(e.value)


def test_random_numbers_are_the_cause_where_a_loss_draws_some(monkeypatch):
    monkeypatch.setattr("tests.seqpar.testing.test_same_step.DROPOUT", [True])
    with pytest.raises(AssertionError, match="Likely cause: random numbers, such as those of dropout"):
        assert_same_step(trainer(), [Layout(ranks=2)])


def test_a_gradient_that_is_clipped_twice_is_kept_as_it_was_before_the_first_time():
    model = nn.Linear(3, 2)
    optimizer, watch = torch.optim.SGD(model.parameters(), lr=0.1), Watch(model)
    model(torch.ones(4, 3)).square().sum().backward()
    unclipped = model.weight.grad.clone()
    with watch.watching():
        for most in (0.1, 0.01):
            nn.utils.clip_grad_norm_(model.parameters(), most)
        optimizer.step()
    assert not torch.equal(model.weight.grad, unclipped)
    assert torch.equal(watch.gradients["weight"], unclipped)


def test_a_norm_that_is_looked_at_on_the_way_clips_nothing():
    model = nn.Linear(3, 2)
    optimizer, watch = torch.optim.SGD(model.parameters(), lr=0.1), Watch(model)
    with watch.watching():
        for _ in range(2):
            model(torch.ones(4, 3)).square().sum().backward()
            nn.utils.get_total_norm([model.weight.grad])
        right = model.weight.grad.clone()
        optimizer.step()
    assert torch.equal(watch.gradients["weight"], right)


def test_the_trainer_of_the_page_passes_with_seqpar_and_stock_marian_is_caught():
    names = {"__name__": "pasted"}
    first, *_ = (block.code for block in fenced(PAGE) if block.language == "python")
    exec(first.replace("\nassert_same_step(", "\n(lambda *_: None)("), names)
    with pytest.raises(AssertionError, match=r"a sum of means: .*, and their sum not by the 4 micro-batches") as caught:
        assert_same_step(names["trainer_of"], [Layout(accumulation=4)])
    assert "the loss is reported as 16.342291 where 4.08816 is right" in str(caught.value)
    assert str(caught.value) in PAGE.read_text()


class Translation(LightningModule):
    def __init__(self, layout, exact):
        super().__init__()
        self.automatic_optimization, self.layout, self.reported = not exact, layout, None
        self.both = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)).to(layout.dtype)

    def training_step(self, batch, index):
        if self.automatic_optimization:
            tokens = torch.cat(batch)
            loss = F.cross_entropy(self.both(tokens[:, 0]), tokens[:, 1])
            self.reported = loss.detach()
            return loss
        loss = accumulate_step(self.trainer, self, batch, self.loss_of, len)
        self.optimizers().step()
        self.reported = loss.mean
        return None

    def loss_of(self, sentence):
        weight, bias = self.both[1].weight, self.both[1].bias
        return seqpar.linear_cross_entropy(self.both[0](sentence[:, 0]), weight, sentence[:, 1], bias=bias)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def lightning(exact):
    def make_trainer(layout):
        data = layout.step(SENTENCES)
        batches = data if not exact else [data]
        module = Translation(layout, exact)
        options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        options |= {"enable_model_summary": False, "barebones": False, "accelerator": "cpu", "max_steps": 1}
        accumulation = layout.accumulation if not exact else 1
        trainer = Trainer(accumulate_grad_batches=accumulation, **options)
        size = len(data) // layout.accumulation if not exact else None
        loader = DataLoader(batches, batch_size=size, collate_fn=list if not exact else None)

        def step():
            trainer.fit(module, loader)
            return module.reported

        return module, step

    return make_trainer


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_lightnings_own_accumulation_is_a_mean_of_means():
    with pytest.raises(AssertionError, match="mean of means: each micro-batch is divided by its own tokens"):
        assert_same_step(lightning(exact=False), [Layout(accumulation=2)])
    assert_same_step(lightning(exact=True), [Layout(accumulation=2)])


PAIRS = [*examples("dpo", 8)]


def dpo(layout):
    model, reference = (tiny("llama", layout.dtype, bos_token_id=2, eos_token_id=3) for _ in range(2))
    data = layout.step(PAIRS)
    arguments = DPOConfig(
        tempfile.mkdtemp(),
        per_device_train_batch_size=len(data) // layout.parts,
        gradient_accumulation_steps=layout.accumulation,
        learning_rate=0.01,
        logging_steps=1,
        bf16=False,
        gradient_checkpointing=False,
        **(ONE_STEP | {"max_grad_norm": 1.0}),
    )
    given = {"train_dataset": Dataset.from_list(data), "processing_class": words(), "callbacks": [SeqparScores()]}
    trainer = DPOTrainer(model, reference, arguments, **given)

    def step():
        trainer.train()
        return trainer.state.log_history[0]["loss"]

    return model, step


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_trls_dpo_passes_over_ranks_and_micro_batches():
    """Its loss is log 2 for every pair in the first step."""
    assert_same_step(dpo, [Layout(ranks=2, accumulation=2)])


def test_a_trainer_that_a_new_process_cannot_import_is_refused_in_a_line(monkeypatch):
    monkeypatch.setattr("seqpar.testing.ranks.autograd_works_in_a_fork", lambda: False)
    with pytest.raises(AssertionError, match="make_trainer must be at the top level of a module, where a new"):
        assert_same_step(lambda layout: None, layouts=[Layout(ranks=2)])
