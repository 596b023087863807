"""Every field of a preparation, declared once."""

from mesanet_jax.data.tokenizer import KINDS
from mesanet_jax.schema import Field

SCHEMA = {
    "input": Field("", "training files: comma-separated paths and globs, local, gs://, s3://, hf://, embedded:NAME"),
    "validation_input": Field("", "files of the validation split, if it has files of its own"),
    "test_input": Field("", "files of the test split"),
    "holdout": Field(0.0, "fraction of the documents of input for validation, by a hash of their text", at_least=0),
    "output": Field("", "directory to write: rows, tokenizer and manifest.json"),
    "format": Field("auto", "of the input files; auto: by their ending", choices=("auto", "parquet", "jsonl", "text")),
    "text_field": Field("text", "parquet column or JSON key that holds the text"),
    "document": Field(
        "record",
        "a document is a record (row, JSON line, text file), a paragraph or line of a text file, or a split's join",
        choices=("record", "paragraph", "line", "join"),
    ),
    "on_error": Field("fail", "what a broken line, row or file does", choices=("fail", "skip")),
    "max_errors": Field(1000, "with on_error=skip, more problems than this stop the run", at_least=0),
    "tokenizer": {
        "kind": Field("sentencepiece", "of tokenizer", choices=tuple(KINDS)),
        "path": Field("", "sentencepiece .model or Hugging Face tokenizer.json; empty: train a sentencepiece BPE"),
        "vocab_size": Field(32000, "of a sentencepiece BPE trained here", at_least=300),
        "train_documents": Field(20000, "first documents of the input, to train it on", at_least=1),
    },
    "seq_len": Field(2048, "tokens a row is trained on; rows hold one more", at_least=1),
    "bos": Field(True, "put BOS before each document"),
    "eos": Field(False, "put EOS after each document"),
    "unit_mb": Field(64, "megabytes of text, roughly, in a unit of work; each gives one file of rows", at_least=1),
    "workers": Field(0, "processes; 0: one a core", at_least=0),
    "limit_documents": Field(0, "stop after so many training documents, read by one process; 0: no limit", at_least=0),
}
