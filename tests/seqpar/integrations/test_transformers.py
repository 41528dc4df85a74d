"""Hugging Face models: the chunked loss has the model's own value and gradient, or says that it has not."""

import copy
import io
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import seqpar
from conformance.apart import apart
from conformance.peak_memory import can_measure_cpu, peak_bytes
from seqpar.integrations.transformers import apply_seqpar_loss
from seqpar.integrations.transformers_trainer import facts_of
from seqpar.testing.ranks import ranks
from tests.seqpar.integrations.small_seq2seq import whole, whole_gradients
from tests.seqpar.integrations.tiny_models import (
    MODELS,
    assert_alike,
    batch_of,
    is_seq2seq,
    model_of,
    plain_loss,
    predicted,
    relative_error,
    taken,
    tiny,
    without_labels,
)

EXPERTS = {
    "mixtral": ["aux"],
    "qwen3-moe": ["aux"],
    "switch": ["encoder_aux", "decoder_aux", "encoder_z", "decoder_z"],
}
"""Mixtures of experts, and the losses of their routers."""

EXACT = [name for name in MODELS if name not in ("bart-decoder", *EXPERTS)]


def plain(model, batch, smoothing=0.0):
    """Mean loss and gradients of the model's own logits."""
    return taken(model, plain_loss(model, batch, smoothing) / predicted(model, batch["labels"]))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("name", EXACT)
def test_value_and_every_gradient_are_those_of_the_models_own_logits(name, smoothing):
    model = model_of(name)
    batch = batch_of(model, [6, 3, 2, 1])
    expected = plain(model, batch, smoothing)
    with apply_seqpar_loss(model, label_smoothing=smoothing, chunk_tokens=4) as applied:
        outputs = model(**batch)
        assert_alike(taken(model, outputs.loss), expected)
    assert applied.readings.checked
    assert outputs.logits is None


@pytest.mark.parametrize("name", EXACT)
def test_the_gradient_is_that_of_the_stock_loss(name):
    model = model_of(name)
    batch = batch_of(model, [5, 2])
    stock = taken(model, model(**batch).loss.double())
    with apply_seqpar_loss(model):
        ours = taken(model, model(**batch).loss.double())
    # Decoder-only models of this package round float64 logits to float32 before their loss
    assert_alike(ours, stock, 1e-12 if is_seq2seq(model) else 1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("name", EXPERTS)
def test_a_routers_auxiliary_loss_is_added_with_its_gradient_as_the_model_adds_it(name, smoothing):
    model = tiny(name)
    batch = batch_of(model, [6, 4, 3])
    given = {"output_router_logits": True, "num_items_in_batch": 7}
    outputs = model(**batch, **given)
    labels = batch["labels"] if is_seq2seq(model) else F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    logits = outputs.logits.flatten(0, 1)
    loss = F.cross_entropy(logits, labels.flatten(), label_smoothing=smoothing, reduction="sum") / 7
    for part in EXPERTS[name]:
        loss = loss + outputs[f"{part}_loss"] * getattr(model, f"router_{part.split('_')[-1]}_loss_coef")
    expected = taken(model, loss)
    with apply_seqpar_loss(model, label_smoothing=smoothing, chunk_tokens=3):
        ours = taken(model, model(**batch, **given).loss)
    # The routers' probabilities are in float32 whatever the model's precision, and the sum of their losses is
    assert_alike(ours, expected, 1e-7, of_gradients=1e-12)


@settings(max_examples=30)
@given(
    st.sampled_from(["marian", "t5", "llama"]),
    st.lists(st.integers(1, 7), min_size=1, max_size=4),
    st.integers(1, 9),
    st.sampled_from([0.0, 0.2]),
    st.integers(0, 99),
)
def test_it_does_not_depend_on_lengths_padding_chunks_or_smoothing(name, lengths, chunk_tokens, smoothing, seed):
    model = model_of(name)
    batch = batch_of(model, [max(2, lengths[0]), *lengths[1:]], seed)
    expected = plain(model, batch, smoothing)
    with apply_seqpar_loss(model, label_smoothing=smoothing, chunk_tokens=chunk_tokens):
        for _ in range(2):  # the second call is not checked, and its window is another
            got = taken(model, model(**batch).loss)
    assert_alike(got, expected, of_gradients=2e-12)


@pytest.mark.parametrize("name", ["marian", "gpt2"])
def test_num_items_in_batch_is_what_the_sum_is_divided_by(name):
    model = model_of(name)
    batch = batch_of(model, [5, 3])
    total = plain_loss(model, batch).detach()
    with apply_seqpar_loss(model):
        for items in (17, torch.tensor(17)):
            torch.testing.assert_close(model(**batch, num_items_in_batch=items).loss, total / 17, rtol=1e-12, atol=0)


def test_a_batch_without_labels_to_predict_costs_nothing_and_is_not_nan():
    model = model_of("marian")
    batch = batch_of(model, [4])
    batch["labels"] = torch.full_like(batch["labels"], -100)
    with apply_seqpar_loss(model) as applied:
        loss, found = taken(model, model(**batch, decoder_input_ids=torch.full((1, 4), 5)).loss)
        assert applied.readings.checked  # by labels that are made up
    assert loss == 0
    assert not any(g.any() for g in found.values())


def test_shifted_labels_are_taken_as_they_are():
    """As a collator makes them that puts sentences one behind the other: the last of one does not predict the next."""
    model = model_of("llama")
    batch = batch_of(model, [6, 4])
    shifted = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:].clone()
    shifted[:, 2] = -100
    logits = model(batch["input_ids"], batch["attention_mask"]).logits
    expected = taken(model, F.cross_entropy(logits.flatten(0, 1), shifted.flatten()))
    with apply_seqpar_loss(model) as applied:
        assert_alike(taken(model, model(**batch, shift_labels=shifted).loss), expected)
    assert applied.readings.checked


