"""Train with TRL using token log-probabilities and entropies from `seqpar.token_scores`.

TRL's trainers call the model with `fused_lm_head=True` and compute their losses from the log-probabilities that come
back. For the duration of such a forward, torch hooks replace TRL's own function
(`trl.trainer.utils._ChunkedLogProbFunction`); the trainers' losses, metrics and generation run unchanged.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainerCallback
from trl import DistillationTrainer, DPOTrainer, GRPOTrainer, KTOTrainer, RLOOTrainer, SFTTrainer
from trl.trainer import utils as trl_utils

from seqpar.core.checks import check_size, kind_of
from seqpar.integrations.peft_adapters import adapted_head, adapter_of, base_of, is_peft_model
from seqpar.integrations.say_once import say_once
from seqpar.integrations.transformers_head import gather_in_model, is_divided
from seqpar.integrations.transformers_model import Reading, refuse_adapter
from seqpar.integrations.transformers_trainer import calling_trainer, model_of
from seqpar.integrations.trl_distillation import AppliedDistillation
from seqpar.integrations.trl_head import WITHOUT, ReadModels, examine, scored_head
from seqpar.integrations.trl_node import COMPACT, NODE, StandIn, check_version

LOG = logging.getLogger(__name__)

TRAINERS = (SFTTrainer, DPOTrainer, KTOTrainer, GRPOTrainer, RLOOTrainer, DistillationTrainer)


def apply_seqpar_scores(trainer: Any, *, chunk_tokens: int | None = None) -> AppliedScores | AppliedDistillation:
    """Make a TRL trainer compute its log-probabilities and entropies with `seqpar.token_scores`.

    A `DistillationTrainer` gets its divergence from `seqpar.linear_distillation`, for every `beta` and `temperature`.

    Plain equivalent: the trainer itself; its loss, its metrics and all gradients keep their values.

    TRL's own function keeps sums in float32 and trusts the configuration's names for softcaps and factors. Here the
    model runs once on a few tokens, and its logits decide: a model whose output embeddings do something else is refused
    by name. A reference model is treated the same way. Rows without a label are never projected.

    Args:
        trainer: an `SFTTrainer`, `DPOTrainer`, `KTOTrainer`, `GRPOTrainer`, `RLOOTrainer` or `DistillationTrainer` from
            TRL 1.16, for a full model or one with PEFT's adapters, in one process or several: under DDP, FSDP2 or
            DeepSpeed's ZeRO-3; trainers that generate no text also work with a tensor-parallel plan. For an adapter on
            the output embeddings see `allow_head_adapter`.
        chunk_tokens: the maximum number of tokens whose logits exist at once; None chooses it by size in bytes.

    Returns:
        `AppliedScores` (`AppliedDistillation` for distillation): `remove()`, or leaving the `with` block, restores the
        trainer.

    Raises:
        TypeError: any other trainer, a compiled model, or output embeddings that are not an `nn.Linear`, alone or with
            PEFT's LoRA or `modules_to_save`; PEFT's AdaLoRA, AdaptionPrompt and CPT.
        ValueError: an option that needs the logits of all tokens (`label_smoothing_factor`, `compute_loss_func`,
            `compute_metrics`, `preprocess_logits_for_metrics`) or is not supported (`use_liger_kernel`,
            `torch_compile`, FSDP1, context or sequence parallelism; tensor parallelism in trainers that generate text;
            DeepSpeed in distillation), or a trainer that already has the scores. With `precompute_ref_log_probs`, a
            model whose logits TRL computes differently from the model: TRL has already computed the references. In
            distillation, a model with a softcap, or two whose logits have different factors.
        RuntimeError: a version of TRL that computes log-probabilities differently, or a model whose logits are not
            those of its configuration. In training, a trainer that asks the model for logits instead (as
            `trl.experimental.gkd` does).

    Example:
        >>> from trl import DPOTrainer
        >>> from seqpar.integrations.trl import apply_seqpar_scores
        >>> trainer = DPOTrainer(model, reference, args=arguments, train_dataset=dataset, processing_class=tokenizer)
        >>> with apply_seqpar_scores(trainer):
        ...     output = trainer.train()
        >>> output.global_step == arguments.max_steps
        True
    """
    check_size(chunk_tokens, "chunk_tokens")
    check_version()
    refuse_options(trainer)
    if is_peft_model(trainer.model):
        refuse_adapter(trainer.model, WITHOUT)
    models = [trainer.model]
    reference = getattr(trainer, "ref_model", getattr(trainer, "teacher_model", None))
    if reference is not None:
        models.append(trainer.accelerator.unwrap_model(reference))
    for model in map(base_of, models):
        if has_scores(model):
            raise ValueError(
                f"this {type(trainer).__name__} has the scores already; remove() it before you apply another"
            )
        if hasattr(model, "_orig_mod"):
            before = "make the trainer with the model as it was before torch.compile, or call model.compile()"
            raise TypeError(f"the {type(model._orig_mod).__name__} of this trainer is compiled; {before}")
        if getattr(trainer, "precompute_ref_logps", False):
            _refuse_other_references(model, examine(model))
    if isinstance(trainer, DistillationTrainer):
        return AppliedDistillation(trainer, chunk_tokens)
    return AppliedScores(models, chunk_tokens)


def refuse_options(trainer: Any) -> None:
    """Raise TypeError for an unsupported kind of trainer, ValueError for the first option that is not supported."""
    kind = type(trainer).__name__
    if not isinstance(trainer, TRAINERS):
        names = ", ".join(supported.__name__ for supported in TRAINERS)
        raise TypeError(f"apply_seqpar_scores got a {kind}; it supports {names}, and subclasses of these")
    for option, reason in _unsupported_options(trainer):
        raise ValueError(f"{kind} with {option}: {reason}; leave it out, or train without apply_seqpar_scores")


def _unsupported_options(trainer: Any) -> Iterator[tuple[str, str]]:
    """Yield the unsupported options that are set, each with the reason."""
    args = trainer.args
    if args.use_liger_kernel:
        yield "use_liger_kernel=True", "it replaces parts of the model's forward"
    if args.torch_compile:
        yield "torch_compile=True", "the scores are computed outside the compiled graph"
    for option in _options_using_logits(trainer):
        yield option, "TRL computes the logits of all tokens for it"
    yield from _layouts(trainer)


def _options_using_logits(trainer: Any) -> Iterator[str]:
    """Yield the options for which TRL runs the model again and keeps its logits."""
    args = trainer.args
    if isinstance(trainer, SFTTrainer):
        if args.label_smoothing_factor and args.loss_type != "dft":
            yield f"label_smoothing_factor={args.label_smoothing_factor:g}"
        if trainer.compute_loss_func is not None:
            yield "compute_loss_func"
    if trainer.compute_metrics is not None:
        yield "compute_metrics"
    if trainer.preprocess_logits_for_metrics is not None:
        yield "preprocess_logits_for_metrics"


def _layouts(trainer: Any) -> Iterator[tuple[str, str]]:
    """Yield the unsupported ways in which the model or a sequence is split over devices, each with the reason."""
    if trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2:
        yield "FSDP1", 'TRL gathers the output embeddings only under FSDP2; set fsdp_config={"version": 2}'
    if trainer.is_deepspeed_enabled and isinstance(trainer, DistillationTrainer):
        yield "DeepSpeed", "the divergence is not tested with it; shard the models with FSDP2 instead"
    parallelism = trainer.accelerator.parallelism_config
    splits = ["cp", "sp"]
    if isinstance(trainer, (GRPOTrainer, RLOOTrainer, DistillationTrainer)):
        splits.append("tp")
    for name in splits:
        if parallelism is not None and getattr(parallelism, f"{name}_enabled", False):
            yield f"parallelism_config with {name}_size > 1", "the scores are not tested with it"


def _refuse_other_references(model: Any, reading: Reading) -> None:
    """Raise ValueError if TRL has computed the references with a softcap or factor other than the model's."""
    # TRL keeps what it has read in closure variables of the forward that it has put on the model
    forward = getattr(vars(model).get("forward"), "__func__", None)
    theirs = inspect.getclosurevars(forward).nonlocals if forward is not None else {}
    softcap = theirs.get("final_logit_softcapping")
    factor = theirs.get("logit_scale", 1.0)
    if softcap == reading.softcap and math.isclose(factor * reading.temperature, 1):
        return
    raise ValueError(
        f"precompute_ref_log_probs: TRL has computed the references with a softcap of {softcap} and a factor of "
        f"{factor:g} where {type(model).__name__} has {reading.softcap} and {1 / reading.temperature:g}; leave it out"
    )


