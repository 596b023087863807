# The commands of this project are `make demo`, `make compare-demo` and `make test`; each makes .venv first.
SHELL := /bin/bash
PYTHON := .venv/bin/python
RUN := runs/demo
# Those in the backbone of MesaNet; those in nanochat's are compared with each other.
NANOCHAT := configs/nanochat.py configs/maglev.py configs/lrt.py
FAMILIES := $(filter-out $(NANOCHAT) configs/prepare.py,$(wildcard configs/*.py))
MEMORIES := configs/maglev.py:demo-sliding configs/maglev.py:demo-interleaved configs/lrt.py:demo configs/lrt.py:demo-k2 \
    configs/maglev.py:demo configs/maglev.py:demo-separate
empty :=
comma := ,

.PHONY: demo compare-demo compare-memories test test-all lint clean

.venv/installed: pyproject.toml constraints.txt scripts/make_venv.sh
	@scripts/make_venv.sh .venv

# Prepares the embedded corpus, trains a small MesaNet, evaluates it and lets it write. Under 10 minutes on two cores.
demo: .venv/installed
	$(PYTHON) -m mesanet_jax.prepare --config=configs/prepare.py:demo --config.output=$(RUN)/data
	$(PYTHON) -m mesanet_jax.train --config=configs/mesanet.py:demo --workdir=$(RUN)/mesanet --config.data.path=$(RUN)/data
	$(PYTHON) -m mesanet_jax.evaluate --workdir=$(RUN)/mesanet
	$(PYTHON) -m mesanet_jax.generate --workdir=$(RUN)/mesanet --prompt="It was a truth which Emma could not" --max_tokens=120
	@echo "loss curves: $(RUN)/mesanet/loss.png; loss by position and table: $(RUN)/mesanet/evaluation/"

# Every family's demo for 100 steps, on the same rows, and one report. Under 20 minutes on two cores; a rerun goes on.
compare-demo: .venv/installed
	$(PYTHON) -m mesanet_jax.prepare --config=configs/prepare.py:demo --config.output=$(RUN)/data
	$(PYTHON) -m mesanet_jax.compare --configs=$(subst $(empty) $(empty),$(comma),$(FAMILIES:.py=.py:demo)) \
	    --workdir=runs/compare --steps=100 --config.data.path=$(RUN)/data --config.optimizer.warmup_steps=20 \
	    --config.train.log_every=2 --config.train.eval_batches=1 --config.log.tensorboard=false
	@echo "report: runs/compare/comparison.md"

# Maglev, LRT and the Transformers of their recipe, likewise.
compare-memories: .venv/installed
	$(PYTHON) -m mesanet_jax.prepare --config=configs/prepare.py:demo --config.output=$(RUN)/data
	$(PYTHON) -m mesanet_jax.compare --configs=$(subst $(empty) $(empty),$(comma),$(MEMORIES)) \
	    --workdir=runs/compare-memories --steps=100 --config.data.path=$(RUN)/data --config.optimizer.warmup_steps=20 \
	    --config.train.log_every=2 --config.train.eval_every=20 --config.train.eval_batches=1 --config.log.tensorboard=false
	@echo "report: runs/compare-memories/comparison.md"

# On two processes: XLA compiles on one core at a time.
test: .venv/installed
	$(PYTHON) -m pytest -n 2 --dist worksteal

# With the slow tests; the TPU compiler goes beside the environment, since jax would look for a TPU if it were in it.
test-all: .venv/installed .venv/tpu-compiler
	MESANET_TPU_COMPILER=.venv/tpu-compiler $(PYTHON) -m pytest -n 2 --dist worksteal -m "not gpu"

.venv/tpu-compiler: .venv/installed
	$(PYTHON) -m pip install -qq --disable-pip-version-check --no-deps --target $@ libtpu==0.0.50

lint: .venv/installed
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

clean:
	rm -rf .venv runs build *.egg-info
