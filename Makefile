# Every target sets up .venv by itself; all it needs is Python 3.11 or later, and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint format bench lock clean

demo: $(STAMP) ## Run the main job: workers replay a real trace against a real daemon, every byte checked
	$(BIN)/python -m kvstore_workers.demo $(ARGS)

test: $(STAMP) ## Run the tests
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP) ## Check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP) ## Run the benchmarks (iperf3 is measured beside ours where it is installed)
	$(BIN)/python -m bench.striped_fetch $(ARGS)
	$(BIN)/python -m bench.match_scale $(ARGS)

lock: ## Renew constraints.txt from what the newest packages resolve to
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --upgrade -e '.[server,dev]'
	$(BIN)/python -m pip freeze --exclude-editable --exclude pip > constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "kvstore needs Python 3.11 or later; say which with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt -e '.[server,dev]'
	@touch $@

clean: ## Remove what the targets made
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
