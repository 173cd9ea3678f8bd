# `make help` lists the targets. Each sets up what it needs; the second time that takes no time.
# Options for what a target runs go into ARGS: make demo ARGS="--steps 100", make test ARGS="tests/faults -x".

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
WORKERS ?= 2
EXTRAS ?=
export GOAL := $(firstword $(MAKECMDGOALS))
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint bench peers campaign soak compat system-deps clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# By content, not by time: a fresh checkout of the same files installs nothing again.
$(READY): pyproject.toml constraints.txt scripts/setup.sh
	@VENV=$(VENV) EXTRAS=$(EXTRAS) ./scripts/setup.sh

setup: $(READY) ## make .venv with the package, its extras and the development tools

demo: $(READY) ## train through five faults, prove the result, write a report
	@$(BIN)/ridethrough demo $(ARGS)

test: $(READY) ## the tests, without campaigns and soaks
	@$(BIN)/python -m pytest -q -n $(WORKERS) -m "not campaign and not soak" $(ARGS)

lint: $(READY) ## style, formatting, types
	@$(BIN)/ruff check src tests
	@$(BIN)/ruff format --check src tests
	@$(BIN)/mypy

bench: $(READY) ## time recovery on this machine: bench-out/recovery.json
	@mkdir -p bench-out
	@$(BIN)/ridethrough bench recovery --json bench-out/recovery.json $(ARGS)

peers: $(READY) .venv-peers/.ready .venv-torchft/.ready ## the same beside every peer, in environments of their own
	@mkdir -p bench-out
	@$(BIN)/ridethrough bench recovery --mechanisms all --peer-env nvrx=.venv-peers --peer-env torchft=.venv-torchft \
		--json bench-out/peers.json $(ARGS)

# NVRx pins much that it does not need here, so only what it imports is installed beside it.
.venv-peers/.ready: $(READY)
	@$(BIN)/python -m venv --clear .venv-peers
	@.venv-peers/bin/pip install -q --disable-pip-version-check -c constraints.txt \
		torch numpy psutil packaging pyyaml defusedxml nvidia-ml-py
	@.venv-peers/bin/pip install -q --disable-pip-version-check --no-deps nvidia-resiliency-ext==0.4.1
	@touch $@

.venv-torchft/.ready: $(READY)
	@$(BIN)/python -m venv --clear .venv-torchft
	@.venv-torchft/bin/pip install -q --disable-pip-version-check -c constraints.txt torch numpy torchft==0.2.0
	@touch $@

campaign: $(READY) ## the tests in full counts (hours)
	@$(BIN)/python -m pytest -q -m campaign --timeout 7200 $(ARGS)

soak: $(READY) ## half an hour of healthy training without a false alarm
	@$(BIN)/python -m pytest -q -m soak --timeout 3600 $(ARGS)

compat: ## the tests with the oldest torch that is supported, in .venv-compat
	@VENV=.venv-compat CONSTRAINTS=constraints-compat.txt EXTRAS=$(EXTRAS) ./scripts/setup.sh
	@.venv-compat/bin/python -m pytest -q -n $(WORKERS) -m "not campaign and not soak" $(ARGS)

system-deps: ## what the tests that need root use (Debian, Ubuntu)
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends git make python3 python3-venv iproute2 procps util-linux \
		chromium prometheus

clean: ## remove environments, caches and build output; keeps runs/
	rm -rf .venv .venv-* .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist bench-out
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
