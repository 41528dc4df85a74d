"""Run the library's tests on every supported pair of Python and torch: `nox`.

One pair is `nox -s "library-3.11(torch='2.13')"`; what follows `--` goes to pytest in place of all tests. nox leaves
out a Python that is not installed. CONTRIBUTING.md says which pairs have been tested, and when.
"""

from __future__ import annotations

import nox


@nox.session(python=["3.11", "3.12", "3.13"])
@nox.parametrize("torch", ["2.11", "2.13", "2.15"])
def library(session: nox.Session, torch: str) -> None:
    """Test the library, with the newest other packages that this torch allows."""
    # The interpreter of Triton 3.6, which torch 2.11 brings, fails with a newer NumPy
    numpy = "numpy<2.4" if torch == "2.11" else "numpy"
    packages = [".[integrations,testing,triton,trl]", numpy, "pytest-timeout", "pytest-xdist"]
    session.install(f"torch=={torch}.*", "-e", *packages)
    tests = session.posargs or ["tests/seqpar"]
    options = ["-n", "2", "--dist", "loadfile", "-q"]
    session.run("python", "-m", "pytest", *options, *tests, env={"HYPOTHESIS_PROFILE": "dev"})
