# Needs make and Python 3.11 or later; everything else goes into .venv. `make` lists the targets.

SHELL := /bin/sh
BIN := .venv/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check install --constraint constraints.txt
CORE_STAMP := .venv/.installed-core
STAMP := .venv/.installed
BENCH_STAMP := .venv/.installed-bench

# Which Python makes .venv: python3 where it is new enough, else the newest python3.x. `make venv PYTHON=…` decides otherwise.
PYTHON ?=

.DEFAULT_GOAL := help
.PHONY: help venv engines demo test quick durations lint bench docs clean

help:  ## list the targets
	@echo "make TARGET, where TARGET is one of:"
	@echo
	@sed -n 's/^\([a-z]*\):.*##  *\(.*\)/  \1	\2/p' Makefile | expand -t 13

venv: $(STAMP)  ## make .venv with Ronde and all it needs (the other targets do it too)

engines: $(STAMP)  ## add Ray and Spark to .venv, for their tests (540 MB to download)
	@$(PIP) --editable '.[ray,spark]'

demo: $(CORE_STAMP)  ## train a small GPT on two workers, about two minutes
	@$(BIN)/ronde run --workers 2 --baseline examples/gpt/train.py

test: $(STAMP)  ## run the tests; ARGS="-k order" chooses some, RONDE_TEST_ALL=1 runs whole grids
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

quick: $(STAMP)  ## run the tests of the pure parts, in less than a minute
	@$(BIN)/python -m pytest --quick -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

durations: $(STAMP)  ## run the tests and keep what each takes in tests/durations.json
	@$(BIN)/python -m pytest --record-durations -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(STAMP)  ## look at format, style, types and who imports whom
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: $(BENCH_STAMP)  ## time a training step beside its peers; ARGS="--help" tells the choices
	@$(BIN)/python benchmarks/overhead.py $(ARGS)

docs: $(STAMP)  ## build the documentation into site/
	@$(BIN)/mkdocs build --strict

clean:  ## remove .venv, site/ and all caches; runs/ stays
	@rm -rf .venv site build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache src/*.egg-info
	@find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(CORE_STAMP): pyproject.toml constraints.txt
	@python="$(PYTHON)"; found=; \
	for try in $${python:-python3 python3.19 python3.18 python3.17 python3.16 python3.15 python3.14 python3.13 python3.12 python3.11}; do \
		if $$try -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$try; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
		echo "error: Python 3.11 or later is needed; $${python:-python3} is $$($${python:-python3} --version 2>&1 | tail -n 1)." >&2; exit 1; \
	fi; \
	if ! $$found -c 'import ensurepip, venv' 2>/dev/null; then \
		version=$$($$found -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
		echo "error: $$found cannot make a virtual environment. On Debian or Ubuntu: apt-get install python3-venv" \
			"(python$$version-venv where $$found is not the system's own)." >&2; exit 1; \
	fi; \
	echo "making .venv with $$($$found --version)"; \
	$$found -m venv .venv
	@echo "installing torch (some hundred megabytes, once)"
	@$(PIP) torch
	@echo "installing ronde"
	@$(PIP) --editable .
	@touch $@

$(STAMP): $(CORE_STAMP)
	@echo "installing its tools"
	@$(PIP) --editable '.[dev,examples,docs,tensorboard,models,images,tables,tune,remote,report,notebook,page,keras,explore,trees,finetune,ship,explain]'
	@touch $@

$(BENCH_STAMP): $(STAMP)
	@echo "installing what the benchmarks compare with"
	@$(PIP) --editable '.[bench]'
	@touch $@
