"""Teachers of every kind for a `LinearCase`, and the plain divergence on all rows at once."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

import seqpar
from tests.seqpar.linear.linear_loss import LinearCase, linear_cases, plain_logits

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "total_variation")
KINDS = ("hidden", "log_probs", "renormalize", "one_class")
OPTIONS = ("ignore_index", "temperature", "loss_scale", "chunk_tokens")


@dataclass(frozen=True)
class Distillation:
    """One distillation to compute; `case` is the student's."""

    case: LinearCase
    divergence: str
    beta: float | None
    kind: str
    width: int
    k: int
    filled: bool
    """Whether some rows have fewer than k classes."""

    @property
    def options(self) -> dict:
        """The keywords of `linear_distillation` that are no tensors."""
        given = {name: self.case.options[name] for name in OPTIONS}
        return given | {"divergence": self.divergence, "beta": self.beta}

    def student(self) -> dict[str, Tensor]:
        """hidden, weight, bias, token_weight and target."""
        return {name: t for name, t in self.case.tensors().items() if name != "class_weight"}

    def made(self) -> dict[str, Tensor]:
        """The teacher's hidden, weight and bias; log_q of every row (N, V); ids (N, k), -1 where a row is filled up."""
        case = self.case
        random = torch.Generator().manual_seed(case.seed + 1)
        shapes = {"hidden": (*case.lead, self.width), "weight": (case.vocab_size, self.width)}
        shapes |= {"bias": (case.vocab_size,)} if case.bias else {}
        made = {n: torch.randn(s, dtype=torch.float64, generator=random) / 2 for n, s in shapes.items()}
        logits = F.linear(made["hidden"].flatten(0, -2), made["weight"], made.get("bias"))
        log_q = (logits / case.temperature).log_softmax(-1)
        ids = torch.rand(log_q.shape, generator=random).argsort(-1)[:, : self.k]
        if self.filled:
            more = torch.rand(ids.shape, generator=random) < 0.4
            more[torch.arange(len(ids)), torch.randint(self.k, (len(ids),), generator=random)] = False
            ids = ids.masked_fill(more, -1)
        return made | {"log_q": log_q, "ids": ids}

    def teacher(self, start: int = 0, classes: int | None = None):
        """The teacher, whose projection has these classes alone."""
        made = self.made()
        end = self.case.vocab_size if classes is None else start + classes
        if self.kind == "hidden":
            bias = made["bias"][start:end] if "bias" in made else None
            return seqpar.TeacherHidden(made["hidden"], made["weight"][start:end], bias)
        if self.kind == "log_probs":
            return seqpar.TeacherLogProbs(lambda rows: made["log_q"][rows, start:end])
        ids = made["ids"].reshape(*self.case.lead, self.k)
        given = made["log_q"].gather(1, made["ids"].clamp(min=0)).masked_fill(made["ids"] < 0, 0.5)
        return seqpar.TeacherTopK(ids, given.reshape(ids.shape), self.kind)

    def plain(self, student: dict[str, Tensor]) -> Tensor:
        """The summed divergence of the rows that count."""
        made = self.made()
        logits = plain_logits(student["hidden"], student["weight"], student.get("bias"), None, self.case.temperature)
        log_p = logits.log_softmax(-1)
        log_q = made["log_q"]
        if self.kind in ("renormalize", "one_class"):
            log_p, log_q = on_few_classes(log_p, log_q, made["ids"], self.kind)
        rows = plain_rows(log_p, log_q, self.divergence, self.beta)
        if "token_weight" in student:
            rows = rows * student["token_weight"].flatten()
        return (rows * (student["target"].flatten() != self.case.padding)).sum()


def on_few_classes(log_p: Tensor, log_q: Tensor, ids: Tensor, rest: str) -> tuple[Tensor, Tensor]:
    """Both distributions on the given classes, and on the others as one more class if there are any.

    In every other place both are 0, which adds nothing to any divergence.
    """
    given = torch.zeros(len(log_p), log_p.size(1) + 1, dtype=torch.bool)
    given = given.scatter(1, ids.where(ids >= 0, log_p.size(1)), True)[:, :-1]
    if rest == "renormalize":
        of_given = [log.masked_fill(~given, -torch.inf).log_softmax(-1) for log in (log_p, log_q)]
        return tuple(log.where(given, 0.0) for log in of_given)
    others = ~given.all(-1, keepdim=True)
    p_rest = log_p.masked_fill(given & others, -torch.inf).logsumexp(-1, keepdim=True)
    q_rest = (1 - log_q.exp().where(given & others, 0.0).sum(-1, keepdim=True)).log()
    return tuple(
        torch.cat([log.where(given, 0.0), of_rest.where(others, 0.0)], 1)
        for log, of_rest in ((log_p, p_rest), (log_q, q_rest))
    )


def plain_rows(log_p: Tensor, log_q: Tensor, divergence: str, beta: float | None) -> Tensor:
    """The divergence of each row by torch's own `kl_div`."""
    p, q = log_p.exp(), log_q.exp()
    if divergence == "forward_kl":
        return F.kl_div(log_p, log_q, log_target=True, reduction="none").sum(-1)
    if divergence == "reverse_kl":
        return F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    if divergence == "total_variation":
        return (p - q).abs().sum(-1) / 2
    log_m = (beta * q + (1 - beta) * p).log()
    to_teacher = F.kl_div(log_m, log_q, log_target=True, reduction="none").sum(-1)
    return beta * to_teacher + (1 - beta) * F.kl_div(log_m, log_p, log_target=True, reduction="none").sum(-1)


@st.composite
def distillations(draw: st.DrawFn) -> Distillation:
    """Every divergence with every kind of teacher."""
    case = draw(linear_cases())
    # Where teacher and student nearly agree, a divergence is what rounding leaves of terms as large as this factor
    case = replace(case, upstream=min(case.upstream, 1.0))
    divergence = draw(st.sampled_from(DIVERGENCES))
    return Distillation(
        case=case,
        divergence=divergence,
        beta=draw(st.sampled_from([0.1, 0.5, 0.9])) if divergence == "jsd" else None,
        kind=draw(st.sampled_from(KINDS)),
        width=draw(st.integers(1, 5)),
        k=draw(st.integers(1, case.vocab_size)),
        filled=draw(st.booleans()),
    )
