"""What `python -m benchmarks.training` calls ours is the recipe's own step, with the plain loss."""

import math

from benchmarks.seq2seq_peers import SIZES, Ours, batches, check_loss


def test_the_loss_is_the_plain_one_of_the_same_logits() -> None:
    assert check_loss("d128") < 1e-12


def test_a_step_changes_every_weight() -> None:
    config, vocab_size = SIZES["d128"]
    ours = Ours(config, vocab_size, "float32")
    before = {name: weight.detach().clone() for name, weight in ours.model.named_parameters()}
    assert math.isfinite(ours.step(next(batches(vocab_size, 300, "similar"))))
    assert not [name for name, weight in ours.model.named_parameters() if weight.equal(before[name])]
