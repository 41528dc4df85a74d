"""Make the files of a release from the last commit, and check them: `make release`.

Nothing reaches dist/ before every check has passed. The address of the repository has one place,
`project.urls.Repository` in pyproject.toml; without it nothing is released.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from typing import Any

import yaml
from packaging.version import Version

from release.conda import recipe
from release.hub_kernel import write_kernel

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build/release"


def git(*arguments: str, checkout: Path = ROOT) -> str:
    """Return what git prints in the checkout."""
    done = subprocess.run(["git", *arguments], cwd=checkout, check=True, capture_output=True, text=True)
    return done.stdout.rstrip()


def sha256(file: Path) -> str:
    """Return a file's hash."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def last_commit(version: str, checkout: Path = ROOT) -> str:
    """Return the commit to build; refuse changes that it lacks, a history without tags, a tag of another version."""
    if git("rev-parse", "--is-shallow-repository", checkout=checkout) == "true":
        sys.exit("[release] a shallow clone may lack the earlier tags: git fetch --unshallow --tags")
    if changed := git("status", "--porcelain=v1", checkout=checkout).splitlines():
        sys.exit(f"[release] {changed[0][3:]} is not as in the last commit ({len(changed)} such): commit or remove it")
    tags = git("tag", "--points-at", "HEAD", checkout=checkout).split()
    if tags and f"v{version}" not in tags:
        sys.exit(
            f"[release] the last commit has the tag {tags[0]}, pyproject.toml the version {version}: make them agree"
        )
    return git("rev-parse", "HEAD", checkout=checkout)


def build(commit: str, folder: Path, umask: int, zone: str) -> list[Path]:
    """Clone a commit into a folder; build the source distribution, and the wheel from it."""
    subprocess.run(["git", "clone", "--quiet", "--no-checkout", ROOT, folder], check=True)
    subprocess.run(["git", "checkout", "--quiet", "--detach", commit], cwd=folder, check=True, umask=umask)
    environment = {**os.environ, "SOURCE_DATE_EPOCH": git("log", "-1", "--format=%ct", commit), "TZ": zone}
    command = [sys.executable, "-m", "build", "--no-isolation"]
    done = subprocess.run(
        command, cwd=folder, env=environment, umask=umask, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"[release] the build in {folder} failed:\n{done.stdout}{done.stderr}")
    return sorted((folder / "dist").iterdir())


def built_twice(commit: str, work: Path) -> list[Path]:
    """Build a commit in two folders, with other permissions and in another time zone, and return the files."""
    first = build(commit, work / "first", 0o022, "UTC")
    second = build(commit, work / "another folder", 0o077, "Asia/Kathmandu")
    refuse_differences(first, second)
    return first


def refuse_differences(first: list[Path], second: list[Path]) -> None:
    """Stop unless two builds have the same files, bit for bit."""
    for one, other in zip(first, second, strict=True):
        if sha256(one) != sha256(other):
            sys.exit(
                f"[release] two builds of one commit differ, SHA-256 {sha256(one)} and {sha256(other)}: compare {one} "
                f"with {other}"
            )


def check_description(files: list[Path]) -> None:
    """Check that the index will accept the metadata and can show the README."""
    subprocess.run([sys.executable, "-m", "twine", "--no-color", "check", "--strict", *files], check=True)


def fill_index(files: list[Path], index: Path) -> None:
    """Make a folder that pip can install from without a network: the files, what they require and what builds them."""
    index.mkdir()
    for file in files:
        shutil.copy(file, index)
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = [*needed["project"]["dependencies"], *needed["build-system"]["requires"]]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "-c", ROOT / "constraints.txt", "-d", index, *packages], check=True)


def check_readme(index: Path, environment: Path, *options: str) -> None:
    """Install seqpar from an index folder alone into a bare environment, and run the README's Python there."""
    venv.create(environment, with_pip=True)
    python = environment / "bin/python"
    pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-index", "--find-links", index, *options, "seqpar"], check=True)
    on_ranks, in_one = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    (environment / "train.py").write_text(on_ranks)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    for arguments in (launcher, ["-c", in_one]):
        # -I: neither the current folder nor the user's packages
        subprocess.run([python, "-I", *arguments], cwd=environment, check=True)


