# Every target creates .venv first, with the pinned versions of constraints.txt.
SHELL := /bin/bash
PYTHON := .venv/bin/python
RUN := runs/demo

# Families with nanochat's backbone and recipe. They are compared with each other; the other families share MesaNet's.
NANOCHAT := configs/nanochat.py configs/maglev.py configs/lrt.py
FAMILIES := $(filter-out $(NANOCHAT) configs/prepare.py,$(wildcard configs/*.py))
MEMORIES := configs/maglev.py:demo-sliding configs/maglev.py:demo-interleaved configs/lrt.py:demo configs/lrt.py:demo-k2 \
    configs/maglev.py:demo configs/maglev.py:demo-separate
SHORT := --steps=100 --config.data.path=$(RUN)/data --config.optimizer.warmup_steps=20 --config.train.log_every=2 \
    --config.train.eval_batches=1 --config.log.tensorboard=false
empty :=
comma := ,
list = $(subst $(empty) $(empty),$(comma),$(strip $(1)))

.PHONY: install demo compare-demo compare-memories test test-all lint clean

install: .venv/installed

.venv/installed: pyproject.toml setup.py constraints.txt scripts/make_venv.sh
	@scripts/make_venv.sh .venv

# Prepares the embedded corpus, trains a small MesaNet, evaluates it and samples text: under 10 minutes on two cores.
demo: .venv/installed
	$(PYTHON) -m mesanet_jax.prepare --config=configs/prepare.py:demo --config.output=$(RUN)/data
	$(PYTHON) -m mesanet_jax.train --config=configs/mesanet.py:demo --workdir=$(RUN)/mesanet --config.data.path=$(RUN)/data
	$(PYTHON) -m mesanet_jax.evaluate --workdir=$(RUN)/mesanet
	$(PYTHON) -m mesanet_jax.generate --workdir=$(RUN)/mesanet --prompt="It was a truth which Emma could not" --max_tokens=120
	@echo "loss curves: $(RUN)/mesanet/loss.png; loss by position and table: $(RUN)/mesanet/evaluation/"

# Trains thirteen families for 100 steps on the same rows and writes one report: under 20 minutes on two cores.
# If it is interrupted, the same command continues where it stopped.
compare-demo: .venv/installed
	$(PYTHON) -m mesanet_jax.prepare --config=configs/prepare.py:demo --config.output=$(RUN)/data
	$(PYTHON) -m mesanet_jax.compare --configs=$(call list,$(FAMILIES:.py=.py:demo)) --workdir=runs/compare $(SHORT)
	@echo "report: runs/compare/comparison.md"

# Does the same for Maglev, LRT and the Transformers with their recipe.
compare-memories: .venv/installed
	$(PYTHON) -m mesanet_jax.prepare --config=configs/prepare.py:demo --config.output=$(RUN)/data
	$(PYTHON) -m mesanet_jax.compare --configs=$(call list,$(MEMORIES)) --workdir=runs/compare-memories $(SHORT) \
	    --config.train.eval_every=20
	@echo "report: runs/compare-memories/comparison.md"

# Runs the tests in two processes, because XLA compiles on one core at a time.
test: .venv/installed
	$(PYTHON) -m pytest -n 2 --dist worksteal

# Runs the slow tests too. The TPU compiler is installed beside the environment: inside it, jax would look for a TPU.
test-all: .venv/installed .venv/tpu-compiler
	MESANET_TPU_COMPILER=.venv/tpu-compiler $(PYTHON) -m pytest -n 2 --dist worksteal -m "not gpu"

.venv/tpu-compiler: .venv/installed
	$(PYTHON) -m pip install -qq --disable-pip-version-check --no-deps --target $@ libtpu==0.0.50

lint: .venv/installed
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	.venv/bin/basedpyright --pythonpath $(PYTHON)

clean:
	rm -rf .venv runs build *.egg-info
