"""The stock Seq2SeqTrainer: with the chunked loss its gradient is the whole batch's on one device; alone it is not."""

import pytest
import torch
from transformers.modeling_outputs import Seq2SeqLMOutput

from seqpar.integrations.transformers import apply_seqpar_loss, compute_loss_func
from seqpar.testing.ranks import Pool
from tests.seqpar.integrations.tiny_models import batch_of, gradients, plain_loss, predicted, relative_error, tiny
from tests.seqpar.integrations.trainer_runs import BATCH, Run, collated, sentences, trained

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def two_ranks():
    """Of their own, because a Trainer leaves state behind in its process."""
    pool = Pool(2)
    yield pool
    pool.close()


def whole_batch(run, world):
    """The gradient of all sentences of all micro-batches and ranks as one batch on one device."""
    model = run.tiny
    batch = collated(model, sentences(model, world * run.accumulation * BATCH, run.ranks))
    (plain_loss(model, batch, run.smoothing) / predicted(model, batch["labels"])).backward()
    return gradients(model)


@pytest.mark.parametrize("way", ["applied", "function"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_gradient_is_that_of_the_whole_batch(accumulation, smoothing, way):
    run = Run("marian", accumulation, smoothing, way)
    assert relative_error(trained(0, 1, run), whole_batch(run, 1)) < 1e-12


@pytest.mark.parametrize("way", ["applied", "function"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_gradient_of_two_ranks_is_that_of_the_whole_batch(two_ranks, accumulation, smoothing, way):
    run = Run("marian", accumulation, smoothing, way)
    expected = whole_batch(run, 2)
    for got in two_ranks.call(trained, run):
        assert relative_error(got, expected) < 1e-12


@pytest.mark.parametrize("way", ["applied", "function"])
def test_output_embeddings_of_their_own_are_reduced_once_over_two_ranks(two_ranks, way):
    run = Run("llama", 2, 0.0, way)
    expected = whole_batch(run, 2)
    for got in two_ranks.call(trained, run):
        assert relative_error(got, expected) < 1e-12


@pytest.mark.parametrize(("name", "way"), [("llama", "applied"), ("llama-tied", "function"), ("gpt2", "applied")])
def test_under_fsdp2_as_accelerate_wraps_it_the_gradient_is_that_of_the_whole_batch(two_ranks, name, way):
    run = Run(name, 2, 0.1, way, "fsdp2")
    expected = whole_batch(run, 2)
    for got in two_ranks.call(trained, run):
        assert relative_error(got, expected) < 1e-12


@pytest.mark.hf_models
def test_under_fsdp2_four_ranks_of_which_one_has_no_labels_have_the_gradient_of_the_whole_batch():
    run = Run("llama", 2, 0.1, "applied", "fsdp2", ranks=4)
    expected = whole_batch(run, 4)
    pool = Pool(4)
    try:
        results = pool.call(trained, run)
    finally:
        pool.close()
    for got in results:
        assert relative_error(got, expected) < 1e-12


def test_loaded_with_fsdp2_by_transformers_the_gradient_is_that_of_the_whole_batch(two_ranks, tmp_path):
    run = Run("llama", 2, 0.1, "applied", "loaded-fsdp2", str(tmp_path))
    run.tiny.save_pretrained(tmp_path)
    expected = whole_batch(run, 2)
    for got in two_ranks.call(trained, run):
        assert relative_error(got, expected) < 1e-12


@pytest.mark.parametrize(("name", "way"), [("llama", "applied"), ("llama-tied", "function")])
def test_with_output_embeddings_that_a_tensor_parallel_plan_splits_the_gradient_is_that_of_one_device(
    two_ranks, tmp_path, name, way
):
    run = Run(name, 2, 0.1, way, "split", str(tmp_path))
    run.tiny.save_pretrained(tmp_path)
    expected = whole_batch(run, 1)
    for got in two_ranks.call(trained, run):
        assert relative_error(got, expected) < 1e-12


@pytest.mark.parametrize("way", ["applied", "function"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_decoder_only_model_is_divided_by_the_labels_it_predicts(name, way):
    run = Run(name, 4, 0.0, way)
    assert relative_error(trained(0, 1, run), whole_batch(run, 1)) < 1e-12


def test_stock_the_gradient_is_too_large_by_the_accumulation_steps():
    """Seen with 5.23 and 5.24: Marian takes the Trainer's divisor as an argument and ignores it."""
    run = Run("marian", 4, 0.0, "stock")
    got, expected = trained(0, 1, run), whole_batch(run, 1)
    name = "model.shared.weight"
    factor = ((got[name] * expected[name]).sum() / expected[name].square().sum()).item()
    assert 3.2 < factor < 4.8  # the accumulation steps, as near as a mean of means comes
    assert relative_error(got, expected) > 1


def test_stock_the_gradient_is_too_large_by_the_world_size_as_well(two_ranks):
    run = Run("marian", 2, 0.0, "stock")
    got, expected = two_ranks.call(trained, run)[0], whole_batch(run, 2)
    name = "model.shared.weight"
    factor = ((got[name] * expected[name]).sum() / expected[name].square().sum()).item()
    assert 3.2 < factor < 4.8  # 2 steps x 2 ranks


def test_stock_label_smoothing_is_exact_and_makes_all_logits():
    """The Trainer's own smoother divides by the tokens of the step."""
    run = Run("marian", 4, 0.1, "stock")
    assert relative_error(trained(0, 1, run), whole_batch(run, 1)) < 1e-6


def test_where_the_trainer_smooths_labels_itself_one_warning_says_that_it_makes_all_logits():
    run = Run("marian", 4, 0.1, "both")
    with pytest.warns(UserWarning, match=r"^MarianMTModel got no labels .* leave the first at 0") as warned:
        got = trained(0, 1, run)
    assert len([each for each in warned if "got no labels" in str(each.message)]) == 1
    assert relative_error(got, whole_batch(run, 1)) < 1e-6


def test_without_the_labels_there_are_hidden_states_and_no_logits_only_once_the_function_is_asked_for():
    model = tiny("marian")
    batch = batch_of(model, [5, 3])
    labels = batch.pop("labels")
    batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
    with apply_seqpar_loss(model, label_smoothing=0.1) as applied:
        assert model(**batch).logits.shape == (2, 5, 37)
        function = compute_loss_func(applied)
        outputs = model(**batch)
        assert (outputs.logits, outputs.hidden_for_loss.shape) == (None, (2, 5, 16))
        assert isinstance(outputs, Seq2SeqLMOutput)
        in_a_tuple = function(model(**batch, return_dict=False), labels, 7)
        in_training = function(model(**batch), labels, 7)
        model.eval()
        with torch.no_grad():
            outputs = model(**batch)
        assert outputs.logits.shape == (2, 5, 37)
        in_evaluation = function(outputs, labels, num_items_in_batch=7)
    model.train()
    expected = plain_loss(model, batch | {"labels": labels}, 0.1) / 7
    torch.testing.assert_close(in_training, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(in_a_tuple, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(in_evaluation, expected.detach(), rtol=1e-12, atol=0)


def test_with_another_forward_in_between_the_loss_function_refuses_the_outputs():
    model = tiny("marian")
    batch = batch_of(model, [5, 3])
    labels = batch.pop("labels")
    batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
    with apply_seqpar_loss(model) as applied:
        function = compute_loss_func(applied)
        trained = model(**batch)
        with torch.no_grad():
            evaluated = model.eval()(**batch)
        with pytest.raises(RuntimeError, match=r"not those of the latest forward of MarianMTModel: compute"):
            function(trained, labels)
        model.train()(**batch)
        with pytest.raises(RuntimeError, match=r"not those of the latest forward of MarianMTModel: compute"):
            function(evaluated, labels)


def test_a_batch_without_labels_and_decoder_inputs_is_refused():
    model = tiny("marian")
    with apply_seqpar_loss(model) as applied:
        compute_loss_func(applied)
        with pytest.raises(ValueError, match="neither labels nor decoder_input_ids"):
            model(batch_of(model, [3])["input_ids"])
