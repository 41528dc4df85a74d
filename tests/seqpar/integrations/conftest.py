"""Tests with the real models of packages that no extra installs are collected where those can be imported."""

from importlib.util import find_spec

collect_ignore = [f"test_{name}_itself.py" for name in ("eole", "fairseq", "onmt") if find_spec(name) is None]
