# Every target works on a fresh checkout; what is already done is not done again.
PYTHON ?= python3
VENV := .venv/bin
RUN := $(VENV)/python -m pipeline
ARGS ?=

.PHONY: help site env env-vllm env-sglang env-clients env-bench models demo up test pairs check format docs chaos faults fuzz openapi clients bench plots clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

env: ## .venv: Crossfill, MLX, development tools
	@$(PYTHON) ops/environment.py core

env-vllm: ## .venv-vllm: vLLM (CUDA where there is an NVIDIA GPU, else its CPU build on Linux x86_64)
	@$(PYTHON) ops/environment.py vllm

env-sglang: ## .venv-sglang: SGLang (CUDA where there is an NVIDIA GPU, else for tests on Linux x86_64)
	@$(PYTHON) ops/environment.py sglang

env-clients: ## .venv-clients: the libraries and tools that people ask the API with
	@$(PYTHON) ops/environment.py clients

env-bench: ## .venv-bench: what `make bench ARGS=stream` compares with (xoscar, LMCache's Redis client)
	@$(PYTHON) ops/environment.py bench

models: env ## models/: the sample checkpoint and three tiny ones
	@$(RUN) model smollm2
	@for arch in llama qwen2 qwen3; do $(RUN) model tiny --arch $$arch || exit 1; done

demo: env env-vllm models ## ask a question in both directions and show what moved
	@$(RUN) demo $(ARGS)

up: env env-vllm models ## run broker, workers and API until Ctrl-C
	@$(RUN) up $(ARGS)

test: env env-vllm env-sglang models ## every test, in all environments; one closing line
	@$(VENV)/python ops/suite.py $(ARGS)

pairs: env env-vllm env-sglang models ## every ordered pair of engines on three checkpoint families (long)
	@CROSSFILL_PAIRS=all CROSSFILL_REQUIRE_ENGINES=mlx,vllm,sglang OMP_NUM_THREADS=1 $(VENV)/python -m pytest tests/pairs --timeout 1200 $(ARGS)

check: env ## formatting, lint, types, layers, generated pages
	$(VENV)/ruff format --check .
	$(VENV)/ruff check .
	$(VENV)/mypy
	$(VENV)/lint-imports
	$(VENV)/python -m docs.generate --check

format: env ## let ruff rewrite what it can
	$(VENV)/ruff format .
	$(VENV)/ruff check --fix .

docs: env ## regenerate the generated pages
	$(VENV)/python -m docs.generate

chaos: env ## hurt a running system at random for ten minutes (ARGS: --seed N --minutes M --requests N)
	@OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(VENV)/python -m tests.chaos $(ARGS)

site: env ## the documentation as a site, in build/site
	@NO_MKDOCS_2_WARNING=1 $(VENV)/mkdocs build --strict --clean --quiet --config-file ops/mkdocs.yml && echo build/site/index.html

faults: env env-vllm ## hurt real engines in both roles: kills, stops, cancels, small pools, engines that end (ARGS: pytest's)
	@CROSSFILL_FAULTS=real CROSSFILL_REQUIRE_ENGINES=mlx,vllm OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(VENV)/python -m pytest -v tests/faults/test_real_engines.py $(ARGS)

fuzz: env ## ten million mutated frames and a million records (ARGS: --frames N --seed N)
	@OMP_NUM_THREADS=1 $(VENV)/python -m tests.fuzz $(ARGS)

openapi: env ## more random requests against the OpenAPI document
	@CROSSFILL_OPENAPI_EXAMPLES=60 OMP_NUM_THREADS=1 $(VENV)/python -m pytest tests/scenarios/test_openapi.py $(ARGS)

clients: env env-vllm env-clients models ## LangChain, LiteLLM, LlamaIndex, Node, openai-python and curl on real engines
	@CROSSFILL_REQUIRE_CLIENTS=1 OMP_NUM_THREADS=1 $(VENV)/python -m pytest tests/scenarios/test_clients.py $(ARGS)

bench: env env-vllm models ## benchmarks (ARGS names one)
	@$(VENV)/python -m bench $(ARGS)

plots: env ## docs/performance.md: its tables and pictures, from bench/results
	@$(VENV)/python -m bench.plot $(ARGS)

clean: ## remove everything that was built; checkpoints in models/ too
	rm -rf .venv .venv-vllm .venv-sglang .venv-clients .venv-bench .run models build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
