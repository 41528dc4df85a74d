# Two commands are enough: `make demo` and `make test`. Each creates the environment it needs.
PYTHON ?= python3
BIN := .venv/bin
# One more than two cores have: a test that waits for its processes leaves time for another one
WORKERS ?= 3
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Without the tests that choose their devices themselves: ranks over gloo, refusals of odd tensors, and torch.compile
SWITCHED := tests/seqpar/core tests/seqpar/engine tests/seqpar/linear tests/seqpar/multi_device tests/seqpar/objectives \
  tests/seqpar/testing tests/seqpar/test_every_option.py tests/recipes/training/test_accelerators.py \
  --ignore tests/seqpar/linear/test_compile.py

.PHONY: help demo test pytest test-long test-launched test-accelerator test-kernels test-faults test-formats test-tutorial test-hf test-browser test-newest test-trainers mutants docs release check bench bench-gpu clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 15

.venv/made:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"seqpar needs Python 3.11 or newer; $(PYTHON) is {v[0]}.{v[1]}. Choose another one: make PYTHON=python3.12 ...")'
	@echo "[env] creating .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv
	@touch $@

.venv/recipes: .venv/made pyproject.toml constraints.txt
	@echo "[env] installing torch and the packages for the recipes (a minute or two, once)"
	@$(PIP) -e '.[recipes]'
	@touch $@

.venv/dev: .venv/made pyproject.toml constraints.txt
	@echo "[env] installing torch and the packages for recipes, tests and checks (two to four minutes, once)"
	@$(PIP) -e '.[recipes,test,dev]'
	@touch .venv/recipes $@

demo: .venv/recipes  ## train, evaluate and try a translation model on the built-in corpus (3 to 7 minutes on 2 cores)
	@$(BIN)/python -m recipes.translation demo --processes auto

# Side by side: mypy has one busy process, and would leave the other cores idle
test: .venv/dev  ## run the checks and the tests (8 to 20 minutes on 2 cores)
	@$(MAKE) --no-print-directory --jobs 2 check pytest

pytest: .venv/dev
	@echo "[test] pytest, hypothesis profile $${HYPOTHESIS_PROFILE:-ci}"
	@HYPOTHESIS_PROFILE=$${HYPOTHESIS_PROFILE:-ci} $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=10 --ignore tests/browser

# One collection for six suites, and while one waits for its processes or for its last test, another one works
test-long: .venv/dev  ## test-launched, test-faults, test-formats, test-tutorial, test-kernels and test-hf in one run, which takes less time than the six (18 to 23 minutes on 2 cores)
	@echo "[test-long] pytest, the long suites beside make test"
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m 'launched or faults or formats or tutorial or kernels or hf_models' -q --durations=10 tests/test_documents.py tests/tutorials tests/examples tests/benchmarks tests/recipes tests/seqpar/kernels tests/seqpar/integrations

test-launched: .venv/dev  ## check the recipe over several processes: layouts, launchers, signals, lost processes, two machines, limits of memory, the service, and with compiled layers (5 to 9 minutes on 2 cores)
	@echo "[test-launched] pytest, the recipe over several processes"
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m launched -q --durations=5 tests/recipes

test-faults: .venv/dev  ## check the recipe under kills, interrupts, hostile files and links in a run's folder (about 2 minutes on 2 cores)
	@echo "[test-faults] pytest, the recipe killed, interrupted and given hostile files"
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m 'faults and not formats' -q --durations=5 tests/recipes

test-tutorial: .venv/dev  ## run the tutorials of docs/ as printed, the examples, and the trainings of docs/results/ and the parts for a GPU made short (about 4 minutes on 2 cores)
	@echo "[test-tutorial] pytest, every block of the tutorials, every example, every training of the results"
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m tutorial -q --durations=5 tests/tutorials tests/examples tests/benchmarks tests/test_documents.py

test-formats: .venv/dev  ## check imports from and exports to other programs' formats against these programs (a minute or two)
	@echo "[test-formats] pytest, models of Hugging Face transformers, CTranslate2 and ONNX"
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m formats -q --durations=5 tests/recipes

test-accelerator: .venv/dev  ## run the library's tests on two emulated accelerators, which have the CPU's memory and report races of streams (5 to 7 minutes on 2 cores)
	@echo "[test-accelerator] pytest, tensors on another device than the CPU"
	@SEQPAR_TEST_DEVICE=emulated HYPOTHESIS_PROFILE=quick $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -q --durations=5 $(SWITCHED)

test-kernels: .venv/dev  ## compile Triton's kernels, and interpret them with every option (a minute or two)
	@echo "[test-kernels] pytest, Triton's kernels compiled and interpreted"
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -q --durations=5 -m kernels tests/seqpar/kernels

test-hf: .venv/dev  ## check loss and scores in every model class of Hugging Face transformers (about 3 minutes on 2 cores)
	@echo "[test-hf] pytest, every causal and conditional model class, and decoders under TRL"
	@$(BIN)/python -m pytest -n $(WORKERS) -m hf_models -q --durations=5 tests/seqpar/integrations

