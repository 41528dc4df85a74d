"""A release is the last commit, the same bits wherever it is built, and nothing is released that cannot be checked."""

import ast
import importlib.util
import json
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml

import seqpar
from release.__main__ import ROOT, built_twice, check_public_names, finish, git, last_commit, refuse_differences
from release.conda import conda_requirement, recipe
from release.hub_kernel import write_kernel

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NAMED = {**PYPROJECT, "project": {**PYPROJECT["project"], "urls": {"Repository": "https://example.org/owner/name"}}}
checkout_only = pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="it builds the last commit: no git checkout here"
)


def commit(folder: Path, **files: str) -> Path:
    """Write a package of one module, and commit it to a new or an existing repository."""
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    git("init", "--quiet", checkout=folder)
    git("add", ".", checkout=folder)
    who = ["-c", "user.name=tester", "-c", "user.email=tester@example.org"]
    git(*who, "commit", "--quiet", "--message", "a commit", checkout=folder)
    return folder


@pytest.fixture
def released(tmp_path):
    """A repository with one tag, in which one function is documented and another one is not."""
    files = {
        "docs/api/seqpar.md": ".. automodule:: seqpar\n",
        "seqpar/__init__.py": "",
        "seqpar/names.py": "from seqpar.inside import loss\n__all__ = ['loss']\n",
        "seqpar/inside.py": "def loss(hidden, *, softcap=None): ...\ndef rows(hidden): ...\n",
    }
    commit(tmp_path, **files)
    git("tag", "v0.1.0", checkout=tmp_path)
    return tmp_path


@checkout_only
def test_two_builds_of_a_commit_are_the_same_bit_for_bit(tmp_path):
    wheel, source = built_twice(git("rev-parse", "HEAD"), tmp_path)
    assert (wheel.suffix, source.suffixes[-2:]) == (".whl", [".tar", ".gz"])


