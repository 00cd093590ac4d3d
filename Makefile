# Everything here works on a machine that has only Python (3.10 or newer) and make.
# The first target you run creates .venv and installs into it; later runs find the stamp file and go straight on.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
FLOOR  := .venv-floor
FLOOR_TORCH := torch==2.9.0
FLOOR_PIP   := $(FLOOR)/bin/python -m pip install --quiet --disable-pip-version-check
PIP    := $(PY) -m pip install --quiet --disable-pip-version-check
# Extra arguments for the pip call that installs torch, such as an index that has another build of it.
TORCH_PIP_ARGS ?=

# One thread a process: with as many processes as cores, more threads only get in each other's way
# (and torch.distributed.run prints a warning when the number is left open).
export OMP_NUM_THREADS ?= 1
# Torch asks for the name behind each connection; where nobody answers, do not wait 5 s for it.
export RES_OPTIONS ?= timeout:1 attempts:1
# Some virtual machines announce matrix instructions that they do not run; torch in bf16 then dies of one.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16
# Hundreds of processes would compile the same modules again where the environment says not to keep them.
export PYTHONDONTWRITEBYTECODE :=
# More than there are cores: a test of several processes mostly waits.
TEST_WORKERS ?= 5
RANKS2 := $(PY) -m torch.distributed.run --standalone --nproc-per-node 2

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint types docs soak soak-long floor bench clean

help:   ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.installed   ## train a small digit classifier on 2 processes
	$(VENV)/bin/lockstep launch --cpu --num_processes 2 examples/digits.py

test: $(VENV)/.installed   ## run the whole test suite
	@bash scripts/apt.sh
	$(PY) -m pytest -n $(TEST_WORKERS) --dist loadgroup --no-loadscope-reorder

lint: $(VENV)/.installed   ## ruff (rules and format) and the import contracts
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/lint-imports

types: $(VENV)/.installed   ## mypy, strict
	$(PY) -m mypy

docs: $(VENV)/.installed-docs   ## the documentation as a site, in build/docs/html; broken links and orphan pages are errors
	$(PY) -m sphinx --builder html --fail-on-warning --keep-going --nitpicky --quiet -d build/docs/doctrees docs build/docs/html
	@echo "build/docs/html/index.html"

soak: $(VENV)/.installed-bench   ## the long test matrices; keeps their output in docs/project/soak.md
	@bash scripts/apt.sh
	$(PY) scripts/keep_output.py soak

soak-long: $(VENV)/.installed-bench   ## large counts: hundreds of kills; keeps their output in docs/project/soak-long.md
	@bash scripts/apt.sh
	$(PY) scripts/keep_output.py soak-long

floor: $(FLOOR)/.installed   ## unit and 2-process tests on the oldest supported torch; keeps their output in docs/project/floor.md
	@bash scripts/apt.sh
	$(FLOOR)/bin/python scripts/keep_output.py floor

bench: $(VENV)/.installed-bench   ## time training steps and loaders next to raw torch and others, 1 and 2 processes
	$(PY) benchmarks/loop.py
	$(RANKS2) benchmarks/loop.py
	$(PY) benchmarks/data.py
	$(RANKS2) benchmarks/data.py
	$(PY) benchmarks/launch.py
	$(PY) benchmarks/weights.py
	$(PY) benchmarks/offload.py

clean:   ## remove caches and build output (.venv stays)
	rm -rf build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache src/*.egg-info
	find src tests examples benchmarks scripts -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# torch goes in first and alone, at the version of constraints.txt, so that no later step can pull another build.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Lockstep needs Python 3.10 or newer; '$(PYTHON)' is older or missing. Set another: make PYTHON=python3.12 ..."; exit 1; }
	@test -x $(VENV)/bin/pip || { echo "Creating $(VENV) (some seconds)"; $(PYTHON) -m venv $(VENV); }
	@echo "Installing $$(grep -m1 '^torch==' constraints.txt) (one to ten minutes the first time; it is a large download)"
	@$(PIP) $(TORCH_PIP_ARGS) "$$(grep -m1 '^torch==' constraints.txt)"
	@echo "Installing Lockstep and its development tools (about a minute)"
	@$(PIP) -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	@echo "Installing what builds the documentation (half a minute)"
	@$(PIP) -c constraints.txt -e '.[docs]'
	@touch $@

# An environment of its own, several gigabytes where only builds for CUDA are to be had.
$(FLOOR)/.installed: pyproject.toml constraints.txt
	@test -x $(FLOOR)/bin/pip || { echo "Creating $(FLOOR) (some seconds)"; $(PYTHON) -m venv $(FLOOR); }
	@echo "Installing $(FLOOR_TORCH), the oldest that is supported (a few minutes; it is a very large download)"
	@$(FLOOR_PIP) $(TORCH_PIP_ARGS) $(FLOOR_TORCH)
	@grep -v '^torch==' constraints.txt > $(FLOOR)/constraints.txt
	@$(FLOOR_PIP) -c $(FLOOR)/constraints.txt $(FLOOR_TORCH) -e '.[dev]'
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed
	@echo "Installing what the benchmark compares with (about a minute)"
	@$(PIP) -c constraints.txt -e '.[bench]'
	@touch $@