def test_arguments_by_position_and_tuples_are_understood():
    model = model_of("marian")
    batch = batch_of(model, [4, 2])
    loss, _ = plain(model, batch)
    with apply_seqpar_loss(model):
        outputs = model(batch["input_ids"], batch["attention_mask"], labels=batch["labels"], return_dict=False)
    torch.testing.assert_close(outputs[0], loss, rtol=1e-12, atol=0)
    assert outputs[1] is None
    assert len(outputs) == len(model(**batch, return_dict=False, use_cache=False))


@pytest.mark.parametrize("name", ["marian", "gpt2"])
def test_evaluation_generation_and_calls_without_labels_are_untouched(name):
    model = copy.deepcopy(model_of(name))
    batch = batch_of(model, [5, 3])
    unlabelled, _ = without_labels(model, batch)

    def everything():
        with torch.no_grad():
            in_training = model(**batch)
        evaluated = model.eval()(**batch)
        generated = model.generate(batch["input_ids"], max_new_tokens=4, do_sample=False, pad_token_id=1)
        logits = model.train()(**unlabelled).logits
        return in_training.loss, in_training.logits, evaluated.loss, evaluated.logits, generated, logits

    before = everything()
    with apply_seqpar_loss(model):
        model(**batch).loss.backward()
        with pytest.warns(UserWarning, match="got no labels in a training forward, so it computes all logits"):
            during = everything()
    for a, b in zip(before, during, strict=True):
        assert torch.equal(a, b)


def test_remove_leaves_nothing_behind():
    model = copy.deepcopy(model_of("gpt2"))
    before = set(model.__dict__), set(model.lm_head.__dict__), model.loss_type
    applied = apply_seqpar_loss(model)
    model(**batch_of(model, [3]))
    assert model.accepts_loss_kwargs
    applied.remove()
    applied.remove()
    assert (set(model.__dict__), set(model.lm_head.__dict__), model.loss_type) == before
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not model.lm_head._forward_pre_hooks
    assert model(**batch_of(model, [3])).logits is not None
    apply_seqpar_loss(model).remove()


def copied_inside(model):
    return copy.deepcopy({"inside": [model]})["inside"][0]


