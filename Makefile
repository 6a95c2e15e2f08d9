# For users:   make demo    train under a budget and see the report
#              make test    everything that CI checks
# They need python3 (3.11 or later) and a package index; all else goes into .venv.

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.stamp
RUN := $(VENV)/bin/python -m

.PHONY: demo test lint types unit moved

demo: $(STAMP)
	$(VENV)/bin/belady demo

test: lint types unit

lint: $(STAMP)
	$(RUN) ruff check .
	$(RUN) ruff format --check .

types: $(STAMP)
	$(RUN) mypy

# Two workers, each with one thread of torch's (tests/conftest.py).
unit: $(STAMP)
	$(RUN) pytest -n 2 --dist worksteal

# The stamp holds the folder that the environment was made for: scripts and the editable install
# name it, so an environment that was moved or copied is made anew.
ifneq ($(wildcard $(STAMP)),)
ifneq ($(shell cat $(STAMP)),$(CURDIR))
CLEAR := --clear
$(STAMP): moved
endif
endif

# Written last, so an interrupted build starts over.
$(STAMP): pyproject.toml constraints.txt
	@rm -f $@
	$(PYTHON) -m venv $(CLEAR) $(VENV) && $(RUN) pip --version || $(PYTHON) -m venv --clear $(VENV)
	$(RUN) pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@printf '%s\n' '$(CURDIR)' > $@
