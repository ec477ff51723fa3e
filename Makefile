# make demo    environment, install, the main job on the shipped model, completions on the screen
# make test    environment, install, checks, all CPU tests
# make checks  format, lint, types, import contracts
# make bench   decode speed against transformers, one run on this machine

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: demo test checks bench clean

$(VENV)/installed: setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[test,dev]"
	touch $@

demo: $(VENV)/installed
	deepspeed launch/afd_decode.py --config configs/tiny_moe_2a2f_gloo.yaml --overwrite
	python tools/show_results.py results.jsonl --input configs/prompts.jsonl --answers configs/prompts.answers.json --min-share 0.9

checks: $(VENV)/installed
	ruff format --check .
	ruff check .
	mypy
	lint-imports

test: checks
	python -m pytest

bench: $(VENV)/installed
	python tools/bench_decode.py --output docs/perf/bench_decode_cpu.json

clean:
	rm -rf $(VENV) *.egg-info build .mypy_cache .ruff_cache .hypothesis .import_linter_cache
