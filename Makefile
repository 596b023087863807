# The two commands of this project are `make demo` and `make test`; both make .venv first.
SHELL := /bin/bash
PYTHON := .venv/bin/python
RUN := runs/demo

.PHONY: demo test test-all lint clean

.venv/installed: pyproject.toml constraints.txt scripts/make_venv.sh
	@scripts/make_venv.sh .venv

# Prepares the embedded corpus, trains a small MesaNet, evaluates it and lets it write. Under 10 minutes on two cores.
demo: .venv/installed
	$(PYTHON) -m mesanet_jax.prepare --config=configs/prepare.py:demo --config.output=$(RUN)/data
	$(PYTHON) -m mesanet_jax.train --config=configs/mesanet.py:demo --workdir=$(RUN)/mesanet --config.data.path=$(RUN)/data
	$(PYTHON) -m mesanet_jax.evaluate --workdir=$(RUN)/mesanet
	$(PYTHON) -m mesanet_jax.generate --workdir=$(RUN)/mesanet --prompt="It was a truth which Emma could not" --max_tokens=120
	@echo "loss curves: $(RUN)/mesanet/loss.png; loss by position and table: $(RUN)/mesanet/evaluation/"

test: .venv/installed
	$(PYTHON) -m pytest

# With the slow tests; the TPU compiler goes beside the environment, since jax would look for a TPU if it were in it.
test-all: .venv/installed .venv/tpu-compiler
	MESANET_TPU_COMPILER=.venv/tpu-compiler $(PYTHON) -m pytest -m "not gpu"

.venv/tpu-compiler: .venv/installed
	$(PYTHON) -m pip install -qq --disable-pip-version-check --no-deps --target $@ libtpu==0.0.50

lint: .venv/installed
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

clean:
	rm -rf .venv runs build *.egg-info