def test_builds_that_differ_are_refused(tmp_path):
    for folder, text in (("one", "1"), ("other", "2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "seqpar.whl").write_text(text)
    one, other = tmp_path / "one/seqpar.whl", tmp_path / "other/seqpar.whl"
    refuse_differences([one], [one])
    with pytest.raises(SystemExit, match=f"two builds of one commit differ, .* compare {one} with {other}"):
        refuse_differences([one], [other])


def needs(package: str) -> pytest.MarkDecorator:
    """Skip a test without a package that no other test needs."""
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not here: make test-trainers unpacks it")


@pytest.mark.parametrize("project", [{}, {"urls": {"Repository": ""}}, {"urls": {"Repository": "TODO"}}])
def test_nothing_is_released_without_the_repositorys_address(project, tmp_path):
    (tmp_path / "seqpar.whl").write_text("the wheel")
    with pytest.raises(SystemExit, match=r"write Repository = \"https://...\" under \[project.urls\]"):
        finish([tmp_path / "seqpar.whl"], {"project": project}, tmp_path / "dist")
    assert not (tmp_path / "dist").exists()


def test_what_is_released_agrees_with_its_hashes(tmp_path, capsys):
    files = [tmp_path / "seqpar.tar.gz", tmp_path / "seqpar.whl"]
    for file in files:
        file.write_text(f"of {file.name}")
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist/older.whl").write_text("of another release")
    finish(files, NAMED, tmp_path / "dist")
    line = f"pip install git+https://example.org/owner/name@v{seqpar.__version__}\n"
    assert capsys.readouterr().out.endswith(line)
    stated = yaml.safe_load((tmp_path / "dist/recipe.yaml").read_text())["source"]["sha256"]
    assert f"{stated}  seqpar.tar.gz\n" in (tmp_path / "dist/SHA256SUMS").read_text()
    assert (tmp_path / "dist/kernel/build/torch-universal/metadata.json").exists()
    check = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    done = subprocess.run(check, cwd=tmp_path / "dist", capture_output=True, text=True, check=True)
    assert done.stdout == "seqpar.tar.gz: OK\nseqpar.whl: OK\n"
    assert not (tmp_path / "dist/older.whl").exists()


@pytest.mark.parametrize("file", ["seqpar/new.py", "seqpar/inside.py"])
def test_what_is_not_in_the_last_commit_is_refused(file, released):
    assert last_commit("0.1.0", released) == git("rev-parse", "HEAD", checkout=released)
    (released / file).write_text("")
    with pytest.raises(
        SystemExit, match=rf"\[release\] {file} is not as in the last commit \(1 such\): commit or remove it"
    ):
        last_commit("0.1.0", released)


def test_a_clone_that_may_lack_tags_is_refused(released):
    commit(released, **{"seqpar/inside.py": ""})
    git("clone", "--quiet", "--depth", "1", released.as_uri(), "shallow", checkout=released)
    with pytest.raises(SystemExit, match=r"a shallow clone may lack the earlier tags: git fetch --unshallow --tags"):
        last_commit("0.1.0", released / "shallow")


def test_a_tag_of_another_version_is_refused(released):
    with pytest.raises(SystemExit, match=r"has the tag v0.1.0, pyproject.toml the version 0.1.1: make them agree"):
        last_commit("0.1.1", released)


def test_an_argument_may_go_only_with_a_new_minor_version(released):
    commit(released, **{"seqpar/inside.py": "def loss(hidden): ...\ndef rows(hidden): ...\n"})
    with pytest.raises(
        SystemExit, match=r"0.1.1 breaks public names of v0.1.0 in seqpar.names, .* make it version 0.2.0"
    ):
        check_public_names("0.1.1", "v0.1.0", released)
    check_public_names("0.2.0", "v0.1.0", released)


def test_what_is_not_documented_may_change_in_any_version(released):
    commit(released, **{"seqpar/inside.py": "def loss(hidden, *, softcap=None): ...\n"})
    check_public_names("0.1.1", "v0.1.0", released)


def test_the_recipe_for_conda_forge_has_version_requirements_and_licence_of_the_project():
    project = PYPROJECT["project"]
    written = recipe(NAMED, "0" * 64)
    assert written["context"]["version"] == project["version"] == seqpar.__version__
    python = written["context"]["python_min"]
    assert project["requires-python"] == f">={python}"
    named = [text.replace("pytorch ", "torch") for text in written["requirements"]["run"]]
    assert named == ["python >=${{ python_min }}", *project["dependencies"]]
    assert written["requirements"]["host"][2:] == ["hatchling >=1.28"]
    assert PYPROJECT["build-system"]["requires"] == ["hatchling>=1.28"]
    about = written["about"]
    assert (about["license"], about["license_file"]) == (project["license"], project["license-files"])
    assert {about["homepage"], about["repository"]} == {"https://example.org/owner/name"}


def test_a_requirement_without_a_known_name_on_conda_forge_is_refused():
    with pytest.raises(ValueError, match=r"einops>=0.8 in pyproject.toml: add its name on conda-forge to ON_CONDA_FOR"):
        conda_requirement("einops>=0.8")


@needs("rattler_build")
def test_rattler_build_itself_accepts_the_recipe():
    from rattler_build import Stage0Recipe

    text = yaml.safe_dump(recipe(NAMED, "0" * 64), sort_keys=False)
    (built,) = Stage0Recipe.from_yaml(text).render()
    rendered = built.recipe.to_dict()
    assert rendered["package"] == {"name": "seqpar", "version": seqpar.__version__}
    with pytest.raises(Exception, match="unknown field"):
        Stage0Recipe.from_yaml(text.replace("pip_check", "pip_checks"))


def test_the_sites_first_page_takes_the_line_to_install_from_the_one_address():
    install_line = runpy.run_path(str(ROOT / "docs/conf.py"))["install_line"]
    assert install_line(NAMED["project"]) == "`pip install git+https://example.org/owner/name`"
    assert install_line({}) == "`pip install .` in a checkout"
    assert "{{ install }}" in (ROOT / "docs/index.md").read_text()


def test_the_owners_page_is_five_steps_in_300_words():
    page = (ROOT / "docs/publishing.md").read_text()
    assert re.findall(r"^(\d)\. ", page, flags=re.MULTILINE) == list("12345")
    assert len(page.split()) <= 300


def import_as_kernels_does(folder: Path):
    """Import a kernel's folder under the name in its metadata."""
    variant = folder / "build/torch-universal"
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture
def kernel_folder(tmp_path):
    """A kernel's folder; what a test imports from it is forgotten."""
    before = set(sys.modules)
    write_kernel(PYPROJECT["project"], ROOT / "seqpar", tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("seqpar_"):
            del sys.modules[name]


def assert_exact_beside_the_package(kernel):
    """Check value and gradients of both against the plain loss, also compiled, and that they share nothing."""
    hidden = torch.randn(3, 7, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    target = torch.randint(11, (3, 7))
    plain = F.cross_entropy((hidden @ weight.T).flatten(0, 1), target.flatten(), reduction="sum", label_smoothing=0.1)
    expected = [plain, *torch.autograd.grad(plain, (hidden, weight))]
    for library in (kernel, seqpar):
        for call in (library.linear_cross_entropy, torch.compile(library.linear_cross_entropy, backend="eager")):
            loss = call(hidden, weight, target, label_smoothing=0.1, chunk_tokens=4).total
            got = [loss, *torch.autograd.grad(loss, (hidden, weight))]
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)
    assert kernel.linear_cross_entropy.__module__ == f"{kernel.__name__}.linear.cross_entropy"
    assert kernel.TokenLoss is not seqpar.TokenLoss
    # Under one name, the later of two versions would replace the other's operator
    for library in (kernel, seqpar):
        assert hasattr(getattr(torch.ops, library.__name__), "linear_cross_entropy")


def test_the_kernels_loss_is_exact_beside_the_package(kernel_folder):
    assert_exact_beside_the_package(import_as_kernels_does(kernel_folder))


@needs("kernels")
@pytest.mark.filterwarnings("ignore")
def test_kernels_itself_loads_the_folder_without_a_network(kernel_folder, monkeypatch):
    from kernels import get_local_kernel

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert_exact_beside_the_package(get_local_kernel(kernel_folder))


def test_a_kernel_imports_nothing_of_the_installed_package(kernel_folder):
    files = sorted((kernel_folder / "build/torch-universal").rglob("*.py"))
    assert len(files) > 50
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not [name for name in names if name.split(".")[0] == "seqpar"], f"{file}:{node.lineno}"


def test_an_import_that_cannot_be_relative_is_refused(tmp_path):
    (tmp_path / "seqpar").mkdir()
    (tmp_path / "seqpar/new.py").write_text("\nimport seqpar.rows\n")
    with pytest.raises(ValueError, match=r"seqpar/new.py:2: `import seqpar` cannot be relative: write `from seqpar"):
        write_kernel(PYPROJECT["project"], tmp_path / "seqpar", tmp_path / "kernel")
