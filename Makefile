# `make demo` and `make test` need nothing but make and Python 3.10 to 3.14. The first call creates
# .venv and installs what the machine can use: the GPU stack that fits the driver, or, without a
# GPU, a CPU build of PyTorch and the run-time compiler.
#
# Variables, all optional:
#   PYTHON=/path/to/python   use this prepared environment as it is: no .venv, nothing is installed
#   BASE_PYTHON=python3.12   the interpreter that creates .venv (default: python3)
#   TORCH_SPEC=torch==2.10.0 which PyTorch to install into .venv
#   TORCH_INDEX=URL          one more package index for it, such as PyTorch's own CPU-only index
#   BENCH=prefill            what `make bench` measures: decode (the default), prefill, gemm, linear,
#                            window, step, host, start
#   HUNT_REPLAYS=5000        how often `make hunt` replays each chain of kernels
#   SOAK_MINUTES=30          how long `make soak` runs
#   TOOLS="memcheck racecheck"   the tools of `make sanitize` (default: all four)
#   SANITIZE_ARGS="-m gpu"       the tests that they watch, for pytest (default: every kernel once)
#   DEMO_ARGS, TEST_ARGS, BENCH_ARGS   passed on to the demo, to pytest and to the benchmark

.DEFAULT_GOAL := help
.PHONY: help demo test docs check-install fuzz coverage compile-all hunt soak sanitize lint check-style check-types \
  check-cuda format wheel bench clean

BASE_PYTHON ?= python3
DEMO_ARGS ?=
TEST_ARGS ?=
TOOLS ?=
SANITIZE_ARGS ?=
BENCH ?= decode
BENCH_ARGS ?=
HUNT_REPLAYS ?= 5000
SOAK_MINUTES ?= 30
CUDA_SOURCES = $(shell find cuda_src -name '*.cu' -o -name '*.cuh')

ifneq ($(strip $(PYTHON)),)
PREPARED := yes
PY := $(if $(findstring /,$(PYTHON)),$(abspath $(PYTHON)),$(PYTHON))
RUN_ENV :=
DEV_ENV :=
# An installed k3cupy is the one under test; where there is none, it is this checkout.
INSTALLED := $(shell cd / && $(PY) -c 'import importlib.util as u; print(u.find_spec("k3cupy") or "")')
ifeq ($(INSTALLED),)
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
endif
else
PREPARED :=
PY := $(CURDIR)/.venv/bin/python
RUN_ENV := .venv/.ready-to-run
DEV_ENV := .venv/.ready-to-test
endif

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(RUN_ENV) ## Run one Kimi-K3 MLA decode layer, in two fused forms and unfused, and compare
	@$(PY) examples/mla_decode_step.py $(DEMO_ARGS)

# pytest starts in tests/, so that `k3cupy` is the one that the environment finds, also a wheel.
# $(call pytest,PROCESSES,RUNNER): its command line, with as many processes as cores up to a number.
pytest = $(PY) $(2) -m pytest -c ../pyproject.toml --rootdir .. $$($(PY) -c \
  'import importlib.util as u; print("-n auto --maxprocesses $(1) --dist loadgroup" * bool(u.find_spec("xdist")))')

# When make was called, for the tests to say at their end how long it all took.
test: export TEST_BEGAN := $(shell date +%s)
test: $(DEV_ENV) ## Lint, types, the docs' site, every test that this machine can run, the wheel; and how long it took
	@$(MAKE) --no-print-directory --jobs=4 lint docs
	@cd tests && $(call pytest,8) --durations=15 --durations-min=1 $(TEST_ARGS)

docs: $(DEV_ENV) ## Build the site of the docs into build/docs; a warning is an error
	$(call tool,myst_nb,$(PY) -m sphinx --fail-on-warning --keep-going --quiet docs build/docs)

check-install: $(DEV_ENV) ## Resolve the README's pip lines: torch and extra must be of one CUDA; needs a network
	@$(PY) .ci/install_lines.py $(if $(KNOWN),--unless-known $(KNOWN))

fuzz: $(DEV_ENV) ## Property tests with new examples, a thousand a test, on the CPU and on a GPU
	@cd tests && HYPOTHESIS_PROFILE=fuzz $(call pytest,16) -o timeout=0 test_properties.py $(TEST_ARGS)

# Processes that tests start are counted too, and whatever folder they start in.
coverage: export COVERAGE_FILE := $(CURDIR)/.coverage
coverage: $(DEV_ENV) ## Lines of the package that the tests of a machine without a GPU run: 95% or more
	@$(PY) -m coverage erase
	@cd tests && $(call pytest,8,-m coverage run --rcfile=../pyproject.toml) \
	  -m "not compiles and not gpu" $(TEST_ARGS)
	@$(PY) -m coverage combine --quiet
	@$(PY) -m coverage report

compile-all: $(DEV_ENV) ## Compile and inspect every kernel for every architecture: hours of CPU time
	@cd tests && K3CUPY_COMPILE_ALL=1 $(call pytest,64) -m compiles $(TEST_ARGS)

