"""The YAML files of `deploy/` have documented fields, and commands that torchrun and the recipe accept."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import parse_args

from recipes.translation.commands import main
from tests.deploy.slurm import ROOT
from tests.printed_commands import Accepted, only_settings

TRAINJOB = yaml.safe_load((ROOT / "deploy/trainjob.yaml").read_text())
SKY = yaml.safe_load((ROOT / "deploy/sky.yaml").read_text())
OWN_DATA = "recipes/translation/configs/own_data.yaml"

# A type, a folder of fields, or a list of such; what ends in ! is required.
NAMED = {"name!": str}
FIELDS: dict[str, Any] = {
    # https://github.com/kubeflow/trainer, pkg/apis/trainer/v1alpha1/trainjob_types.go; volumes as in Kubernetes
    "trainjob.yaml": {
        "apiVersion!": str,
        "kind!": str,
        "metadata!": NAMED,
        "spec!": {
            "runtimeRef!": {**NAMED, "apiGroup": str, "kind": str},
            "trainer": {
                "image": str,
                "command": [str],
                "args": [str],
                "env": [{**NAMED, "value": str}],
                "numNodes": int,
                "numProcPerNode": int,
                "resourcesPerNode": {"limits": dict, "requests": dict},
            },
            "runtimePatches": [
                {
                    "manager!": str,
                    "trainingRuntimeSpec": {
                        "template": {
                            "spec": {
                                "replicatedJobs": [
                                    {
                                        **NAMED,
                                        "template": {
                                            "spec": {
                                                "template": {
                                                    "spec": {
                                                        "volumes": [
                                                            {
                                                                **NAMED,
                                                                "persistentVolumeClaim": {"claimName!": str},
                                                                "emptyDir": {"medium": str},
                                                            }
                                                        ],
                                                        "containers": [
                                                            {**NAMED, "volumeMounts": [{**NAMED, "mountPath!": str}]}
                                                        ],
                                                    }
                                                }
                                            }
                                        },
                                    }
                                ]
                            }
                        }
                    },
                }
            ],
        },
    },
    # https://github.com/skypilot-org/skypilot, sky/utils/schemas.py: get_task_schema, which requires none
    "sky.yaml": {
        "name": str,
        "workdir": str,
        "num_nodes": int,
        "resources": {
            "infra": str,
            "accelerators": str,
            "job_recovery": {"strategy": str, "max_restarts_on_errors": int},
        },
        "volumes": {"/training": str},
        "envs": {"OMP_NUM_THREADS": str, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str},
        "setup": str,
        "run": str,
    },
}


def faults(value: object, fields: Any, at: str) -> list[str]:
    """What is unknown, missing, or of another type."""
    if isinstance(fields, list):
        if not isinstance(value, list):
            return [f"{at} is no list"]
        return [fault for number, item in enumerate(value) for fault in faults(item, fields[0], f"{at}[{number}]")]
    if isinstance(fields, type):
        return [] if type(value) is fields else [f"{at} is {value!r}, no {fields.__name__}"]
    if not isinstance(value, dict):
        return [f"{at} has no fields"]
    known = {name.removesuffix("!"): each for name, each in fields.items()}
    found = [f"{at} has no {name[:-1]}" for name in fields if name.endswith("!") and name[:-1] not in value]
    for name, item in value.items():
        found += faults(item, known[name], f"{at}.{name}") if name in known else [f"{at}.{name} is unknown"]
    return found


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_documented_and_none_that_is_required_is_missing(name: str) -> None:
    assert faults(yaml.safe_load((ROOT / "deploy" / name).read_text()), FIELDS[name], name) == []


def test_a_field_that_is_unknown_or_missing_or_of_another_type_is_found() -> None:
    wrong = {"metadata": {}, "spec": {"runtimeRef": {"name": 1}, "podTemplateOverrides": []}}
    assert faults(wrong, FIELDS["trainjob.yaml"], "job") == [
        "job has no apiVersion",
        "job has no kind",
        "job.metadata has no name",
        "job.spec.runtimeRef.name is 1, no str",
        "job.spec.podTemplateOverrides is unknown",
    ]


def test_a_trainjob_keeps_the_rules_that_no_type_states() -> None:
    assert (TRAINJOB["apiVersion"], TRAINJOB["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", TRAINJOB["metadata"]["name"])
    trainer = TRAINJOB["spec"]["trainer"]
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": trainer["numProcPerNode"]}
    # The plugin for torch sets these itself, and refuses them here
    assert not any(variable["name"].startswith("PET_") for variable in trainer["env"])
    (patch,) = TRAINJOB["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    # As the runtime torch-distributed names them
    assert (job["name"], container["name"]) == ("node", "node")
    assert [volume["name"] for volume in pod["volumes"]] == [mount["name"] for mount in container["volumeMounts"]]


def launched(words: Sequence[str]) -> Any:
    """What torchrun understands, after the recipe has accepted what is left for it."""
    options = parse_args(list(words))
    assert options.module
    assert options.training_script == "recipes.translation"
    rest = [word.replace("/training/mine.yaml", str(ROOT / OWN_DATA)) for word in options.training_script_args]
    with pytest.raises(Accepted), only_settings():
        main(rest)
    return options


def test_the_command_of_a_trainjob_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = TRAINJOB["spec"]["trainer"]
    given = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_NODE_RANK": "3",
        "PET_MASTER_ADDR": "seqpar-node-0-0.seqpar",
        "PET_MASTER_PORT": "29500",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert trainer["command"] == ["torchrun"]
    options = launched(trainer["args"])
    assert [options.nnodes, options.nproc_per_node, options.node_rank] == ["4", "8", 3]
    assert (options.master_addr, options.master_port) == ("seqpar-node-0-0.seqpar", 29500)


def test_the_commands_of_a_sky_task_start_a_launcher_on_each_machine(tmp_path: Path) -> None:
    torchrun = tmp_path / "torchrun"
    torchrun.write_text("#!/bin/bash\nprintf '%s\\n' \"$@\"\n")
    torchrun.chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}{os.pathsep}/usr/bin:/bin",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    }
    for rank in range(2):
        environment = {**variables, "SKYPILOT_NODE_RANK": str(rank)}
        said = subprocess.run(
            ["bash", "-euc", SKY["run"]], env=environment, capture_output=True, text=True, check=True
        ).stdout
        options = launched(said.splitlines())
        assert [options.nnodes, options.nproc_per_node, options.node_rank] == ["2", "8", rank]
        assert options.master_addr == "10.0.0.1"


def test_a_sky_task_installs_what_the_readme_says() -> None:
    assert SKY["setup"].strip() in (ROOT / "README.md").read_text().splitlines()
    assert shlex.split(SKY["setup"])[:2] == ["pip", "install"]
