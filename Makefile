# Shortcuts. Every target works in a fresh clone: the scripts make .venv on their first run.
VENV ?= .venv
export DS_TRAINER_VENV := $(VENV)
.PHONY: setup lint fix test docs bench

setup: ; tools/lint.sh --setup && $(VENV)/bin/pre-commit install
lint: ; tools/lint.sh
fix: ; tools/lint.sh --setup && $(VENV)/bin/ruff check --fix && $(VENV)/bin/ruff format && $(VENV)/bin/codespell -w
test: ; launch/test.sh
docs: ; tools/build_docs.sh
bench: ; tools/lint.sh --setup && $(VENV)/bin/python benchmarks/overhead.py --quick
