"""A release is the last commit, the same bits wherever it is built, and nothing is released that cannot be checked."""

import subprocess
from pathlib import Path

import pytest

from release.__main__ import ROOT, built_twice, check_public_names, finish, git, last_commit, refuse_differences

NAMED = {"urls": {"Repository": "https://example.org/owner/name"}}
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


@pytest.mark.parametrize("project", [{}, {"urls": {"Repository": ""}}, {"urls": {"Repository": "TODO"}}])
def test_nothing_is_released_without_the_repositorys_address(project, tmp_path):
    (tmp_path / "seqpar.whl").write_text("the wheel")
    with pytest.raises(SystemExit, match=r"write Repository = \"https://...\" under \[project.urls\]"):
        finish([tmp_path / "seqpar.whl"], project, tmp_path / "dist")
    assert not (tmp_path / "dist").exists()


def test_what_is_released_agrees_with_its_hashes(tmp_path):
    (tmp_path / "seqpar.whl").write_text("the wheel")
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist/older.whl").write_text("of another release")
    finish([tmp_path / "seqpar.whl"], NAMED, tmp_path / "dist")
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"],
        cwd=tmp_path / "dist",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "seqpar.whl: OK\n"
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