hunt: $(DEV_ENV) ## Races around every kernel, for HUNT_REPLAYS replays of each chain; needs a GPU
	@cd tests && K3CUPY_HUNT_REPLAYS=$(HUNT_REPLAYS) $(call pytest,8) -m gpu test_pdl_hunt.py $(TEST_ARGS)

soak: $(DEV_ENV) ## Random calls on threads, streams and graphs for SOAK_MINUTES, and what they leave behind
	@cd tests && K3CUPY_SOAK_MINUTES=$(SOAK_MINUTES) $(PY) -m pytest -c ../pyproject.toml --rootdir .. -s test_soak.py $(TEST_ARGS)

sanitize: $(DEV_ENV) ## Run every kernel under compute-sanitizer, and faults that it must notice
	@$(if $(PREPARED),,$(PIP) "nvidia-cuda-sanitizer-api>=13.5")
	@cd tests && $(PY) sanitize.py $(if $(TOOLS),--tools "$(TOOLS)") -- $(SANITIZE_ARGS)

lint: check-style check-types check-cuda ## Check style, types and the format of the CUDA sources

# $(call tool,MODULE,COMMAND): a prepared environment may lack a tool, .venv may not.
define tool
@if [ -z "$(PREPARED)" ] || $(PY) -c 'import $(1)' 2>/dev/null; then \
  $(2); \
else \
  echo "$(1) is not in this environment: its check is skipped."; \
fi
endef
CLANG_FORMAT = $(PY) -c 'from clang_format import clang_format; clang_format()'

check-style: $(DEV_ENV)
	$(call tool,ruff,$(PY) -m ruff check . && $(PY) -m ruff format --check .)

check-types: $(DEV_ENV)
	$(call tool,mypy,$(PY) -m mypy)

check-cuda: $(DEV_ENV)
	$(call tool,clang_format,$(CLANG_FORMAT) --dry-run --Werror $(CUDA_SOURCES))

format: $(DEV_ENV) ## Rewrite Python and CUDA sources in the project's style
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(CLANG_FORMAT) -i $(CUDA_SOURCES)

wheel: $(DEV_ENV) ## Build the wheel and the source archive into dist/
	$(PY) -m build --no-isolation --outdir dist

bench: $(RUN_ENV) ## Measure on this machine's GPU: BENCH=decode, prefill, gemm, linear, window, step, host or start
	@$(PY) -m k3cupy bench $(BENCH) $(BENCH_ARGS)

clean: ## Remove .venv, build output and caches
	rm -rf .venv build dist .coverage .coverage.* .pytest_cache .ruff_cache .mypy_cache .hypothesis tests/.hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- setting up .venv ---

comma := ,
# The CUDA major version of the driver: 12, 13, ... or empty without a GPU.
DRIVER_CUDA = $(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU' && { nvidia-smi \
  | sed -n 's/.*CUDA[A-Za-z ]*Version: *\([0-9][0-9]*\).*/\1/p' | grep . || echo 12; } | head -n 1)

# From 2.11 on, PyPI's torch is built for CUDA 13 and needs a driver of that age.
ifeq ($(origin TORCH_SPEC),undefined)
TORCH_SPEC = $(if $(DRIVER_CUDA),$(if $(filter 12,$(DRIVER_CUDA)),torch>=2.4$(comma)<2.11,torch>=2.4),torch==2.13.0)
endif

# CuPy and torch must agree on the CUDA major version; a CPU-only torch goes with either.
EXTRA_OF_TORCH := import torch; print("cu13" if (torch.version.cuda or "").startswith("13.") else "cu12")

# pip would compile every module of 240 MB of sources. Few are ever imported: Python compiles those
# when they are, and must be allowed to keep the result.
ifeq ($(PREPARED),)
unexport PYTHONDONTWRITEBYTECODE
endif
PIP = $(PY) -m pip install --quiet --no-input --disable-pip-version-check --no-compile \
  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.venv/.ready-to-run: pyproject.toml
	@$(BASE_PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' || { \
	  echo "k3cupy needs Python 3.10 to 3.14. Name one: make $(MAKECMDGOALS) BASE_PYTHON=python3.12"; exit 1; }
	@$(BASE_PYTHON) -m venv .venv || { \
	  echo "Python could not create .venv. On Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@echo "Installing $(TORCH_SPEC) into .venv. The first time takes a minute or more."
	@$(PIP) numpy "$(TORCH_SPEC)"
	@echo "Installing k3cupy and what it runs on."
	@if [ "$$(uname -s)" = Linux ]; then \
	  $(PIP) --editable ".[$$($(PY) -c '$(EXTRA_OF_TORCH)'),torch]"; \
	else \
	  $(PIP) --editable ".[torch]"; \
	fi
	@touch $@

.venv/.ready-to-test: .venv/.ready-to-run
	@echo "Installing the test and lint tools."
	@$(PIP) --editable ".[bench,dev,docs]"
	@touch $@
