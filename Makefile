# Two commands do everything: `make demo` and `make test`.
PYTHON ?= python3.11
VENV ?= .venv
WORKERS ?= 2
BIN = $(VENV)/bin
# they ask for torchvision, which has no build beside every torch, and need none of it for what the tests take of them
ALONE = timm open_clip_torch ftfy zennit
PYTEST = HF_HUB_OFFLINE=1 $(BIN)/pytest --hypothesis-profile=ci -n $(WORKERS) --dist loadfile

.PHONY: demo test test-all lint types fast slow coverage clean

demo: $(VENV)/.installed
	HF_HUB_OFFLINE=1 $(BIN)/lrpx explain "The doors of the house" --target " are" --contrast " is" --html demo.html
	@echo "The same picture for a browser: demo.html"

test: lint types fast

test-all: test slow

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

types: $(VENV)/.installed-test
	$(BIN)/mypy

fast: $(VENV)/.installed-test
	$(PYTEST) -m "not slow"

slow: $(VENV)/.installed-test
	$(PYTEST) -m slow

# how much of src the whole suite runs, and an error below 95 %
coverage: $(VENV)/.installed-test
	$(PYTEST) --cov --cov-fail-under=95

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	touch $@

$(VENV)/.installed-test: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[test]"
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps $(ALONE)
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) demo.html .coverage .coverage.*
