# Two commands do everything: `make demo` and `make test`.
PYTHON ?= python3.11
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: demo test lint types unit clean

demo: $(VENV)/.installed
	HF_HUB_OFFLINE=1 $(BIN)/lrpx explain "The doors of the house" --target " are" --contrast " is" --html demo.html
	@echo "The same picture for a browser: demo.html"

test: lint types unit

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-test
	$(BIN)/mypy

unit: $(VENV)/.installed-test
	HF_HUB_OFFLINE=1 $(BIN)/pytest

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	touch $@

$(VENV)/.installed-test: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[test]"
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) demo.html
