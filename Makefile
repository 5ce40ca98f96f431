# The two commands of a new user are `make demo` and `make test`. Both set up .venv first; see build.sh.
PYTHON_IN_VENV := .venv/bin/python
WORKERS ?= 2

.PHONY: help build demo test lint format docs clean

help:
	@echo "make demo    set up .venv, then generate text with a small model on the CPU"
	@echo "make test    set up .venv, then run the tests (WORKERS=$(WORKERS))"
	@echo "make lint    ruff check, ruff format --check and mypy"
	@echo "make format  rewrite the code in the house format"
	@echo "make docs    write the generated pages of docs/ again"
	@echo "make clean   remove .venv and caches"

build:
	@bash build.sh

demo: build
	$(PYTHON_IN_VENV) -m deepinfer demo

test: build
	OMP_NUM_THREADS=1 $(PYTHON_IN_VENV) -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

lint: build
	$(PYTHON_IN_VENV) -m ruff check .
	$(PYTHON_IN_VENV) -m ruff format --check .
	$(PYTHON_IN_VENV) -m mypy

format: build
	$(PYTHON_IN_VENV) -m ruff check --fix .
	$(PYTHON_IN_VENV) -m ruff format .

docs: build
	$(PYTHON_IN_VENV) -m deepinfer.config.docs docs/configuration.md

clean:
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache .hypothesis deepinfer.egg-info
