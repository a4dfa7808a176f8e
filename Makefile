# Each target sets up what it needs in $(VENV) and is quick when that is there already.
#
#   make demo      simulated ranks, router and a few streamed chats, on this machine
#   make test      lint, types and the test suite
#   make slow      the long test lanes; make engines: those that need an engine's own package
#   make soak      20 minutes of load with a fault every second; make fuzz: each decoder for FUZZ_SECONDS
#   make build     sdist and wheel in dist/, checked by an install of each
#
# PYTHON chooses the interpreter, VENV where the environment goes, ARGS what pytest gets beside its defaults.

PYTHON ?= python3
VENV ?= .venv
ENGINES_VENV ?= .venv-engines
ARGS ?=
FUZZ_SECONDS ?= 600

run = $(VENV)/bin/python -m
compiled = pyproject.toml setup.py smg/_version.py $(wildcard smg/*.pyx smg/*.pxd)
# pytest: 5 means that no test has the marker
lane = $(run) pytest -m $(1) $(ARGS) || [ $$? -eq 5 ]

.PHONY: test lint pytest slow soak fuzz engines demo build clean

test: lint pytest

lint: $(VENV)/.test
	$(run) ruff check
	$(run) ruff format --check
	$(run) mypy

pytest: $(VENV)/.test
	$(run) pytest $(ARGS)

slow: $(VENV)/.test
	$(call lane,slow)

soak: $(VENV)/.test
	$(run) tests.chaos.soak --seconds 1200 --out soak.json

fuzz: $(VENV)/.test
	$(VENV)/bin/python tests/fuzz/run.py tokenspeed --seconds $(FUZZ_SECONDS)
	$(VENV)/bin/python tests/fuzz/run.py vllm --seconds $(FUZZ_SECONDS)

engines:
	$(PYTHON) scripts/make_engines_env.py --path $(ENGINES_VENV)
	$(ENGINES_VENV)/bin/python -m pytest -m engine tests/engines $(ARGS)

demo: $(VENV)/.server
	$(run) smg demo

build:
	PYTHON=$(PYTHON) scripts/check_dist.sh

# the test environment has everything the server needs
$(VENV)/.test: $(compiled) | $(VENV)/bin/python
	$(run) pip install --quiet --editable '.[test]'
	touch $(VENV)/.server $@

$(VENV)/.server: $(compiled) | $(VENV)/bin/python
	$(run) pip install --quiet --editable '.[server]'
	touch $@

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) build dist *.egg-info smg/*.so smg/*.c smg/*.html cython_debug
