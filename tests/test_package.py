"""What is shipped: the wheel holds seqpar alone, and importing it brings nothing along but torch."""

import json
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import seqpar
from release.sbom import external

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HELD = [
    "seqpar",
    "models",
    "recipes",
    "tests",
    "examples",
    "benchmarks",
    "conformance",
    "planning",
    "deploy",
    "docs",
    "release",
]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel and the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    options = ["--wheel", "--sdist", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run([sys.executable, "-m", "build", *options], check=True, capture_output=True)
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """A Python that has the wheel and, from here, torch and mypy; the checkout is not on its path."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    zipfile.ZipFile(built[0]).extractall(packages)
    (packages / "torch-from-here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin/python"


def test_the_wheel_holds_seqpar_alone_with_its_types(built):
    names = zipfile.ZipFile(built[0]).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"seqpar"}
    assert {name.rpartition(".")[2] for name in names if ".dist-info/" not in name} == {"py", "typed"}
    assert "seqpar/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_names_what_it_requires_in_a_bill_of_materials(built):
    archive = zipfile.ZipFile(built[0])
    (name,) = [name for name in archive.namelist() if ".dist-info/sboms/" in name]
    document = json.loads(archive.read(name))
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.7")
    assert document["metadata"]["component"]["purl"] == f"pkg:pypi/seqpar@{seqpar.__version__}"
    named = {part["name"] + part["versionRange"].removeprefix("vers:pypi/") for part in document["components"]}
    assert named == set(PROJECT["dependencies"])
    assert all(part["isExternal"] for part in document["components"])


def test_a_requirement_that_a_bill_of_materials_cannot_state_is_refused():
    assert external(Requirement("torch<3,>=2.11"))["versionRange"] == "vers:pypi/>=2.11|<3"
    with pytest.raises(ValueError, match=r"torch~=2.11 in pyproject.toml: .* not \{'~='\}"):
        external(Requirement("torch~=2.11"))


def test_the_version_is_the_same_in_package_project_and_citation():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert seqpar.__version__ == PROJECT["version"] == citation["version"]


def test_every_pinned_version_installs_on_the_oldest_python_that_is_promised():
    oldest = f"{PROJECT['requires-python'].removeprefix('>=')}.0"
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = (Requirement(line) for line in lines if line and not line.startswith("#"))
    pinned = {(canonicalize_name(pin.name), str(pin.specifier).removeprefix("==")) for pin in pins}
    needed = {
        (canonicalize_name(found.metadata["Name"]), found.version): found.metadata["Requires-Python"] or ""
        for found in distributions()
    }
    assert {pin: needed[pin] for pin in pinned & needed.keys() if oldest not in SpecifierSet(needed[pin])} == {}


def test_the_source_distribution_holds_what_a_checkout_does(built):
    with tarfile.open(built[1]) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {name.split("/")[0] for name in names} >= {*HELD, "README.md", "Makefile", "LICENSE"}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if tracked:
        assert {name for name in names if name != "PKG-INFO"} <= set(tracked)


def test_an_installed_seqpar_imports_little_beside_torch(installed):
    """By what is imported, since time depends on the machine: 0.05 s beyond torch's own second."""
    code = (
        "import torch, sys; before = set(sys.modules); import seqpar; seqpar.LossCompute; "
        "print(seqpar.__file__); print(*sorted(name for name in set(sys.modules) - before if '.' not in name)); "
        "print([n for n in ('torch.distributed.tensor', 'torch.distributed.fsdp', 'torch._dynamo', 'triton') "
        "if n in set(sys.modules) - before])"
    )
    done = subprocess.run([installed, "-c", code], cwd="/", check=True, capture_output=True, text=True)
    where, new, heavy = done.stdout.splitlines()
    assert Path(where).is_relative_to(installed.parent.parent)
    assert set(new.split()) <= {"seqpar"} | set(sys.stdlib_module_names)
    assert heavy == "[]"


FIRST_CALLS = """
import sys, torch, seqpar
from torch import nn
hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
target = torch.randint(9, (6,))
custom = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 9))
criterion = nn.CrossEntropyLoss(reduction="sum")
empty = seqpar.TokenLoss(torch.zeros(()), torch.tensor(0))
def per_chunk(params, rows, chunk):
    return seqpar.TokenLoss(criterion(rows[0] @ params[0].T, target[chunk]), torch.tensor(len(rows[0])))
for loss in (
    lambda: seqpar.LossCompute(nn.Linear(4, 9), criterion)(hidden, target),
    lambda: seqpar.LossCompute(custom, criterion, chunk_tokens=2)(hidden, target),
    lambda: seqpar.scored_loss(hidden, weight, target, lambda s: -s.log_prob, chunk_tokens=2),
    lambda: seqpar.chunked_gradient(per_chunk, [slice(0, 4), slice(4, 6)], [hidden], [weight], empty),
):
    loss().total.backward()
print([name for name in ("sympy", "torch._dynamo", "torch._inductor", "triton") if name in sys.modules])
"""


def test_first_calls_import_nothing_that_takes_long():
    """torch itself imports sympy, in a third of a second, where a gradient starts from given numbers."""
    done = subprocess.run([sys.executable, "-c", FIRST_CALLS], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


def test_a_users_type_checker_sees_the_signatures(installed, tmp_path):
    (tmp_path / "code.py").write_text(
        "import torch, seqpar\n"
        "loss = seqpar.linear_cross_entropy(torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(2), softcap='high')\n"
        "reveal_type(loss)\n"
        "reveal_type(loss.tokens)\n"
    )
    options = ["--python-executable", str(installed), "--config-file", str(ROOT / "pyproject.toml")]
    command = [sys.executable, "-m", "mypy", *options, "--cache-dir", str(ROOT / ".mypy_cache"), "code.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert 'code.py:2: error: Argument "softcap" to "linear_cross_entropy" has incompatible type' in done.stdout
    assert "fallback=seqpar.core.token_loss.TokenLoss" in done.stdout  # as mypy shows a NamedTuple
    assert 'Revealed type is "torch._tensor.Tensor"' in done.stdout
    assert done.stdout.count("error:") == 1, done.stdout


def test_importing_the_library_imports_none_of_the_extras():
    extras = ["datasets", "sentencepiece", "sacrebleu", "yaml", "rich", "safetensors", "hypothesis", "pytest"]
    extras += ["accelerate", "lightning", "transformers"]
    code = f"import seqpar, seqpar.testing, sys; print([name for name in {extras} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_the_commands_of_the_makefile_explain_themselves():
    done = subprocess.run(["make", "help"], check=True, capture_output=True, text=True, cwd=ROOT)
    for target in ("demo", "test", "check", "bench", "clean"):
        assert f"\n{target} " in f"\n{done.stdout}"
