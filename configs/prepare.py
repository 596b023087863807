"""Preparing a corpus: `python -m mesanet_jax.prepare --config=configs/prepare.py:PRESET --config.output=DIR`.

Presets: demo (six novels inside the package), slimpajama, fineweb_edu, openwebtext, wikitext, and text for text files.
"""

from mesanet_jax import schema
from mesanet_jax.data.schema import SCHEMA

_SENTENCEPIECE = {"kind": "sentencepiece", "vocab_size": 32000}

PRESETS = {
    # Six novels inside the package: takes seconds and needs no network.
    "demo": {
        "input": "embedded:austen-train",
        "validation_input": "embedded:austen-validation",
        "tokenizer": {"kind": "sentencepiece", "vocab_size": 2048},
        "seq_len": 256,
    },
    # train/chunk*/*.jsonl.zst with `text` and `meta`; validation and test splits have files of their own.
    "slimpajama": {"format": "jsonl", "tokenizer": _SENTENCEPIECE},
    # Parquet with ten columns and no validation split: 0.1 % of the documents are held out.
    "fineweb_edu": {"format": "parquet", "holdout": 0.001, "tokenizer": _SENTENCEPIECE},
    # Parquet without a validation split: 0.05 % of the documents are held out, as in nanoGPT.
    "openwebtext": {"format": "parquet", "holdout": 0.0005, "tokenizer": _SENTENCEPIECE},
    # Each row is one line. The lines of a split are joined to one text, blank ones included, since published
    # perplexities are defined that way.
    "wikitext": {
        "format": "parquet",
        "document": "join",
        "tokenizer": {"kind": "sentencepiece", "vocab_size": 32000, "train_documents": 400_000},
    },
    # Each file is one document.
    "text": {"format": "text", "holdout": 0.01, "tokenizer": _SENTENCEPIECE},
}


def get_config(preset: str = "demo") -> schema.Config:
    if preset not in PRESETS:
        raise ValueError(f"no preset {preset!r}; presets: {', '.join(PRESETS)}")
    config = schema.build(SCHEMA)
    config.update(PRESETS[preset])
    return config