@contextmanager
def allow_head_adapter(model: Any) -> Iterator[None]:
    """Let TRL's trainers accept a PEFT model with a LoRA adapter on its output embeddings.

    TRL's own function would ignore such an adapter, so its constructors refuse it. The scores do not ignore it. Outside
    `apply_seqpar_scores` a training step of this model raises RuntimeError.

    Raises:
        TypeError: a model that is not a PEFT model, or has no LoRA adapter, or an unsupported one, on its output
            embeddings.

    Example:
        >>> from peft import LoraConfig, get_peft_model
        >>> from trl import SFTTrainer
        >>> from seqpar.integrations.trl import allow_head_adapter, apply_seqpar_scores
        >>> model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "lm_head"]))
        >>> with allow_head_adapter(model):
        ...     trainer = SFTTrainer(model, args=arguments, train_dataset=dataset, processing_class=tokenizer)
        >>> with apply_seqpar_scores(trainer):
        ...     output = trainer.train()
        >>> output.global_step == arguments.max_steps
        True
    """
    if not is_peft_model(model):
        raise TypeError(f"allow_head_adapter got {kind_of(model)}; it needs a PEFT model: get_peft_model(...)")
    base = base_of(model)
    head = adapted_head(base)
    if head is None:
        raise TypeError(
            f"the output embeddings of this {type(base).__name__} have no adapter; TRL accepts it as it is: leave out "
            "allow_head_adapter"
        )
    scored_head(base)
    base.register_forward_pre_hook(_refuse_without_scores, with_kwargs=True)
    # An instance attribute takes precedence over the method, and only the constructor asks the PEFT model itself
    model.__dict__["get_output_embeddings"] = head.get_base_layer
    try:
        yield
    finally:
        del model.__dict__["get_output_embeddings"]


