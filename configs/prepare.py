"""Preparing a corpus: `python -m mesanet_jax.prepare --config=configs/prepare.py:NAME --config.output=DIR`."""

from mesanet_jax import schema
from mesanet_jax.data.schema import SCHEMA

_SENTENCEPIECE = {"kind": "sentencepiece", "vocab_size": 32000}

PRESETS = {
    # The six novels inside the package: seconds, no network.
    "demo": {
        "input": "embedded:austen-train",
        "validation_input": "embedded:austen-validation",
        "tokenizer": {"kind": "sentencepiece", "vocab_size": 2048},
        "seq_len": 256,
    },
    # train/chunk*/*.jsonl.zst with `text` and `meta`; validation and test have files of their own.
    "slimpajama": {"format": "jsonl", "tokenizer": _SENTENCEPIECE},
    # Parquet with ten columns, no validation split: hold out 0.1 % of the documents.
    "fineweb_edu": {"format": "parquet", "holdout": 0.001, "tokenizer": _SENTENCEPIECE},
    # Parquet, no validation split: 0.05 % held out, as in nanoGPT.
    "openwebtext": {"format": "parquet", "holdout": 0.0005, "tokenizer": _SENTENCEPIECE},
    # A row is a line: each split is joined to one text, blank lines kept, as its perplexities are defined.
    "wikitext": {
        "format": "parquet",
        "document": "join",
        "tokenizer": {"kind": "sentencepiece", "vocab_size": 32000, "train_documents": 400_000},
    },
    # A file a document.
    "text": {"format": "text", "holdout": 0.01, "tokenizer": _SENTENCEPIECE},
}


def get_config(preset: str = "demo"):
    if preset not in PRESETS:
        raise ValueError(f"no preset {preset!r}; presets: {', '.join(PRESETS)}")
    config = schema.build(SCHEMA)
    config.update(PRESETS[preset])
    return config