def tag_before() -> str:
    """Return the newest tag before the last commit, or nothing."""
    describe = ["git", "describe", "--tags", "--abbrev=0", "HEAD^"]
    return subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def check_public_names(version: str, tag: str, checkout: Path = ROOT) -> None:
    """Compare the public names and their arguments with those that docs/api documents at an earlier tag.

    A version that breaks one needs a new minor number before 1.0, and a new major number from then on.
    """
    documented = git("grep", "-h", "automodule::", tag, "--", "docs/api", checkout=checkout)
    modules = [line.split()[-1] for line in documented.splitlines()]
    # The package itself loads its names from there when they are asked for
    modules = ["seqpar.names" if module == "seqpar" else module for module in modules]
    command = [sys.executable, "-m", "griffe", "check", "--no-color", "--against", tag]
    broken = [name for name in modules if subprocess.run([*command, name], cwd=checkout, check=False).returncode]
    old, new = Version(tag.removeprefix("v")), Version(version)
    if broken and old.major == new.major and (new.major > 0 or old.minor == new.minor):
        way_out = f"{new.major + 1}.0.0" if new.major else f"0.{new.minor + 1}.0"
        sys.exit(
            f"[release] {version} breaks public names of {tag} in {', '.join(broken)}, as listed above: keep them, or "
            f"make it version {way_out}"
        )


def finish(files: list[Path], pyproject: dict[str, Any], dist: Path) -> None:
    """Fill dist/: the files with their hashes in SHA256SUMS, and what conda-forge and Hugging Face's Hub take.

    Refuse a project without the repository's address.
    """
    project = pyproject["project"]
    address = project.get("urls", {}).get("Repository", "")
    if not re.fullmatch(r"https://[^\s/]+/\S+", address):
        sys.exit(
            f"[release] pyproject.toml has {address!r} as the repository's address, so {dist.name}/ stays as it is: "
            'write Repository = "https://..." under [project.urls]'
        )
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir()
    for file in files:
        shutil.copy(file, dist)
    (dist / "SHA256SUMS").write_text("".join(f"{sha256(file)}  {file.name}\n" for file in files))
    sdist = next(file for file in files if file.name.endswith(".tar.gz"))
    (dist / "recipe.yaml").write_text(yaml.safe_dump(recipe(pyproject, sha256(sdist)), sort_keys=False, width=120))
    write_kernel(project, ROOT / "seqpar", dist / "kernel")
    print(f"[release] pip has the tagged commit as: pip install git+{address}@v{project['version']}")


def main() -> None:
    """Make the files, check them and print their hashes."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = pyproject["project"]
    commit = last_commit(project["version"])
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    print(f"[release] seqpar {project['version']} from commit {commit}: two builds", flush=True)
    files = built_twice(commit, WORK)
    for file in files:
        print(f"[release] SHA-256 {sha256(file)}  {file.name}", flush=True)
    check_description(files)
    print("[release] an index folder with the files and what they need", flush=True)
    fill_index(files, WORK / "index")
    for kind, options in (("wheel", []), ("source distribution", ["--no-binary", "seqpar"])):
        print(f"[release] the README's Python with the {kind}, installed from that folder alone", flush=True)
        check_readme(WORK / "index", WORK / kind.replace(" ", "_"), *options)
    if tag := tag_before():
        check_public_names(project["version"], tag)
    else:
        print("[release] no earlier tag: the first release has no public names to compare with")
    finish(files, pyproject, ROOT / "dist")
    print(
        "[release] dist/ has the files, and their hashes in SHA256SUMS; conda-forge's recipe.yaml and the Hub's kernel/"
    )


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as failed:
        printed = f"\n{failed.stderr}" if failed.stderr else ", after the lines above"
        sys.exit(f"[release] `{shlex.join(map(str, failed.cmd))}` ended with {failed.returncode}{printed}")
