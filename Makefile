# Everything a person types. `make` alone lists it.
#
# Variables, given as `make env NAME=value`:
#   PYTHON       the Python 3.11, 3.12 or 3.13 that makes the environment
#   TORCH        the torch to install, such as torch==2.13.0
#   TORCH_INDEX  the package index that torch alone comes from, for a build other than the one the
#                usual index serves (a CPU-only one, or one for another CUDA)
#   ARGS         what run or test passes on

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
# The triton that a CUDA build of TORCH requires. A CPU build requires none, so `make lock` must be
# told; change the two together.
TRITON ?= triton==3.7.1
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Each stamp says that one step of the environment is complete. It is written last, so a step that
# failed has none and is done again.
HAVE_TORCH := $(VENV)/.have-torch
HAVE_BASE := $(VENV)/.have-base
HAVE_TEST := $(VENV)/.have-test

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help env test-env run test test-gpu test-browser test-slurm report-demo check format lock clean python torch-note

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  Variables: PYTHON=$(PYTHON)  TORCH=$(TORCH)  TORCH_INDEX=$(TORCH_INDEX)  ARGS=$(ARGS)"

env: torch-note $(HAVE_BASE) ## make .venv with all that a CPU run needs

run: env ## run the pipeline: make run ARGS="key=value ..."
	$(BIN)/python run.py $(ARGS)

# One thread for each process: the tests are many small operations, which more threads slow down,
# and sums come out in the same order everywhere.
test: test-env ## run the tests: make test ARGS="-k name"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ARGS)

# Its last step fails where there is no GPU, so that tests which all skipped do not pass for a check.
# The kernels come with what the tests need; torch must be a CUDA build.
test-gpu: test-env ## run the tests that need a GPU, then time FLA's kernels there
	$(BIN)/python -m pytest -m gpu $(ARGS)
	$(BIN)/python experiments/speed/fla_gpu.py

# Needs a Chromium: on Debian, apt-get install chromium.
test-browser: test-env ## run the tests that look at the report in a headless Chromium
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m browser $(ARGS)

# Needs root and Slurm's daemons: on Debian, apt-get install slurmctld slurmd slurm-client munge.
test-slurm: test-env ## run the tests that start a Slurm of one node
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slurm $(ARGS)

report-demo: env ## make a report of the committed results: out/report-demo/report.html
	$(BIN)/python -m tc.report experiments --output out/report-demo --title "Committed results" \
	  --format html,md,latex,csv,png,svg

# All of them run, so that one look shows every finding.
check: test-env ## lint, formatting, types and the one-way rule of imports
	@status=0; \
	for tool in "ruff check" "ruff format --check" "mypy" "lint-imports"; do \
	  echo "== $$tool"; $(BIN)/$$tool || status=1; \
	done; \
	exit $$status

format: test-env ## rewrite the code in the one format
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

lock: python ## remake requirements/*.txt from the ranges in pyproject.toml
	PYTHON='$(PYTHON)' TORCH='$(TORCH)' TORCH_INDEX='$(TORCH_INDEX)' TRITON='$(TRITON)' \
	  bash requirements/lock.sh

clean: ## remove .venv, caches and build leftovers; runs in out/ stay
	rm -rf $(VENV) build dist *.egg-info
	rm -rf .pytest_cache .ruff_cache .mypy_cache .import_linter_cache
	find . -name .git -prune -o -name out -prune -o -name multirun -prune \
	  -o -type d -name __pycache__ -exec rm -rf {} +

test-env: torch-note $(HAVE_TEST)

# torch comes first and alone. Left to the dependencies of the others, pip takes the newest release
# from the usual index, which on Linux brings several gigabytes of CUDA libraries, even where there
# is no GPU; and an index for torch must not serve the other packages. The stamp holds the version
# that came, and constrains what follows, so that no later step replaces it.
$(HAVE_TORCH):
	@test -x $(BIN)/pip || { $(MAKE) --no-print-directory python && \
	  echo "Making $(VENV)" && '$(PYTHON)' -m venv --clear $(VENV); }
	@echo "Installing $(TORCH)"
	@$(PIP_INSTALL) $(if $(TORCH_INDEX),--index-url '$(TORCH_INDEX)') '$(TORCH)'
	@$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' \
	  > $@.tmp
	@mv $@.tmp $@

# --use-pep517: one dependency comes as source, and venvs differ in what they build it with.
$(HAVE_BASE): $(HAVE_TORCH) requirements/base.txt requirements/data.txt pyproject.toml
	@echo "Installing requirements/base.txt and requirements/data.txt (some minutes the first time)"
	@$(PIP_INSTALL) --use-pep517 -c $(HAVE_TORCH) -r requirements/base.txt
	@$(PIP_INSTALL) --no-deps -r requirements/data.txt
	@$(PIP_INSTALL) --no-deps -e .
	@touch $@

$(HAVE_TEST): $(HAVE_BASE) requirements/test.txt
	@echo "Installing requirements/test.txt (some minutes the first time)"
	@$(PIP_INSTALL) --use-pep517 -c $(HAVE_TORCH) -r requirements/test.txt
	@touch $@

# A torch version given on the command line is refused where the environment has another one:
# swapped underneath them, the installed packages would no longer be those that were resolved.
torch-note: $(HAVE_TORCH)
ifneq ($(origin TORCH),file)
	@have=$$(cat $(HAVE_TORCH)); case '$(TORCH)' in \
	  "$$have" | "$${have%+*}") ;; \
	  torch==*) echo "make: $(VENV) has $$have, not $(TORCH): run 'make clean' first" >&2; exit 1 ;; \
	esac
endif

python:
	@command -v '$(PYTHON)' > /dev/null || { \
	  echo "make: no '$(PYTHON)' here: install Python 3.11, 3.12 or 3.13, or name one with PYTHON=" >&2; \
	  exit 1; }
	@'$(PYTHON)' -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "make: '$(PYTHON)' is $$('$(PYTHON)' -V 2>&1), but Python 3.11, 3.12 or 3.13 is needed:" \
	    "name one with PYTHON=" >&2; \
	  exit 1; }
	@'$(PYTHON)' -c 'import ensurepip, venv' 2> /dev/null || { \
	  echo "make: '$(PYTHON)' cannot make a virtual environment: install its venv module" \
	    "(on Debian and Ubuntu: apt install python3-venv)" >&2; \
	  exit 1; }
