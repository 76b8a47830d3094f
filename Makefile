# Every command of the house. `make` alone lists them.
#   PYTHON=python3.12   the Python that makes the environment (3.10 or newer; one whose torch has CUDA lends its torch)
#   VENV=.venv          where the environment lies
#   PURLIN_CUDA=AUTO    build the CUDA module where nvcc is there; ON: or fail; OFF: never. Left out: wheels as AUTO, and a
#                       checkout as AUTO on a machine with an NVIDIA GPU, for it takes minutes to compile
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV ?= .venv
PYTEST_FLAGS ?=
cuda_here = $(or $(PURLIN_CUDA),$(if $(wildcard /dev/nvidia[0-9]*),AUTO,OFF))
cuda_anywhere = $(or $(PURLIN_CUDA),AUTO)
export PIP_DISABLE_PIP_VERSION_CHECK = 1

bin := $(VENV)/bin
pip := $(bin)/python -m pip --quiet
native := $(shell find csrc -name '*.?pp' -o -name '*.cu' -o -name '*.cuh')
run_each = for program in $(1); do echo "== $$program"; $(2) "$$program"; done

.PHONY: help demo test gpu check format headers cuda lint model tsan mutants device sanitize wheel bench build clean distclean

help: ## List these commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: build ## Draw a digit on two ranks; prints where the picture lies and the numbers beside it
	@$(bin)/python -m purlin_diffusion generate --model digits --ranks 2 --prompt "digit three" --out out/demo.png

test: $(VENV)/.dev build ## The tests; PYTEST_FLAGS="-k spec -x" chooses
	$(bin)/python -m pytest $(PYTEST_FLAGS)

gpu: $(VENV)/.dev build ## The tests that need a GPU, here a must
	$(bin)/python -m pytest tests/gpu --require gpu $(PYTEST_FLAGS)

check: $(VENV)/.dev ## Lint, format, types, layers: seconds
	$(bin)/ruff check --quiet .
	$(bin)/ruff format --quiet --check .
	$(bin)/clang-format --dry-run --Werror $(native) $(wildcard tests/cpp/*.?pp tests/cpp/*.cu*)
	$(bin)/mypy
	$(bin)/python -m pytest -q tests/test_architecture.py

format: $(VENV)/.dev ## Lay out Python and C++ as `check` wants it
	$(bin)/ruff check --quiet --fix-only .
	$(bin)/ruff format --quiet .
	$(bin)/clang-format -i $(native) $(wildcard tests/cpp/*.?pp tests/cpp/*.cu*)

headers: build/tests/build.ninja ## Compile each header on its own, by g++ and, where it is there, by nvcc
	$(bin)/cmake --build build/tests --target headers

cuda: build/tests/build.ninja ## Compile csrc/cuda for sm_80, sm_90a and sm_100a, warnings as errors (no GPU needed)
	$(bin)/cmake --build build/tests --target purlin_kernels

lint: $(VENV)/.tools ## Read the kernels' PTX for what the memory model forbids
	@$(bin)/python scripts/ptx_lint.py

model: build/tests/build.ninja ## Explore the protocol under the weakest legal Atom
	$(bin)/cmake --build build/tests --target all_model
	@$(call run_each,build/tests/model/*,)

# A fixed address layout: ThreadSanitizer of g++ 12 and older does not start under the random one of newer kernels.
tsan: build/tests/build.ninja ## The CPU Atom and the protocol on threads under ThreadSanitizer
	$(bin)/cmake --build build/tests --target all_tsan
	@$(call run_each,build/tests/tsan/*,setarch -R)

mutants: $(VENV)/.tools ## Take each guard of the protocol away in turn: a test must notice
	@$(bin)/python scripts/mutants.py

device: build/tests/build.ninja ## A soak of the kernels on this machine's GPU, plain and with delays
	$(bin)/cmake --build build/tests --target all_device
	@$(call run_each,build/tests/device/*,)

sanitize: build/tests/build.ninja ## compute-sanitizer over a short soak on this machine's GPU
	$(bin)/cmake --build build/tests --target device
	@for tool in memcheck racecheck synccheck; do for ranks in 2 3 4 8; do echo "== $$tool, $$ranks ranks"; \
	  compute-sanitizer --tool $$tool --error-exitcode 1 build/tests/device/device --mode fused --ranks $$ranks --calls 40 --bytes 16384 --timeout 120; \
	  compute-sanitizer --tool $$tool --error-exitcode 1 build/tests/device/device --mode fused --ranks $$ranks --calls 40 --bytes 4194304 --regime direct \
	    --kind copy --timeout 120; done; done

wheel: $(VENV)/.tools ## A wheel in dist/
	rm -rf dist
	PURLIN_CUDA=$(cuda_anywhere) $(pip) wheel --no-build-isolation --no-deps --config-settings build-dir=build/wheel --wheel-dir dist .
	@ls dist/*.whl

bench: build ## Latency of a picture: one rank against two, purlin against torch
	$(bin)/python -m purlin_diffusion latency --model digits --ranks 2 --json out/latency.json

clean: ## Remove what was built; the environment stays
	rm -rf build dist out .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## Remove the environment too
	rm -rf $(VENV)

# ---- the environment: a stamp a stage, so that a second call does nothing --------------------------------------------
build: $(VENV)/.built ## Make the environment and build the modules

$(VENV)/.tools:
	@command -v $(PYTHON) >/dev/null || { echo "make: no '$(PYTHON)' here. Install Python 3.10 or newer, or name one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "make: Python 3.10 or newer is needed; $$($(PYTHON) --version) came. Name another: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: $(PYTHON) lacks venv. On Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@command -v $(CXX) >/dev/null || { echo "make: no C++ compiler '$(CXX)' here. On Debian and Ubuntu: apt install g++; or name one: make CXX=clang++"; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || { echo "make: $(PYTHON) lacks its C headers. On Debian and Ubuntu: apt install python3-dev"; exit 1; }
	@echo "make: environment in $(VENV)"
	@if torch=$$($(PYTHON) -c 'import torch; assert torch.cuda.is_available(); print(torch.__version__)' 2>/dev/null); \
	then $(PYTHON) -m venv --system-site-packages $(VENV); echo "torch==$$torch" >$(VENV)/constraints.txt; \
	else $(PYTHON) -m venv $(VENV); cp constraints.txt $(VENV)/constraints.txt; fi
	$(pip) install 'scikit-build-core>=0.11' 'nanobind>=2.7' 'cmake>=3.26' ninja
	@touch $@

$(VENV)/.built: $(VENV)/.tools pyproject.toml CMakeLists.txt $(native)
	PURLIN_CUDA=$(cuda_here) $(pip) install -c $(VENV)/constraints.txt --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.tools pyproject.toml
	PURLIN_CUDA=$(cuda_here) $(pip) install -c $(VENV)/constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $@ $(VENV)/.built

build/tests/build.ninja: $(VENV)/.tools CMakeLists.txt
	$(bin)/cmake -S . -B build/tests -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(bin))/ninja -DPython_EXECUTABLE=$(abspath $(bin))/python -DPURLIN_MODULES=OFF -DPURLIN_TESTS=ON -DPURLIN_CUDA=$(cuda_anywhere) >/dev/null
