# Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint types clean

demo: .venv/ready
	$(BIN)/outpace demo

test: .venv/ready
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadgroup

lint: .venv/ready
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check --no-cache .

types: .venv/ready
	$(BIN)/mypy

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