def pickled(model):
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    return torch.load(stored, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, copied_inside])
@pytest.mark.parametrize("name", ["marian", "gpt2"])
def test_copies_and_pickles_are_the_model_without_the_loss(name, copied):
    model = copy.deepcopy(model_of(name))
    batch = batch_of(model, [4, 3])
    stock = set(vars(model)), set(vars(model.lm_head))
    seen = []
    model.lm_head.register_forward_hook(lambda *_: seen.append(1)) if copied is copy.deepcopy else None
    with apply_seqpar_loss(model):
        model(**batch)
        other = copied(model)
        assert (set(vars(other)), set(vars(other.lm_head))) == stock
        with torch.no_grad():
            other.lm_head.weight *= 2
        outputs = other(**batch)
        assert outputs.logits is not None
        assert model(**batch).logits is None
    assert facts_of(other) == facts_of(model_of(name))
    torch.testing.assert_close(outputs.loss, other(**batch).loss, rtol=0, atol=0)
    assert len(other.lm_head._forward_hooks) == (copied is copy.deepcopy)
    assert "__reduce_ex__" not in {**vars(model), **vars(model.lm_head)}


def test_two_models_that_share_output_embeddings_have_their_own_losses():
    models = [copy.deepcopy(model_of("llama")) for _ in range(2)]
    models[1].lm_head = models[0].lm_head
    with torch.no_grad():
        models[1].model.norm.weight.mul_(3)
    batches = [batch_of(model, [5, 3], seed) for seed, model in enumerate(models)]
    expected = [plain(model, batch)[0] for model, batch in zip(models, batches, strict=True)]
    with apply_seqpar_loss(models[0], chunk_tokens=3):
        with apply_seqpar_loss(models[1], chunk_tokens=2):
            got = [model(**batch).loss for model, batch in zip(models, batches, strict=True)]
        other = models[0](**batches[0])
        assert models[1](**batches[1]).logits is not None
        assert copy.deepcopy(models[0])(**batches[0]).logits is not None
    torch.testing.assert_close([*got, other.loss], [*expected, expected[0]], rtol=1e-12, atol=0)


def test_dropout_of_a_seed_and_checkpointed_layers_are_those_of_the_stock_loss():
    model = tiny("marian", dropout=0.3)
    model.activation_checkpointing_enable()
    batch, results = batch_of(model, [5, 3]), []
    applied = apply_seqpar_loss(model)
    for _ in range(2):
        torch.manual_seed(1)
        results.append(taken(model, model(**batch).loss)[1])
        applied.remove()
    assert relative_error(*results) < 1e-12


@pytest.mark.parametrize("name", ["marian", "llama"])
def test_in_a_checkpoint_around_the_model_the_first_call_is_as_the_others(name):
    model = model_of(name)
    batch = batch_of(model, [5, 3])
    expected = plain(model, batch)
    with apply_seqpar_loss(model):
        for _ in range(2):
            total = checkpoint(lambda: model(**batch).loss, use_reentrant=False)
            assert_alike(taken(model, total), expected)


def test_replicas_of_the_model_have_the_loss():
    model = model_of("marian")
    batch = batch_of(model, [5, 3])
    expected = plain(model, batch)
    with apply_seqpar_loss(model):
        total = 0
        for row, replica in enumerate(seqpar.replicate(model, ["cpu", "cpu"])):
            part = {key: value[row : row + 1] for key, value in batch.items()}
            outputs = replica(**part, num_items_in_batch=8)
            assert outputs.logits is None
            total = total + outputs.loss
        assert_alike(taken(model, total), expected)


def of_both_ranks(model, lengths=(5, 3)):
    """The loss of 10 items of each, and the mean over the ranks, which FSDP2 takes."""
    return sum(plain_loss(model, batch_of(model, [*lengths], seed=rank)) for rank in range(2)) / 20


def sharded(rank, world, name, applied_first):
    """The gradients of two steps of a `fully_shard` model on this rank's sentence."""
    model = tiny(name)
    if applied_first:
        apply_seqpar_loss(model)
    fully_shard(model)
    if not applied_first:
        apply_seqpar_loss(model)
    for _ in range(2):
        model.zero_grad()
        model(**batch_of(model, [5, 3], seed=rank), num_items_in_batch=10).loss.backward()
    return whole_gradients(model)


