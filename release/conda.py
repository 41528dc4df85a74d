"""Write the recipe that conda-forge builds a package from, in the format of rattler-build (`recipe.yaml`, version 1).

It is made from pyproject.toml and the released file, so that neither is stated a second time.
"""

from __future__ import annotations

from typing import Any

from packaging.requirements import Requirement

ON_CONDA_FORGE = {"hatchling": "hatchling", "torch": "pytorch"}
"""The names there of the packages that we require here."""


def recipe(pyproject: dict[str, Any], sdist_sha256: str) -> dict[str, Any]:
    """Return the recipe of a project with the repository's address."""
    project = pyproject["project"]
    address = project["urls"]["Repository"]
    python = "python ${{ python_min }}.*"
    pip = "${{ PYTHON }} -m pip install . -vv --no-deps --no-build-isolation"
    return {
        "schema_version": 1,
        "context": {"version": project["version"], "python_min": project["requires-python"].removeprefix(">=")},
        "package": {"name": project["name"], "version": "${{ version }}"},
        "source": {
            "url": f"https://pypi.org/packages/source/{project['name'][0]}/{project['name']}/"
            f"{project['name']}-${{{{ version }}}}.tar.gz",
            "sha256": sdist_sha256,
        },
        "build": {"number": 0, "noarch": "python", "script": pip},
        "requirements": {
            "host": [python, "pip", *map(conda_requirement, pyproject["build-system"]["requires"])],
            "run": ["python >=${{ python_min }}", *map(conda_requirement, project["dependencies"])],
        },
        "tests": [
            {
                "python": {
                    "imports": [project["name"], f"{project['name']}.names"],
                    "python_version": ["${{ python_min }}.*", "*"],
                    "pip_check": True,
                }
            }
        ],
        "about": {
            "homepage": address,
            "repository": address,
            "summary": project["description"],
            "license": project["license"],
            "license_file": project["license-files"],
        },
        "extra": {"recipe-maintainers": [address.split("/")[3]]},
    }


def conda_requirement(text: str) -> str:
    """Return a requirement in conda's words; refuse a package whose name there is not known."""
    requirement = Requirement(text)
    if requirement.name not in ON_CONDA_FORGE:
        raise ValueError(f"{text} in pyproject.toml: add its name on conda-forge to ON_CONDA_FORGE in {__name__}")
    return f"{ON_CONDA_FORGE[requirement.name]} {requirement.specifier}".rstrip()
