# The commands that people and CI use alike.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

KILLS ?= 1000

.PHONY: install demo test test-libaio soak check types format bench clean

install: $(STAMP)

$(STAMP): pyproject.toml setup.py constraints.txt engine/adamw/kernel.cpp
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

demo: install  ## train a small transformer with its state on three tiers
	$(BIN)/tierstep train configs/quickstart.toml --fresh

test: install
	$(BIN)/python -m pytest -q -m "not gpu and not libaio"

test-libaio: install  ## the libaio backend, compiled by deepspeed the first time (minutes); needs libaio-dev and g++
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt setuptools wheel packaging ninja
	DS_BUILD_OPS=0 $(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt deepspeed
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -q -m libaio --timeout 1800

soak: install  ## a training run killed KILLS times (about five minutes); SEED=... repeats one
	folder=$$(mktemp -d) && PYTHONPATH=tests $(BIN)/python tests/random_kills_run.py $$folder $(KILLS) $(SEED) && rm -r $$folder

check: install types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: install  ## mypy does not follow package-dir, so it reads the package through a tree of links
	rm -rf .types && mkdir -p .types/tierstep
	ln -s $(CURDIR)/api/* $(addprefix $(CURDIR)/,configs io tiers engine bench) .types/tierstep/
	$(BIN)/mypy --strict -p tierstep

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install
	$(BIN)/python -m tierstep.bench.kernel
	$(BIN)/python -m tierstep.bench.step_time

clean:
	rm -rf $(VENV) .types build *.egg-info engine/adamw/*.so