@pytest.mark.parametrize("applied_first", [True, False])
@pytest.mark.parametrize("name", ["marian", "llama"])
def test_under_fsdp2_the_gradient_is_that_of_both_ranks(name, applied_first):
    model = tiny(name)
    _, expected = taken(model, of_both_ranks(model))
    for got in ranks(2, sharded, name, applied_first):
        assert relative_error(got, expected) < 1e-12


def with_units(model, units, **policy):
    """The model with units as accelerate makes them ("tail"), or with its output embeddings as one of their own."""
    for layer in model.model.layers:
        fully_shard(layer, **policy)
    if units == "tail":
        tail = [model.model.norm, model.lm_head]
        if model.lm_head.weight is model.model.embed_tokens.weight:
            tail.append(model.model.embed_tokens)
        fully_shard(tail, reshard_after_forward=False, **policy)
    if units == "head":
        fully_shard(model.lm_head, reshard_after_forward=True, **policy)
    return fully_shard(model, **policy)


def two_steps(model, ranks, items):
    """The parameters after two steps of two micro-batches, which have other numbers of tokens on every rank."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(2):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(micro == 1)
            for rank in ranks:
                batch = batch_of(model, [5 - rank, 3 + micro], seed=10 * step + 2 * micro + rank)
                # The mean over the ranks, which FSDP2 takes, of sums
                loss_of(model, batch, items).backward()
        optimizer.step()
    return {name: whole(p).detach() for name, p in model.named_parameters()}


def loss_of(model, batch, items):
    if model.lm_head._forward_pre_hooks:
        return model(**batch, num_items_in_batch=items).loss
    return plain_loss(model, batch) / items


def trained_in_units(rank, world, name, units):
    model = tiny(name)
    apply_seqpar_loss(model, chunk_tokens=3)
    return two_steps(with_units(model, units), [rank], 10)


@pytest.mark.parametrize(("name", "units"), [("llama", "tail"), ("llama-tied", "tail"), ("llama", "head")])
def test_under_fsdp2_output_embeddings_in_a_unit_below_the_model_are_trained_as_on_one_device(name, units):
    expected = two_steps(tiny(name), [0, 1], 20)
    for got in ranks(2, trained_in_units, name, units):
        assert relative_error(got, expected) < 1e-12


def in_bfloat16(rank, world, ours):
    """The gradients of a model whose units compute in bfloat16 and round what they return, as accelerate sets them."""
    model = tiny("gemma2", torch.float32)
    if ours:
        apply_seqpar_loss(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.bfloat16)
    with_units(model, "tail", mp_policy=policy)(**batch_of(model, [5, 3])).loss.backward()
    return whole_gradients(model)


def test_under_fsdp2_units_that_round_logits_to_bfloat16_do_not_make_another_model_of_it():
    model = tiny("gemma2", torch.float32)
    _, expected = plain(model, batch_of(model, [5, 3]))
    ours, stock = (relative_error(ranks(2, in_bfloat16, way)[0], expected) for way in (True, False))
    assert ours <= 2 * stock


def with_other_arguments(rank, world):
    """The gradients of three steps of a `fully_shard` model, of which the second has a mask on one rank only."""
    model = tiny("llama")
    apply_seqpar_loss(model)
    with_units(model, "tail")
    for step in range(3):
        batch = batch_of(model, [5, 5], seed=rank)
        if (rank, step) != (0, 1):
            del batch["attention_mask"]
        model.zero_grad()
        model(**batch, num_items_in_batch=10).loss.backward()
    return whole_gradients(model)


def test_under_fsdp2_a_rank_with_other_arguments_does_not_hang_the_others():
    model = tiny("llama")
    _, expected = taken(model, of_both_ranks(model, (5, 5)))
    for got in ranks(2, with_other_arguments):
        assert relative_error(got, expected) < 1e-12


def with_a_routers_loss(rank, world):
    """The gradients of a `fully_shard` model, to whose loss the first rank alone adds that of its routers."""
    model = tiny("mixtral")
    apply_seqpar_loss(model)
    given = {"output_router_logits": rank == 0, "num_items_in_batch": 10}
    with_units(model, "tail")(**batch_of(model, [5, 3], seed=rank), **given).loss.backward()
    return whole_gradients(model)


def test_under_fsdp2_a_routers_loss_of_one_rank_is_reduced_once_and_does_not_hang_the_other():
    model = tiny("mixtral")
    outputs = model(**batch_of(model, [5, 3], seed=0), output_router_logits=True)
    _, expected = taken(model, of_both_ranks(model) + model.router_aux_loss_coef * outputs.aux_loss / 2)
    for got in ranks(2, with_a_routers_loss):
        assert relative_error(got, expected) < 1e-12


@pytest.mark.parametrize("name", ["marian", "t5", "llama", "gemma2"])
def test_under_autocast_the_loss_is_as_near_to_float64_as_the_stock_one(name):
    wide, model = model_of(name), copy.deepcopy(model_of(name)).float()
    batch = batch_of(wide, [6, 4])
    truth, _ = plain(wide, batch)
    with torch.autocast("cpu", torch.bfloat16):
        stock = model(**batch).loss
        with apply_seqpar_loss(model):
            ours = model(**batch).loss
            ours.backward()
    assert ours.dtype == torch.float32
    assert abs(ours - truth) <= 2 * abs(stock - truth) + 1e-2 * truth


def own_peaks(sentences):
    """This process's peaks above model and batch during one step at a vocabulary of 30,000: ours, the stock one."""
    torch.set_num_threads(1)
    model = tiny("marian", torch.float32, vocab_size=30_000, max_position_embeddings=64)
    batch, peaks = batch_of(model, [64] * sentences), []
    applied = apply_seqpar_loss(model, chunk_tokens=64)
    model(**batch_of(model, [2, 2])).loss.backward()
    for _ in range(2):
        peaks.append(peak_bytes(lambda: model(**batch).loss.backward()))
        applied.remove()
    return peaks


