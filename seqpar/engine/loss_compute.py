"""Compute generator and criterion over any device list, in chunks, with the gradient of the single-device loss.

`LossCompute` checks its settings and calls either `loss_over_devices` or, for a split vocabulary and under
`torch.compile`, `linear_loss`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from seqpar.core.checks import check_loss_scale, check_module, check_size, kind_of, refuse_transforms
from seqpar.core.device_sum import sum_on_first
from seqpar.core.graphs import outside_graphs
from seqpar.core.structures import slot_names
from seqpar.core.token_loss import TokenLoss
from seqpar.distributed.torch_private import is_fsdp_unit
from seqpar.distributed.vocab_parallel import VocabShard
from seqpar.distributed.wrappers import inside_unit, refuse_data_parallel, refuse_sharded
from seqpar.engine.device_losses import Cut, loss_over_devices
from seqpar.engine.explanation import LatestCall, explanation
from seqpar.engine.formula_match import Asked, FormulaMatch, linear_loss, match_formula, match_split
from seqpar.engine.pair import takers_of
from seqpar.engine.scores import over_devices
from seqpar.engine.shards import OneOrScattered
from seqpar.engine.situation import LogitFacts, Situation
from seqpar.linear.projection import product_dtype
from seqpar.linear.scored_loss import scored_loss
from seqpar.linear.token_scores import TokenScores, token_scores
from seqpar.multi_device.devices import Device, check_devices, refuse_capturing
from seqpar.multi_device.replicas import check_replicable, gather, needs_no_replica, refuse_scripted
from seqpar.multi_device.sent_weights import send
from seqpar.rows.criteria import LabelSmoothing


class LossCompute(nn.Module):
    """Compute the summed `criterion(generator(hidden), target)` while only one chunk's logits exist at a time.

    Plain equivalent: `criterion(generator(hidden).flatten(0, -2), target.flatten())`. The pattern is that of
    `MultiGPULossCompute` in The Annotated Transformer (Harvard NLP, 2018), with the exact gradient.

    For an `nn.Linear` with `seqpar.CrossEntropy`, `seqpar.LabelSmoothing` or `nn.CrossEntropyLoss` the gradient is
    computed in closed form, as in `linear_cross_entropy`; for any other pair by autograd, chunk by chunk. `explain()`
    says which.

    Args:
        generator: any module that maps hidden states `(..., D)` to scores `(..., V)` with the same number of
            dimensions, where the scores of a token depend on that token alone.
        criterion: any module that returns a sum; `seqpar.rows.criteria` lists the requirements.
        devices: the devices that hold a replica of both and share the rows; None means hidden's device.
        chunk_tokens: the most tokens whose logits may exist on a device at once; None chooses by bytes.
        chunk_size: an alternative to chunk_tokens, in time steps of the whole batch, as in 2018; hidden must be
            `(B, T, D)`.
        vocab: which classes the generator's rows are, if the vocabulary is split over ranks, as in
            `linear_cross_entropy`; needs a pair with a closed form, and no device list.

    Raises:
        TypeError, ValueError: an invalid device list or chunk size; a generator or criterion that is not a module, or
            a pair without a closed form although `vocab` is given.
        ValueError: a criterion whose `reduction` is not "sum".

    Example:
        >>> generator = nn.Linear(8, 50)
        >>> engine = seqpar.LossCompute(generator, seqpar.CrossEntropy(), devices=["cpu", "cpu"], chunk_tokens=4)
        >>> hidden, target = torch.randn(2, 6, 8, requires_grad=True), torch.randint(50, (2, 6))
        >>> loss = engine(hidden, target)
        >>> (loss.total / loss.tokens).backward()
        >>> torch.allclose(loss.mean, F.cross_entropy(generator(hidden).flatten(0, 1), target.flatten()))
        True
    """

    def __init__(
        self,
        generator: nn.Module,
        criterion: nn.Module,
        devices: Sequence[Device] | None = None,
        chunk_tokens: int | None = None,
        chunk_size: int | None = None,
        vocab: VocabShard | None = None,
    ) -> None:
        super().__init__()
        _check_modules(generator, criterion)
        _check_sizes(chunk_tokens, chunk_size)
        self.head = nn.ModuleDict({"generator": generator, "criterion": criterion})
        self.devices: tuple[torch.device, ...] | None = None
        if devices is not None:
            self.devices = check_devices(devices)
        self.chunk_tokens = chunk_tokens
        self.chunk_size = chunk_size
        self.vocab = vocab
        if vocab is not None:
            match_split(self.head)
            _check_split(devices, chunk_size)
        self._facts: dict[Situation, LogitFacts] = {}
        self._formulas: dict[Asked, bool] = {}
        self._latest: LatestCall | None = None

    def forward(
        self,
        hidden: Tensor | Sequence[Tensor],
        target: Tensor | Sequence[Tensor],
        *,
        loss_scale: float | Tensor = 1.0,
        **per_token: OneOrScattered | None,
    ) -> TokenLoss:
        """Return the summed loss of all tokens.

        Args:
            hidden: `(N, D)` or `(B, T, D)`; or, if already scattered, a list of such tensors, one per device.
            target: int64 of hidden's leading shape, or a list of them like hidden's.
            loss_scale: the factor that `total` will be multiplied by before `backward`, for float16:
                `scaler.get_scale() / tokens` with a GradScaler. Gradients are stored multiplied by it and divided by it
                in backward; any factor gives the right gradient, unless it makes them overflow their dtype.
            per_token: further tensors that the generator's or the criterion's `forward` takes as keywords (copy
                attention; weights). Their first dimensions are target's shape; for a (B, T) batch they may also hold
                one number per sentence, (B,). They are scattered and chunked like hidden, and get a gradient if they
                require one. A None is not passed on.

        Returns:
            `TokenLoss` on the first device. `(loss.total / tokens_of_the_step).backward()` is the one backward.

        Raises:
            TypeError, ValueError: an argument that is not a dense tensor, or has a wrong dtype or shape; a keyword that
                neither generator nor criterion takes; class weights for a different number of classes; a `loss_scale`
                of 0, nan or inf.
            ValueError: on the first call, a generator that mixes rows, or a criterion that is not a sum over rows
                (`seqpar.engine.probe` explains what the call detects).
            IndexError: a target outside [0, V) that is not ignored (with value and position).
            RuntimeError: the generator's parameters are sharded and FSDP2 has not unsharded them; in `backward`, a
                criterion that returned a detached number, a generator that ran under `torch.no_grad`, or, if the loss
                is computed again there (`explain()` says whether it is), a tensor that has changed since forward.
        """
        refuse_transforms(hidden if isinstance(hidden, (list, tuple)) else (hidden,))
        check_loss_scale(loss_scale)
        _check_reduction(self.head["criterion"])
        if self.vocab is not None:
            refuse_sharded(self.head)
            match = match_split(self.head, per_token)
            return self._remember(linear_loss(match, hidden, target, loss_scale, self.chunk_tokens, self.vocab), hidden)
        # A graph of torch.compile cannot contain chunks, but it can contain linear_cross_entropy as a single operator
        if torch.compiler.is_compiling() and self._on_one_device(hidden) and not per_token:
            # Not by attribute access, which in torch.export wraps modules that occur twice in proxies of other classes
            modules = vars(vars(self)["_modules"]["head"])["_modules"]
            compiled_match = match_formula(modules["generator"], modules["criterion"])
            if isinstance(compiled_match, FormulaMatch):
                return linear_loss(compiled_match, hidden, target, loss_scale, self.chunk_tokens)
        if torch.compiler.is_compiling():
            return _between_graphs(self, hidden, target, loss_scale=loss_scale, **per_token)
        # FSDP2 gathers a unit's weights only around the unit's own forward
        cut = Cut(self.devices, self.chunk_tokens, self.chunk_size)
        known = (self.head, cut, self._facts, self._formulas)
        if not is_fsdp_unit(self.head["generator"]):
            return self._remember(loss_over_devices(*known, hidden, target, loss_scale, per_token), hidden)

        def compute(hidden: OneOrScattered, **cast: OneOrScattered) -> TokenLoss:
            return loss_over_devices(*known, hidden, target, loss_scale, {**per_token, **cast})

        of_generator, _ = takers_of(self.head, [name for name, value in per_token.items() if value is not None])
        given = {name: per_token[name] for name in of_generator}
        return self._remember(inside_unit(self.head["generator"], compute, hidden, **given), hidden)

    def _on_one_device(self, hidden: Tensor | Sequence[Tensor]) -> bool:
        """Return whether hidden stays on its device and is cut by tokens."""
        if self.chunk_size is not None or not isinstance(hidden, Tensor):
            return False
        return self.devices is None or self.devices == (hidden.device,)

    def _remember(self, loss: TokenLoss, hidden: Tensor | Sequence[Tensor]) -> TokenLoss:
        """Remember a call for `explain`, and return its loss."""
        if not isinstance(hidden, Tensor):
            hidden = hidden[0]
        self._latest = LatestCall(loss.tokens, product_dtype(hidden))
        return loss

    def prefetch(self) -> None:
        """Start to send generator and criterion to the other devices, on separate streams, and return at once.

        Call it before the model computes hidden states, so that the weights arrive in the meantime:

            engine.prefetch()
            loss = engine(model(src), target)      # model: a seqpar.DataParallel, whose outputs stay where they are

        The results are the same without it. A weight that `seqpar.DataParallel` sends as well, such as an embedding
        tied to the generator, is sent once for both. A weight that changes in place before the loss is called is sent
        again by that call, unless it was changed through `.data`, which torch does not count. With one device, or
        without a device list, there is nothing to send.

        Raises:
            TypeError: a module that cannot be replicated. RuntimeError: a CUDA graph is being captured.
        """
        if self.devices is None or needs_no_replica(self.head.parameters(), self.devices):
            return
        refuse_capturing(self.devices)
        check_replicable(self.head)
        send(self.head.parameters(), self.devices)

    @outside_graphs
    def token_scores(
        self,
        hidden: OneOrScattered,
        target: OneOrScattered,
        *,
        temperature: float | Tensor = 1.0,
        ids: Tensor | None = None,
        **options: Any,
    ) -> TokenScores:
        """Return `seqpar.token_scores` under the generator's projection, over the same devices as the loss.

        Args:
            hidden, target: as for the loss; the criterion determines which targets are ignored.
            temperature, ids: as in `seqpar.token_scores`; per-token values are scattered with hidden.
            options: entropy, top_k, rank, softcap, product_dtype, batch_invariant, chunk_tokens, as in
                `seqpar.token_scores`.

        Returns:
            `TokenScores` on the first device, in the order of the batch.

        Raises:
            TypeError: a pair without a closed form (`explain()` says why).
            TypeError, ValueError, IndexError, RuntimeError: as in `seqpar.token_scores`.
        """
        found: list[TokenScores] = self._over_devices(token_scores, hidden, target, temperature, ids, {}, options)
        return gather(found, found[0].log_prob.device)  # type: ignore[no-any-return]

    @outside_graphs
    def scored_loss(
        self,
        hidden: OneOrScattered,
        target: OneOrScattered,
        loss: Callable[..., Tensor],
        *,
        temperature: float | Tensor = 1.0,
        ids: Tensor | None = None,
        entropy: bool = False,
        softcap: float | None = None,
        loss_scale: float | Tensor = 1.0,
        **per_token: OneOrScattered | None,
    ) -> TokenLoss:
        """Return `seqpar.scored_loss` under the generator's projection, over the same devices as the loss.

        Args:
            hidden, target: as for the loss; the criterion determines which targets are ignored.
            loss, temperature, ids, entropy, softcap, loss_scale, per_token: as in `seqpar.scored_loss`; per-token
                values are scattered with hidden. A None among `per_token` is not passed on.

        Returns:
            `TokenLoss` on the first device.

        Raises:
            TypeError: a pair without a closed form (`explain()` says why).
            TypeError, ValueError, IndexError, RuntimeError: as in `seqpar.scored_loss`.
        """
        options = {"loss": loss, "entropy": entropy, "softcap": softcap, "loss_scale": loss_scale}
        losses: list[TokenLoss] = self._over_devices(scored_loss, hidden, target, temperature, ids, per_token, options)
        return sum_on_first(losses)

    def _over_devices(
        self,
        function: Callable[..., Any],
        hidden: OneOrScattered,
        target: OneOrScattered,
        temperature: float | Tensor,
        ids: Tensor | None,
        per_token: dict[str, OneOrScattered | None],
        options: dict[str, Any],
    ) -> Any:
        """Return the result of `over_devices`, called inside the generator's FSDP2 unit if it is one."""
        refuse_transforms(hidden if isinstance(hidden, (list, tuple)) else (hidden,))
        given = {name: value for name, value in per_token.items() if value is not None}
        options = {"chunk_tokens": self.chunk_tokens, **options}
        if isinstance(temperature, Tensor):
            given["temperature"] = temperature
        else:
            options["temperature"] = temperature
        if ids is not None:
            given["ids"] = ids

        def compute(hidden: OneOrScattered) -> Any:
            return over_devices(function, self.head, self.devices, self.vocab, hidden, target, given, options)

        return inside_unit(self.head["generator"], compute, hidden)

    def explain(self, tokens: int | None = None) -> str:
        """Describe how one device computes the loss of this many tokens, ignored ones not counted, and why.

        The default is the number of tokens in the latest call, divided evenly among the devices, or 4,096 before the
        first call. Reading that number waits for the device.
        """
        if tokens is None:
            tokens = self._tokens_of_a_device()
        # What the latest call found, if there was one
        facts = next(reversed(self._facts.values()), None)
        return explanation(self.head, self._formulas, facts, self._latest, tokens, self.chunk_tokens, self.chunk_size)

    def _tokens_of_a_device(self) -> int:
        if self._latest is None:
            return 4096
        devices = 1
        if self.devices is not None:
            devices = len(self.devices)
        return max(1, math.ceil(int(self._latest.tokens) / devices))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy or pickle, without what the calls so far have found: the copy probes anew."""
        return {**self.__dict__, "_facts": {}, "_formulas": {}, "_latest": None}

    def extra_repr(self) -> str:
        """Return the settings for `print(module)`."""
        devices = None
        if self.devices is not None:
            devices = [str(d) for d in self.devices]
        return f"devices={devices}, chunk_tokens={self.chunk_tokens}, chunk_size={self.chunk_size}"


_between_graphs = outside_graphs(LossCompute.forward)


def _check_modules(generator: nn.Module, criterion: nn.Module) -> None:
    """Raise unless both are unwrapped modules in the right order, and the criterion sums."""
    for name, module in (("generator", generator), ("criterion", criterion)):
        check_module(module, name)
        refuse_data_parallel(module, name)
        for part in module.modules():
            refuse_scripted(part)
            if slots := slot_names(type(part)):
                names = f"{type(part).__name__} has __slots__ ({', '.join(slots)})"
                raise TypeError(f"{names}, which a replica would lack; remove __slots__ from its class")
    _check_roles(generator, criterion)
    _check_reduction(criterion)


def _check_roles(generator: nn.Module, criterion: nn.Module) -> None:
    """Raise TypeError if the types show that the two were passed in the wrong order, or that one module is both."""
    if isinstance(generator, nn.AdaptiveLogSoftmaxWithLoss) or isinstance(criterion, nn.AdaptiveLogSoftmaxWithLoss):
        raise TypeError(
            "AdaptiveLogSoftmaxWithLoss is generator and criterion in one, and returns a mean; pass a module whose "
            "forward(hidden) returns its log_prob of hidden.flatten(0, -2), unflattened, with "
            "nn.NLLLoss(reduction='sum')"
        )
    if isinstance(generator, (LabelSmoothing, _Loss)):
        raise TypeError(f"generator is {kind_of(generator)}, a criterion; the order is (generator, criterion)")
    if isinstance(criterion, (nn.Linear, nn.Sequential, nn.Embedding)):
        raise TypeError(f"criterion is {kind_of(criterion)}, a generator; the order is (generator, criterion)")


def _check_reduction(criterion: nn.Module) -> None:
    """Raise ValueError if the criterion's `reduction`, which can be set at any time, says that it does not sum."""
    reduction = getattr(criterion, "reduction", "sum")
    if reduction != "sum":
        raise ValueError(f"the criterion has reduction={reduction!r}; the criterion must sum: reduction='sum'")


def _check_sizes(chunk_tokens: int | None, chunk_size: int | None) -> None:
    """Raise ValueError if both are given, or if one is less than 1."""
    check_size(chunk_tokens, "chunk_tokens")
    check_size(chunk_size, "chunk_size")
    if chunk_tokens is not None and chunk_size is not None:
        raise ValueError(f"chunk_tokens={chunk_tokens} and chunk_size={chunk_size}: pass one of them")


def _check_split(devices: Sequence[Device] | None, chunk_size: int | None) -> None:
    """Raise ValueError for settings that a split vocabulary does not support."""
    if devices is not None or chunk_size is not None:
        raise ValueError(
            f"vocab is given with devices={devices} and chunk_size={chunk_size}; with a split vocabulary each rank has "
            "one device, and chunks are cut by chunk_tokens"
        )
