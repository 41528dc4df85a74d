"""What is shipped: the wheel holds seqpar alone, and importing it brings nothing along but torch."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_wheel_holds_seqpar_alone_with_its_types(tmp_path):
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"seqpar"}
    assert "seqpar/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


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
