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

.PHONY: bench test lint format clean gpu notebooks readme system-packages
.DELETE_ON_ERROR:

bench: $(VENV)/.installed
	$(BIN)/python -m bench fetch models smollm2
	$(BIN)/python -m bench fetch data mtbench
	$(BIN)/python -m bench method=eagle dataset=mtbench measure=quick max_new_tokens=64 $(ARGS)

test: $(VENV)/.installed-dev lint
	$(BIN)/python -m bench fetch models smollm2
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# Committed records that need a GPU, in order of value. Finished runs are skipped, so the target can be stopped and
# repeated; each training and each run takes less than ten minutes on a current card.
GPU := hardware=cuda_bf16 measure=quick paths.results=results/reference
HEADS := model=smollm2 hardware=cuda_bf16 force=true corpus=dolly,gsm8k train.answers.tokens=2000000 train.answers.limit=512 train.answers.batch=256 train.features=live
LONG := train.recipe.batch_size=64 train.recipe.steps=6000
EXITS := model=smollm2 hardware=cuda_bf16 force=true corpus=dolly:2200,gsm8k:800 train.answers.tokens=450000 train.answers.batch=256 train.tokens=393216
PAIRS := corpus=multi30k hardware=cuda_bf16 force=true
STUDENTS := model=multi30k_4_4 train.recipe.tokens=8192 train.recipe.steps=12000
FLOW := train.width=128 train.inner=256 'train.steps=[2,1]' train.recipe.learning_rate=5e-4
gpu: $(VENV)/.installed-dev
	$(BIN)/python -m bench fetch models smollm2
	$(BIN)/python -m bench fetch data mtbench
	$(BIN)/python -m pytest -m gpu
	-$(BIN)/python -m bench train method=eagle out=data/checkpoints/eagle-smollm2 $(HEADS) $(LONG)
	-$(BIN)/python -m bench train method=medusa out=data/checkpoints/medusa-smollm2 $(HEADS) $(LONG)
	-$(BIN)/python -m bench train method=hydra_heads out=data/checkpoints/hydra_heads-smollm2 $(HEADS) $(LONG)
	-$(BIN)/python -m bench train method=blockwise out=data/checkpoints/blockwise-smollm2 $(HEADS) $(LONG)
	-$(BIN)/python -m bench -m method=eagle,medusa,hydra_heads,blockwise dataset=mtbench $(GPU)
	-$(BIN)/python -m bench train method=teacher out=data/checkpoints/teacher-multi30k_4_4 $(PAIRS)
	-$(BIN)/python -m bench train method=specdec out=data/checkpoints/specdec-multi30k_4_4 model=multi30k_4_4 $(PAIRS)
	-$(BIN)/python -m bench train method=blockwise_translation out=data/checkpoints/blockwise_translation-multi30k_4_4 model=multi30k_4_4 $(PAIRS)
	-for student in nat glat depa cmlm ctc; do $(BIN)/python -m bench train method=$$student out=data/checkpoints/$$student-multi30k_4_4 $(STUDENTS) $(PAIRS); done
	-$(BIN)/python -m bench train method=flowseq out=data/checkpoints/flowseq-multi30k_4_4 $(STUDENTS) $(FLOW) $(PAIRS)
	-$(BIN)/python -m bench train method=teacher 'train.layers=[6,1]' train.data=distilled model=multi30k_4_4 out=data/checkpoints/teacher-multi30k_6_1_distilled $(PAIRS)
	-$(BIN)/python -m bench sweep=translation $(GPU)
	-$(BIN)/python -m bench train method=calm 'train.exits=[16,20,24,26,28]' train.recipe.steps=4000 out=data/checkpoints/calm-smollm2 $(EXITS)
	-$(BIN)/python -m bench train method=static_depth 'train.exits=[20,24,28]' train.recipe.steps=4000 out=data/checkpoints/static_depth-smollm2 $(EXITS)
	-$(BIN)/python -m bench train method=free 'train.exits=[20,24,26]' train.recipe.steps=4000 out=data/checkpoints/free-smollm2 $(EXITS)
	-$(BIN)/python -m bench sweep=frontier $(GPU)
	-$(BIN)/python -m bench sweep=frontier_static $(GPU)
	-$(BIN)/python -m bench train method=exit_teacher model=multi30k_4_4 $(PAIRS)
	-$(BIN)/python -m bench -m method=eagle method.tree=dynamic method.depth=6 method.top_k=10 method.nodes=59 dataset=mtbench $(GPU)
	-$(BIN)/python -m bench -m method=medusa,hydra_heads method.tree=mc_sim_7b_63 dataset=mtbench $(GPU)
	-$(BIN)/python -m bench -m method=eagle,medusa,hydra_heads,blockwise dataset=mtbench batch_size=4,16,32 $(GPU)
	-$(BIN)/python -m bench -m method=prompt_lookup,hf_generate,hf_prompt_lookup dataset=mtbench $(GPU)
	-$(BIN)/python -m bench -m method=speculative_sampling,hf_assisted dataset=mtbench $(GPU)
	-$(BIN)/python -m bench -m method=suffix,token_recycling,lookahead dataset=mtbench $(GPU)
	-$(BIN)/python -m bench -m method=token_recycling method.tree=paper dataset=mtbench $(GPU)
	-$(BIN)/python -m bench -m method=lookahead method.window=15 method.ngram=5 method.guesses=15 dataset=mtbench $(GPU)
	-$(BIN)/python -m bench -m method=prompt_lookup dataset=mtbench batch_size=4,16,32 $(GPU)
	-$(BIN)/python -m bench -m method=prompt_lookup,speculative_sampling dataset=mtbench sampling=sample $(GPU)
	$(BIN)/python -m bench lossless experiment=sampling method=speculative_sampling hardware=cuda_bf16

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
