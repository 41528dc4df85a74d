"""Tests with the real models of packages that no extra installs are collected where those can be imported."""

from importlib.util import find_spec

PACKAGES = ("deepspeed", "eole", "fairseq", "onmt", "ray", "torchtitan")
collect_ignore = [f"test_{name}_itself.py" for name in PACKAGES if find_spec(name) is None]
