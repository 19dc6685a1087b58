# Two commands do all: `make run` and `make test`. PYTHON chooses the interpreter, PIP_ARGS adds to every pip call
# (for example an index with CPU builds of torch).
PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: run test env lint wheel clean

run: env  ## install, get the model, run the main job
	$(BIN)/python -m eagle3x $(ARGS)

test: env  ## install, lint, type-check, run all tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest $(ARGS)

env: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	touch $@

lint: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: env
	$(BIN)/python -m pip wheel --quiet --no-deps -w dist .

clean:
	rm -rf $(VENV) dist build *.egg-info
