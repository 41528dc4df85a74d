"""Tests with the real models of packages that no extra installs are collected where those can be imported."""

from importlib.util import find_spec

PACKAGES = [
    "axolotl",
    "deepspeed",
    "eole",
    "nemo_automodel",
    "onmt",
    "prime_rl",
    "ray",
    "torchtitan",
    "xtuner",
]
collect_ignore = [f"test_{name}_itself.py" for name in PACKAGES if find_spec(name) is None]
if find_spec("swift") is None:
    collect_ignore.append("test_ms_swift_itself.py")
