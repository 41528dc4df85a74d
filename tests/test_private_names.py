"""Private names of other libraries: each stands in the file named here, and the installed library still has it.

A library may change what it keeps private in any release. A failure here names what has changed before users meet it as
an AttributeError in the middle of a step.
"""

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRIVATE = re.compile(r"_[a-zA-Z]\w*")
# Documented: os._exit, sys._getframe, and those of named tuples
PUBLIC = {"_asdict", "_exit", "_fields", "_getframe", "_make", "_replace"}
MODULES = {
    "_backward_hooks", "_backward_pre_hooks", "_buffers", "_compiled_call_impl", "_forward_hooks",
    "_forward_hooks_always_called", "_forward_hooks_with_kwargs", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_global_forward_hooks", "_global_forward_pre_hooks", "_is_replica", "_modules",
    "_orig_mod", "_parameters", "_replicate_for_data_parallel",
}  # fmt: skip
"""What `nn.Module` keeps, by names that are as old as it: any file that copies or asks a module may use them."""
WORDS = {
    "_PROJECT",
    "_enabled",
    "_fsdp_param_groups",
    "_global",
    "_id",
    "_pytest",
    "_reverse",
    "_signature",
    "_token",
    "_typeshed",
}
"""Parts of names that are put together, what only a type checker imports, what only some versions have, and the
package in which pytest's own code is."""

LIBRARIES = {
    ("argparse", "recipes/translation/commands/arguments.py"): {"_ActionsContainer"},
    ("argparse", "recipes/translation/settings/options.py"): {"_ActionsContainer", "_option_string_actions"},
    ("sacrebleu", "recipes/translation/scores/scores.py"): {
        "_aggregate_and_compute",
        "_compute_score_from_stats",
        "_extract_corpus_statistics",
    },
    ("torch", "seqpar/core/graphs.py"): {
        "_C",
        "_autograd",
        "_dynamo",
        "_forward_cls",
        "_input_metadata",
        "_top_saved_tensors_default_hooks",
        "_version",
        "_will_engine_execute_node",
    },
    ("torch", "seqpar/core/checks.py"): {"_C", "_assert_async", "_current_level", "_functorch"},
    ("torch", "seqpar/multi_device/parallel_apply.py"): {
        "_C",
        "_device",
        "_functorch",
        "_get_current_dispatch_mode_stack",
        "_get_current_function_mode_stack",
        "_python_dispatch",
    },
    ("torch", "seqpar/linear/against_teacher.py"): {"_assert_async"},
    ("torch", "seqpar/distributed/torch_private.py"): {
        "_delay_all_reduce_all_params",
        "_fsdp_param_group",
        "_get_ddp_logging_data",
        "_get_zeros_like_grad_buckets",
        "_get_fsdp_state",
        "_lazy_init",
        "_module_parameters",
        "_post_forward_indices",
        "_static_graph_delay_allreduce_enqueued",
        "_unsharded_param",
        "_use_python_reducer",
    },
    ("torch", "seqpar/engine/loss_compute.py"): {"_Loss"},
    ("torch", "seqpar/core/effects.py"): {"_unsafe_preserve_version_counter"},
    ("torch", "seqpar/core/settings.py"): {"_flat_weight_refs", "_flat_weights"},
    ("torch", "seqpar/engine/formula_match.py"): {"_C", "_len_torch_function_stack", "_nn"},
    ("torch", "seqpar/engine/module_calls.py"): {"_cache_enabled"},
    ("torch", "seqpar/engine/kept_state.py"): {"_BatchNorm", "_tensor_name"},
    ("torch", "seqpar/engine/row_mixing.py"): {"_BatchNorm"},
    ("torch", "seqpar/multi_device/replicas.py"): {
        "_flat_weight_refs",
        "_flat_weights",
        "_flat_weights_names",
    },
    ("torch", "models/compiled.py"): {"_dynamo"},
    ("torch", "recipes/translation/training/compilation.py"): {"_dynamo"},
    ("torch", "recipes/translation/export/onnx_model.py"): {"_subclasses"},
    ("torch", "recipes/translation/processes/ranks.py"): {"_get_default_store"},
    ("torch", "recipes/translation/training/layout.py"): {"_foreach_mul_"},
    ("torch", "seqpar/testing/evidence.py"): {"_pytree"},
    ("torch", "seqpar/testing/step_run.py"): {
        "_checkpoint_wrapped_module",
        "_clip_grads_with_norm_",
        "_group_tensors_by_device_and_dtype",
        "_fsdp_wrapped_module",
    },
    ("accelerate", "seqpar/testing/step_run.py"): {"_reset_state"},
    ("lightning", "seqpar/testing/step_run.py"): {"_forward_module"},
    ("transformers", "recipes/translation/importing/settings.py"): {"_get_default_generation_params"},
    ("transformers", "seqpar/integrations/transformers_model.py"): {"_loss_function"},
    ("transformers", "seqpar/integrations/transformers_trainer.py"): {"_loss_shifts_labels"},
    ("trl", "seqpar/integrations/trl_distillation.py"): {"_chunked_divergence_loss"},
    ("trl", "seqpar/integrations/trl_node.py"): {"_ChunkedLogProbFunction", "_use_triton"},
}


def sources():
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text())
        for folder in ("seqpar", "models", "recipes", "conformance", "planning")
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def defined(tree):
    """Yield the names that a file defines itself: functions, classes, variables, arguments and attributes of self."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def used(tree):
    """Yield the attributes, imported names and strings of a file that look like private names."""
    for node in ast.walk(tree):
        found = []
        if isinstance(node, ast.Attribute):
            found = [node.attr]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = [node.value]
        elif isinstance(node, ast.alias):
            found = node.name.split(".")
        elif isinstance(node, ast.ImportFrom):
            found = (node.module or "").split(".")
        yield from (name for name in found if PRIVATE.fullmatch(name))


def test_a_private_name_of_a_library_stands_in_the_file_that_is_named_for_it():
    trees = sources()
    ours = {name for tree in trees.values() for name in defined(tree)} | PUBLIC | MODULES | WORDS
    found = {file: set(used(tree)) - ours for file, tree in trees.items()}
    expected = {}
    for (_, file), names in LIBRARIES.items():
        expected.setdefault(file, set()).update(names)
    assert {file: names for file, names in found.items() if names} == expected


def text_of(package):
    """All that the Python files of a package, or of a module of the standard library, say."""
    module = importlib.import_module(package)
    file = Path(module.__file__)
    files = file.parent.rglob("*.py") if file.name == "__init__.py" else [file]
    return b"\n".join(file.read_bytes() for file in files)


@pytest.mark.parametrize("package", sorted({package for package, _ in LIBRARIES}))
def test_the_installed_library_has_each_private_name(package):
    text = text_of(package)
    for (owner, file), names in LIBRARIES.items():
        if owner == package:
            missing = [name for name in sorted(names) if not re.search(rb"\b" + name.encode() + rb"\b", text)]
            assert not missing, f"the installed {package} no longer has {', '.join(missing)}, used in {file}"
