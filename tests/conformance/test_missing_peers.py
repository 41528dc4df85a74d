"""What of a peer is missing, broken or loud is said in one line, and leaves no trace."""

import importlib.metadata
import logging
import os
import sys
import warnings
from types import ModuleType

import pytest

from conformance.adapter import load, quietly, why_missing
from conformance.report import installed_version

pytestmark = pytest.mark.unswitched


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere:x", "No module named 'nowhere'"),
        ("math:nothing", "module 'math' has no attribute 'nothing'"),
        (":x", "Empty module name"),
    ],
)
def test_an_adapter_that_cannot_be_loaded_is_named_with_the_reason(name, why):
    with pytest.raises(ValueError, match=rf"^'{name}' cannot be loaded: {why}$"):
        load(name)


def test_why_a_package_cannot_be_imported_is_said_in_one_line(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "in_need.py").write_text("import nowhere_to_be_found")
    (tmp_path / "broken.py").write_text("raise RuntimeError('''\\n no GPU is here\\nand more''')")
    (tmp_path / "mute.py").write_text("raise OSError")
    assert why_missing("math") == ""
    assert why_missing("nowhere_to_be_found.inner") == "not installed"
    assert why_missing("in_need") == "not installed: it needs nowhere_to_be_found"
    assert why_missing("broken") == "cannot be imported: no GPU is here"
    assert why_missing("mute") == "cannot be imported: OSError"


def test_what_a_package_says_and_sets_while_it_runs_leaves_no_trace(monkeypatch, caplog):
    monkeypatch.setenv("OF_THE_TEST", "before")

    def loud():
        os.environ["OF_THE_TEST"] = "after"
        warnings.warn("a warning is an error in tests", stacklevel=1)
        logging.getLogger("package").warning("in between")
        logging.getLogger("package").error("an error")
        return 3

    assert quietly(loud) == 3
    with pytest.raises(ZeroDivisionError):
        quietly(lambda: 1 / 0)
    logging.getLogger("package").warning("afterwards")
    assert [record.message for record in caplog.records] == ["an error", "afterwards"]
    assert os.environ["OF_THE_TEST"] == "before"


def test_the_version_of_a_clone_is_the_one_that_it_says(monkeypatch):
    clone = ModuleType("a_clone")
    monkeypatch.setitem(sys.modules, "a_clone", clone)
    assert installed_version("a-clone") == installed_version("nowhere") == "not installed"
    clone.__version__ = "1.2"
    assert installed_version("a-clone") == "1.2"
    assert installed_version("torch") == importlib.metadata.version("torch")
