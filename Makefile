# Everything a newcomer needs: `make demo` and `make test`. Each makes its own virtual environment and says what it does.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
WORKERS ?= 2
DEMO ?= artifacts/smollm2-135m-cpu
HEAD ?= builder/edgebuild/heads/smollm2-135m-instruct.mtp.safetensors
QUESTION ?= What is the capital of France?
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: demo test lint clean help

help:
	@echo "make demo   build the demo model for this CPU and chat with it"
	@echo "make test   run the whole test suite"
	@echo "make lint   ruff, mypy --strict (with the types of classic TensorRT too), import boundary"
	@echo "make clean  remove the virtual environment and the demo artifact"

$(BIN)/python:
	@echo "→ virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.build: pyproject.toml | $(BIN)/python
	@echo "→ installing edgebuild and what builds models (once; torch is about 200 MB or more)"
	@$(PIP) install "$(TORCH)"
	@$(PIP) install -e ".[build]"
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/.build
	@echo "→ installing what the tests need (once)"
	@$(PIP) install -e ".[dev]"
	@touch $@

$(DEMO)/manifest.json: | $(VENV)/.build
	@echo "→ the demo model: SmolLM2-135M-Instruct (fetched once, then cached)"
	@model=$$($(BIN)/python -m edgebuild.demo_model | tail -n 1) && \
	echo "→ building it for this CPU and real traffic" && \
	$(BIN)/edgebuild --profile profiles/cpu.yaml --model "$$model" \
	  --traffic profiles/traffic/azure-conv-2023.yaml --mtp $(HEAD) --draft-vocabulary 8192 --output $(DEMO)

demo: $(DEMO)/manifest.json
	@echo "→ asking it: $(QUESTION)"
	@$(BIN)/edgert chat $(DEMO) --once "$(QUESTION)"

test: $(VENV)/.dev
	@echo "→ running the tests, $(WORKERS) files at a time (about a quarter of an hour on two cores)"
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# not into the environment: the stubs would make `import tensorrt` succeed with an empty package
$(VENV)/stubs: | $(VENV)/.dev
	@$(PIP) install --no-deps --target $@ tensorrt-stubs==10.13.0.35.1

lint: $(VENV)/.dev $(VENV)/stubs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python .ci/classic_types.py $(VENV)/stubs
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) $(DEMO)
