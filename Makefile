# Needs Python 3.11 or newer and make. The first target that needs .venv creates it.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

# Tests wait for other processes now and then: one more than there are cores keeps the cores busy.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(os.cpu_count() + 1)')
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: demo test coverage fuzz soak load chromium lint docs bench theorem dist dist-check clean

demo: $(READY)
	$(BIN)/semaug demo

test: $(READY) chromium
	$(PYTEST)

# The same tests, a quarter slower, and which lines of the package they run.
coverage: $(READY) chromium
	$(PYTEST) --cov=semaug --cov-report=term:skip-covered

# The tests of damaged and invented files and requests with ten times as many examples, and a table of how many there were.
FUZZ ?= 10
fuzz: $(READY)
	FUZZ=$(FUZZ) $(PYTEST) -m fuzz

# Kills training on the embedded birds 50 times, resumes it each time, and compares the results bit for bit; then
# measures how long training takes to stop after a signal.
soak: $(READY)
	$(BIN)/python tests/soak.py 50

# Measures the memory of the command line on 50 000 images of 2 000 classes, and of 2 000 half steps.
load: $(READY)
	$(BIN)/python tests/load.py

# Some tests open the report in a real browser; without one they are skipped.
chromium:
	@command -v chromium >/dev/null || { \
	  echo "chromium is missing: trying to install it for the browser tests"; \
	  { apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium; } >/dev/null 2>&1 \
	  || echo "chromium could not be installed: the browser tests will be skipped"; }

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Builds the documentation as a site in site/. Neither building nor reading it needs a network.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

bench: $(READY)
	$(BIN)/semaug bench

theorem: $(READY)
	$(BIN)/python -m semaug.studies.theorem theorem.png

# Builds a wheel and an sdist in dist/; the wheel is built from the sdist.
dist: $(READY)
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist

# Installs both into a new environment, one after the other, and runs them there. With another Python:
# make dist-check PYTHON=python3.13
dist-check: dist
	$(PYTHON) -m venv dist/venv
	dist/venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt dist/*.whl
	cd dist && venv/bin/semaug demo --epochs 2 --methods basic learnable --output demo
	dist/venv/bin/python -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps dist/*.tar.gz
	cd dist && venv/bin/semaug evaluate demo/learnable

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "semaug needs Python 3.11 or newer; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage dist