test-browser: .venv/dev  ## make the site, and check it and the recipe's pages in headless Chromium, where it is installed (two minutes)
	@echo "[test-browser] pytest, pages in headless Chromium"
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m browser -q tests/browser

.venv-newest/made:
	@echo "[env] creating .venv-newest with the newest torch and trainers of the index, which bring gigabytes for GPUs on Linux"
	@$(PYTHON) -m venv .venv-newest
	@.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check -e '.[integrations,triton]' hypothesis numpy peft pytest pytest-timeout pytest-xdist trl
	@touch $@

test-newest: .venv-newest/made  ## run the library's tests on the newest torch and trainers, in an environment of their own (about 10 minutes on 2 cores)
	@.venv-newest/bin/python -c 'import torch, transformers, trl; print(f"[test-newest] pytest, torch {torch.__version__}, transformers {transformers.__version__}, trl {trl.__version__}")'
	@HYPOTHESIS_PROFILE=dev .venv-newest/bin/python -m pytest -n $(WORKERS) --dist loadfile -q --durations=5 tests/seqpar

TRAINER_TESTS := $(patsubst %,tests/seqpar/integrations/test_%_itself.py,axolotl deepspeed ms_swift nemo_automodel torchtitan)
.trainers/made: .venv/dev
	@echo "[env] unpacking axolotl, DeepSpeed, ms-swift, NeMo AutoModel, torchtitan, kernels and rattler-build, and what they import, into .trainers"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .trainers axolotl==0.19.0 ms-swift==4.6.0 nemo-automodel==0.7.0 torchtitan==0.3.0 kernels==0.17.2 py-rattler-build==0.73.0 addict==2.4.0 deepspeed==0.19.8 docstring_parser==0.18.0 einops==0.8.2 hjson==3.1.0 json_repair==0.64.6 llvmlite==0.50.0 modelscope==1.40.2 modelscope_hub==0.5.1 msgpack==1.2.4 ninja==1.13.2 numba==0.68.1 py-cpuinfo==9.0.0 spmd_types==0.3.1 torchao==0.17.0 torchdata==0.11.0 tyro==1.0.17
	@touch $@

test-trainers: .trainers/made  ## run the loss in the trainers of other projects, from their wheels, on the CPU, and what a release hands to kernels and conda (about 4 minutes on 2 cores)
	@$(BIN)/python -m pip list --path .trainers 2>/dev/null | grep -E 'axolotl|deepspeed|swift|nemo|torchtitan|kernels|rattler'
# A process each: importing one of them changes transformers' classes for all
	@for tests in $(TRAINER_TESTS) tests/seqpar/distributed/test_spmd_types.py 'tests/conformance/test_layout_conformance.py -k deepspeed' 'tests/test_release.py -k itself'; do \
	  PYTHONPATH=.trainers $(BIN)/python -m pytest -q --durations=3 $$tests || exit 1; done

COUNT ?= 300
SEED ?= 0
mutants: .venv/dev  ## plant faults in the code, COUNT=300 of them, drawn by SEED=0, and show those that no test notices
	@HYPOTHESIS_PROFILE=dev nice $(BIN)/python -m tests.mutants --count $(COUNT) --seed $(SEED)

docs: .venv/dev  ## make the site, build/docs/index.html, without a network (half a minute)
	@$(BIN)/python -m sphinx --quiet --fail-on-warning --nitpicky --fresh-env docs build/docs
	@echo "[docs] build/docs/index.html"

release: .venv/dev  ## build the last commit twice, check both, install the wheel elsewhere, and fill dist/ with what may be published (some minutes)
	@$(BIN)/python -m release

check: .venv/dev  ## run the linter, the format check, strict type checks and the import contracts
	@echo "[check] ruff"
	@$(BIN)/ruff check --quiet . && $(BIN)/ruff format --quiet --check .
	@echo "[check] mypy --strict"
	@$(BIN)/mypy
	@echo "[check] import contracts"
	@$(BIN)/lint-imports

.venv/bench: .venv/dev
	@echo "[env] installing matplotlib, and the other implementations where available (a minute, once)"
	@$(PIP) -e '.[recipes,test,dev,bench]'
	@$(PIP) -e '.[peers]' || echo "[env] implementations that could not be installed are left out"
	@touch $@

bench: .venv/bench  ## compare the loss with other implementations in speed and memory (two hours on 2 cores; resumes where it was stopped)
	@$(BIN)/python -m benchmarks.loss

.venv/bench-gpu: .venv/dev
	@echo "[env] installing the other implementations for GPUs (a minute, once)"
	@$(PIP) -e '.[recipes,test,dev,bench]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check liger-kernel quack-kernels cut-cross-entropy || echo "[env] implementations that could not be installed are left out"
	@touch $@

bench-gpu: .venv/bench-gpu  ## on a CUDA device, run the GPU tests and benchmarks (at most 13 minutes; each number as soon as it is known, one table a part)
	@$(BIN)/python -m benchmarks.gpu

clean:  ## remove the environment and the caches, but not runs/
	rm -rf .venv .venv-newest .trainers .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis *.egg-info build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
