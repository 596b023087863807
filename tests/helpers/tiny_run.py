"""A run that is small enough for any test: a few documents as bytes, and checkpoints of a smoke model."""

import pathlib

import jax
import jax.numpy as jnp

from configs import mesanet, transformer
from configs import prepare as prepare_configs
from mesanet_jax import models, prepare
from mesanet_jax.data.rows import PackedRows
from mesanet_jax.runtime import workdir
from mesanet_jax.training import checkpoint
from mesanet_jax.training.data import run_metadata

CONFIGS = {"mesa": mesanet, "attention": transformer}
TEXTS = [f"Document {i}: " + "the café has naïve waiters. " * (i % 5 + 1) for i in range(40)]


def prepare_data(path: pathlib.Path, *, seq_len: int, eos: bool = False, output: str | None = None) -> str:
    """Prepares TEXTS as bytes, both for training and validation, in `path` or in `output`; returns the directory."""
    files = path.with_name(f"{path.name}_texts")
    files.mkdir()
    for split in ("train", "validation"):  # a file may not be in two splits
        (files / f"{split}.txt").write_text("\n".join(TEXTS))
    config = prepare_configs.get_config("text")
    config.input, config.validation_input = str(files / "train.txt"), str(files / "validation.txt")
    config.output, config.holdout, config.document = output or str(path), 0.0, "line"
    config.tokenizer.kind, config.seq_len, config.eos, config.workers = "bytes", seq_len, eos, 1
    prepare.prepare(config)
    return config.output


def save_run(path: pathlib.Path, data: str, *, mixer: str, steps=(4, 8)):
    """Makes a workdir with a config and checkpoints of untrained weights. Returns (config, params)."""
    config = CONFIGS[mixer].get_config("smoke")
    rows = PackedRows(data, "train")
    config.data.path, config.data.seq_len, config.model.vocab_size = data, rows.seq_len, rows.vocab_size
    path.mkdir(parents=True, exist_ok=True)
    workdir.save(path, config)
    params = jax.jit(models.build(config.model).init)(jax.random.key(0))
    saved = checkpoint.Checkpoints(path)
    for step in steps:
        saved.save(step, {"params": params, "step": jnp.int32(step)}, run_metadata(config, rows))
    saved.wait()
    saved.close()
    return config, params
