# Two commands for a new machine with Python 3.10 to 3.13 and nothing else:
#   make bench     set-up, then a first benchmark with the embedded model
#   make test      set-up, then linter, type check and tests
#
# torch: on Linux pip installs the build with CUDA, which a machine with an NVIDIA GPU needs and any other can use. To save
# some gigabytes on a machine without a GPU, point PIP_EXTRA_INDEX_URL at PyTorch's index of CPU wheels (its address is on
# the installation page of pytorch.org): pip prefers its build of the same version, and constraints.txt allows both.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PYTEST_ARGS ?= -n 2 --dist worksteal

comma := ,

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
NVIDIA := $(if $(shell command -v nvidia-smi 2>/dev/null),yes)

.PHONY: bench test test-hostile lint format clean gpu-pack gpu-run gpu-train notebooks readme system-packages
.DELETE_ON_ERROR:

bench: $(VENV)/.installed
	$(BIN)/python -m bench fetch models smollm2
	$(BIN)/python -m bench fetch data mtbench
	$(BIN)/python -m bench method=suffix dataset=mtbench measure=quick max_new_tokens=64 $(ARGS)

test: $(VENV)/.installed-dev lint
	$(BIN)/python -m bench fetch models smollm2
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# Inputs and events that should break the suite: over 500 cases, an hour on two cores.
test-hostile: $(VENV)/.installed-dev
	DECODEBENCH_HOSTILE=1 $(BIN)/python -m pytest tests/hostile $(PYTEST_ARGS)

# A machine with a GPU, see docs/gpu.md. gpu-pack collects what one without a network lacks, gpu-run measures where
# everything is installed, gpu-train trains there for hours. Each can be stopped and repeated.
gpu-pack: $(VENV)/.installed
	$(BIN)/python -m bench gpu pack $(ARGS)

gpu-run: $(VENV)/.installed-dev
	$(BIN)/python -m bench gpu run $(ARGS)

gpu-train: $(VENV)/.installed-dev
	$(BIN)/python -m bench gpu run stage=model,train $(ARGS)

# Regenerate the tables of README.md and docs/, and RESULTS.md, from the committed records.
readme: $(VENV)/.installed-dev
	$(BIN)/python -m bench.readme --write

notebooks: $(VENV)/.installed-dev
	$(BIN)/python notebooks/execute.py

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# An environment that is newer than its definition is kept.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV), which takes minutes the first time"
	$(PIP) install --constraint constraints.txt --editable '.$(if $(NVIDIA),[nvidia])'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV), which takes minutes the first time"
	$(PIP) install --constraint constraints.txt --editable '.[dev$(if $(NVIDIA),$(comma)nvidia)]'
	@touch $@ $(VENV)/.installed

$(BIN)/python:
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v < (3, 14) else "Python must be 3.10 to 3.13, got %d.%d. Choose one: make PYTHON=python3.12" % v)'
	$(PYTHON) -m venv $(VENV)

# SLURM and Chromium, which tests use if they are installed and skip otherwise.
system-packages:
	-@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
			! { command -v slurmctld && command -v chromedriver; } >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
			slurm-wlm slurmctld slurmd munge slurm-client chromium chromium-driver >/dev/null; fi

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