def _refuse_without_scores(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise RuntimeError for a forward in which TRL would ignore the adapter."""
    # A reference is the model with its adapter switched off
    if kwargs.get("fused_lm_head") and not has_scores(model) and adapter_of(model) is not None:
        raise RuntimeError(
            f"TRL ignores the adapter on the output embeddings of {type(model).__name__}; train it inside "
            "`with apply_seqpar_scores(trainer):`, without precompute_ref_log_probs, which runs it earlier"
        )


def has_scores(model: Any) -> bool:
    """Return whether a model's forward computes the scores."""
    hooks = model._forward_pre_hooks.values()
    return any(isinstance(getattr(hook, "__self__", None), AppliedScores) for hook in hooks)


class AppliedScores:
    """The scores of a trainer's models, until `remove()`; `apply_seqpar_scores` returns it.

    Example:
        >>> from trl import SFTTrainer
        >>> from seqpar.integrations.trl import apply_seqpar_scores
        >>> trainer = SFTTrainer(model, args=arguments, train_dataset=dataset, processing_class=tokenizer)
        >>> applied = apply_seqpar_scores(trainer)
        >>> output = trainer.train()
        >>> applied.remove()  # from here on the scores are TRL's own
        >>> output.global_step == arguments.max_steps
        True
    """

    def __init__(self, models: list[Any], chunk_tokens: int | None) -> None:
        self.chunk_tokens = chunk_tokens
        self.models = ReadModels()
        self.asked = False
        self.running: StandIn | None = None
        self.exact: dict[str, Any] = {}
        self.last_hook: Any = None
        self.replaced: dict[str, Any] = {}
        bases = [base_of(model) for model in models]
        self.whole = {id(base): model for base, model in zip(bases, models, strict=True)}
        for base in bases:
            gather_in_model(base, scored_head(base))
            self.models.reading(base)
        self.hooks: list[Any] = []
        for base in bases:
            self.hooks.append(base.register_forward_pre_hook(self._before, with_kwargs=True))
            self.hooks.append(base.register_forward_hook(self._after, prepend=True, always_call=True))

    def remove(self) -> None:
        """Restore the trainer; a second call does nothing."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        self._restore()
        self._forget()

    def __enter__(self) -> AppliedScores:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Replace TRL's function with ours until the forward returns."""
        # torch does not call `_after` for a forward that Ctrl-C has interrupted
        self._restore()
        self._forget()
        if not kwargs.get("fused_lm_head"):
            if not self.asked and model.training and torch.is_grad_enabled():
                asked = f"the trainer asks {type(model).__name__} for its logits in training and not for its scores"
                raise RuntimeError(f"{asked}; {WITHOUT}")
            return
        self.asked = True
        self.running = StandIn(model, self.models.reading(model), self.chunk_tokens)
        head: Any = model.get_output_embeddings()
        if is_divided(head):
            # The outputs must remain those of DeepSpeed's hook, which gathers the weights for their backward
            gather_in_model(model, head)
        else:
            # Registered now, to be called after FSDP2's hook, which the trainer adds when training begins
            self.last_hook = self.whole[id(model)].register_forward_hook(self._undo_rounding)
        self.replaced = {name: getattr(trl_utils, name) for name in (NODE, COMPACT)}
        setattr(trl_utils, NODE, self.running)
        setattr(trl_utils, COMPACT, _only_rows_with_a_label)

    def _after(self, model: Any, args: tuple[Any, ...], outputs: Any) -> None:
        """Restore TRL's function; raise RuntimeError unless the forward called it exactly once."""
        node = self.running
        self._restore()
        if node is not None and outputs is not None and node.calls != 1:
            asked = f"{type(model).__name__} asked for its log-probabilities {node.calls} times in a forward"
            raise RuntimeError(f"{asked}, and TRL's own asks once; {WITHOUT}")
        if node is not None and outputs is not None:
            self.exact = dict(outputs)

    def _undo_rounding(self, model: Any, args: tuple[Any, ...], outputs: Any) -> Any:
        """Return the scores as they were before FSDP2 rounded them to its `output_dtype`."""
        exact = self.exact
        self._forget()
        return type(outputs)(**exact)

    def _forget(self) -> None:
        """Forget the outputs of the latest forward."""
        self.exact = {}
        if self.last_hook is not None:
            self.last_hook.remove()
        self.last_hook = None

    def _restore(self) -> None:
        """Restore TRL's functions if ours have replaced them."""
        self.running = None
        for name, function in self.replaced.items():
            setattr(trl_utils, name, function)
        self.replaced = {}


def _only_rows_with_a_label(device: torch.device) -> bool:
    """Tell TRL that its function gets only the rows that have a label."""
    return True


class SeqparScores(TrainerCallback):
    """A callback that makes TRL's trainers train with the scores of `apply_seqpar_scores`.

    Pass it to the constructor or add it later. Before and after training the scores are TRL's own.

    Args:
        chunk_tokens: as in `apply_seqpar_scores`, which also says what is refused.

    Example:
        >>> from trl import SFTTrainer
        >>> from seqpar.integrations.trl import SeqparScores
        >>> given = {"args": arguments, "train_dataset": dataset, "processing_class": tokenizer}
        >>> trainer = SFTTrainer(model, callbacks=[SeqparScores()], **given)
        >>> trainer.train().global_step == arguments.max_steps
        True
    """

    def __init__(self, *, chunk_tokens: int | None = None) -> None:
        check_size(chunk_tokens, "chunk_tokens")
        self.chunk_tokens = chunk_tokens
        self.applied: AppliedScores | AppliedDistillation | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Apply the scores to the trainer that is about to train."""
        trainer = calling_trainer("give it to one of TRL's: callbacks=[SeqparScores()]")
        # Training that raised an error has not called on_train_end
        self.on_train_end(args, state, control)
        self.applied = apply_seqpar_scores(trainer, chunk_tokens=self.chunk_tokens)
        weight = model_of(trainer).get_output_embeddings().weight
        say_once(type(trainer).__name__, LOG.info, weight, self.chunk_tokens, scores=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restore the trainer."""
        if self.applied is not None:
            self.applied.remove()
        self.applied = None