@pytest.mark.skipif(not can_measure_cpu(), reason="peaks are measured as Linux has them")
def test_a_training_step_takes_a_small_part_of_the_memory():
    ours, stock = apart(own_peaks, 8)
    logits = 8 * 64 * 30_000 * 4
    assert stock > 2 * logits
    assert ours < stock / 8, f"stock {stock / 2**20:.0f} MiB, ours {ours / 2**20:.0f} MiB"


@pytest.mark.parametrize("name", ["llama", "marian"])
def test_threads_that_share_a_model_have_their_own_losses(name):
    """Both are in the forward at the same time."""
    model = model_of(name)
    batches = [batch_of(model, [6, 4], seed) for seed in range(2)]
    alone = [plain(model, batch)[0] for batch in batches]
    both_inside = threading.Barrier(2)
    waiting = threading.Event()

    def wait(*_):
        if waiting.is_set():
            both_inside.wait(timeout=30)

    hook = model.get_input_embeddings().register_forward_pre_hook(wait)
    try:
        with apply_seqpar_loss(model), ThreadPoolExecutor(2) as pool:
            model(**batches[0])
            waiting.set()
            losses = list(pool.map(lambda batch: model(**batch).loss, batches))
    finally:
        hook.remove()
    torch.testing.assert_close(losses, alone, rtol=1e-12, atol=0)


def widened(model):
    model.lm_head.float()
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0].float(),))


CHANGED_INPUTS = {
    "float32 output embeddings": widened,
    "a factor of the hidden states": lambda model: model.lm_head.register_forward_pre_hook(
        lambda module, args: (1.5 * args[0],)
    ),
    "pruning": lambda model: prune.l1_unstructured(model.lm_head, "weight", amount=0.5),
    "spectral_norm": lambda model: torch.nn.utils.spectral_norm(model.lm_head),
}


