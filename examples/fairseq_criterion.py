"""fairseq: its label-smoothed cross-entropy as a criterion that never has the logits of all tokens.

Run it with `python examples/fairseq_criterion.py`.

docs/from-fairseq.md registers it. Below it trains a small model with fairseq's interface, as fairseq's trainer would.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: waiting threads leave a busy CPU alone

from types import SimpleNamespace

import torch
from torch import nn

import seqpar

PROJECTIONS = ("output_projection", "fc_out", "fc3")  # of transformers, of `lstm` and of `fconv`


class ChunkedCrossEntropy(nn.Module):
    """(model, sample) -> summed loss, sample size, numbers for the log: what fairseq asks of a criterion."""

    def __init__(self, padding_idx, label_smoothing=0.0, *, sentence_avg=False, ignore_prefix_size=0):
        super().__init__()
        self.padding_idx, self.eps, self.sentence_avg = padding_idx, label_smoothing, sentence_avg
        self.prefix = ignore_prefix_size
        self.is_checked = False

    def forward(self, model, sample, reduce=True):
        if not reduce:
            raise ValueError("reduce=False asks for the loss of every token; use seqpar.token_scores for that")
        if not self.is_checked:
            self.check(model, sample)
            self.is_checked = True
        total, loss = self.loss(model, sample)
        sentences = sample["target"].size(0)
        size = sentences if self.sentence_avg else sample["ntokens"]
        logged = {"loss": total.detach(), "nll_loss": loss.nll, "n_correct": loss.correct, "total": loss.tokens}
        return total, size, logged | {"ntokens": sample["ntokens"], "nsentences": sentences, "sample_size": size}

    def loss(self, model, sample):
        """Run the model with the loss in the place of its projection, inside any wrapper, such as DDP."""
        projection = next((p for name in PROJECTIONS if (p := getattr(model.decoder, name, None)) is not None), None)
        if type(projection) is not nn.Linear or "forward" in vars(
            projection
        ):  # an adaptive softmax, or a weight without a module
            raise TypeError(f"{type(model.decoder).__name__} has no nn.Linear called {', '.join(PROJECTIONS)}")
        losses = []

        def loss_as_scores(features):
            hidden, target = features[:, self.prefix :], sample["target"][:, self.prefix :]
            how = {"ignore_index": self.padding_idx, "label_smoothing": self.eps, "smoothing_convention": "fairseq"}
            losses.append(seqpar.linear_cross_entropy(hidden, projection.weight, target, bias=projection.bias, **how))
            return losses[-1].total.reshape(1, 1, 1)  # as the model's scores: DDP finds the parameters in its output

        projection.forward = loss_as_scores
        try:
            total = model(**sample["net_input"])[0].reshape(())
        finally:
            del projection.forward
        return total, losses[-1]

    @torch.no_grad()
    def check(self, model, sample):
        """Compare with fairseq's formula on two sentences: a model may mask, scale or mix its scores."""
        inputs = {name: given[:2] for name, given in sample["net_input"].items()}
        few = sample | {"net_input": inputs, "target": sample["target"][:2]}
        with torch.random.fork_rng():
            seed = torch.initial_seed()
            torch.manual_seed(seed)
            output = model(**inputs)
            log_probs = model.get_normalized_probs(output, log_probs=True)[:, self.prefix :].double()
            torch.manual_seed(seed)  # the same dropout
            total, _ = self.loss(model, few)
        target = model.get_targets(few, output)[:, self.prefix :, None]
        kept = target[..., 0] != self.padding_idx
        each = self.eps / (log_probs.size(-1) - 1)  # of every class but the target
        gold = log_probs.gather(-1, target)[..., 0][kept].sum()
        plain = -(1 - self.eps - each) * gold - each * log_probs.sum(-1)[kept].sum()
        rtol = 1e-5 if output[0].dtype.itemsize > 2 else 1e-2  # what the scores are rounded to
        if not torch.isclose(total.double(), plain, rtol=rtol, equal_nan=True):
            name = type(model).__name__
            raise TypeError(f"{name}: {total:.6g} where fairseq's loss is {plain:.6g}; use fairseq's own criterion")


class FairseqModel(nn.Module):
    """The interface of fairseq's models."""

    def __init__(self, vocab_size=200, width=64):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.projection = nn.Linear(width, vocab_size, bias=False)
        self.decoder = SimpleNamespace(output_projection=self.projection)

    def forward(self, src_tokens, src_lengths, prev_output_tokens):
        hidden = torch.tanh(self.embed(prev_output_tokens) + self.embed(src_tokens).mean(1, keepdim=True))
        return self.projection(hidden), {"attn": [None]}

    def get_normalized_probs(self, net_output, log_probs):
        return net_output[0].log_softmax(-1)

    def get_targets(self, sample, net_output):
        return sample["target"]


if __name__ == "__main__":
    torch.manual_seed(0)
    model, criterion = FairseqModel(), ChunkedCrossEntropy(padding_idx=0, label_smoothing=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(31):
        source = torch.randint(1, 200, (8, 12))
        inputs = {"src_tokens": source, "src_lengths": torch.full((8,), 12), "prev_output_tokens": source}
        loss, size, _ = criterion(model, {"net_input": inputs, "target": source, "ntokens": source.numel()})
        (loss / size).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step:2}  loss {loss / size:.3f}")