@pytest.mark.parametrize("when", ["before", "after", "after a step"])
@pytest.mark.parametrize("change", CHANGED_INPUTS.values(), ids=CHANGED_INPUTS)
def test_a_hook_before_the_output_embeddings_counts_whenever_it_was_registered(change, when):
    model, stock = (copy.deepcopy(model_of("llama")) for _ in range(2))
    batch = batch_of(model, [6, 4])
    for changed in (model, stock):
        if changed is model and when != "before":
            apply_seqpar_loss(model)
        if changed is model and when == "after a step":
            model(**batch)
        torch.manual_seed(0)
        change(changed)
    if when == "before":
        apply_seqpar_loss(model)
    ours, theirs = (taken(changed, changed(**batch).loss.double()) for changed in (model, stock))
    # The stock loss is in float32
    assert_alike(ours, theirs, 1e-6)


def test_under_another_default_device_the_model_is_checked_where_it_is():
    """As with torch.set_default_device("cuda"): what is made up is made on the CPU, and moved."""
    model = copy.deepcopy(model_of("llama"))
    batch = batch_of(model, [6, 4])
    stock = model(**batch).loss
    with torch.device("meta"), apply_seqpar_loss(model):
        assert abs(model(**batch).loss - stock) <= 1e-6 * stock


class Rounded(torch.Tensor):
    """A weight that torch.nn.functional.linear is given in whole numbers, as torchao's classes for training."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is F.linear:
            args = (args[0], args[1].as_subclass(torch.Tensor).round(), *args[2:])
        return super().__torch_function__(function, types, args, kwargs or {})


def test_output_embeddings_whose_weight_computes_in_its_own_way_are_refused():
    model = copy.deepcopy(model_of("llama"))
    batch = batch_of(model, [6])
    weight = torch.nn.Parameter(model.lm_head.weight.detach().as_subclass(Rounded))
    applied = apply_seqpar_loss(model)
    model.lm_head.weight = weight
    with pytest.raises(TypeError, match=r"is a Rounded, a class with its own"):
        model(**batch)
    applied.remove()
    with pytest.raises(TypeError, match=r"the weight of LlamaForCausalLM's output embeddings is a Rounded"):
        apply_seqpar_loss(model)


@pytest.mark.parametrize("items", [None, 0, torch.tensor(0)])
def test_a_step_without_labels_has_loss_0_and_gradient_0_whatever_it_is_divided_by(items):
    model = model_of("llama")
    batch = batch_of(model, [5, 3])
    batch["labels"] = torch.full_like(batch["labels"], -100)
    with apply_seqpar_loss(model, label_smoothing=0.1):
        loss, found = taken(model, model(**batch, num_items_in_batch=items).loss)
    assert loss == 0
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in found.values())


@pytest.mark.filterwarnings("ignore")
def test_under_torch_compile_three_graphs_have_the_numbers_of_none_and_are_not_made_again_for_other_labels():
    """Two on torch 2.11."""
    torch._dynamo.reset()
    model = tiny("llama")
    counter = torch._dynamo.testing.CompileCounter()
    batches = [batch_of(model, lengths, seed) for seed, lengths in enumerate([[7, 5], [7, 3], [7, 6]])]
    with apply_seqpar_loss(model, label_smoothing=0.1, chunk_tokens=4):
        compiled = torch.compile(model, backend=counter, dynamic=False)
        made = []
        for batch in batches:
            found, of_graphs = (taken(model, way(**batch, num_items_in_batch=9).loss) for way in (model, compiled))
            assert_alike(of_graphs, found)
            made.append(counter.frame_count)
    graphs = 2 if torch.__version__.startswith("2.11.") else 3
    assert made == [graphs] * 3


@pytest.mark.filterwarnings("ignore")
def test_under_torch_compile_the_whole_model_as_one_graph_is_refused_with_the_reason():
    torch._dynamo.reset()
    model = tiny("llama")
    with apply_seqpar_loss(model), pytest.raises(torch._dynamo.exc.Unsupported, match="leave out fullgraph=True"):
        torch.compile(model, backend="eager", fullgraph=True)(**batch_of(model, [7, 5]))
