"""Declares every field of a preparation."""

from mesanet_jax.data.tokenizer import KINDS
from mesanet_jax.schema import Field

SCHEMA = {
    "input": Field(
        "",
        "files of the training split: paths and globs, separated by commas; local, gs://, s3://, hf://, or"
        " embedded:NAME for a corpus of the package",
    ),
    "validation_input": Field("", "files of the validation split, as in `input`; empty: none"),
    "test_input": Field("", "files of the test split, as in `input`; empty: none"),
    "holdout": Field(
        0.0,
        "fraction of the documents of `input` that goes to the validation split; chosen by a hash of their text",
        at_least=0,
    ),
    "output": Field("", "directory to write the rows, the tokenizer and manifest.json to; local or remote"),
    "format": Field(
        "auto",
        "format of the input files; auto: from the endings of their names",
        choices=("auto", "parquet", "jsonl", "text"),
    ),
    "text_field": Field("text", "Parquet column or JSON key that holds the text"),
    "document": Field(
        "record",
        "what a document is; record: a row of a Parquet file, a JSON line or a whole text file; paragraph or line: a"
        " part of a text file; join: all of a split",
        choices=("record", "paragraph", "line", "join"),
    ),
    "on_error": Field(
        "fail",
        "what to do with a broken line, record or file: fail stops the preparation, skip skips and counts it",
        choices=("fail", "skip"),
    ),
    "max_errors": Field(
        1000, "with on_error=skip: largest number of problems; if there are more, the preparation stops", at_least=0
    ),
    "tokenizer": {
        "kind": Field("sentencepiece", "kind of the tokenizer", choices=tuple(KINDS)),
        "path": Field(
            "",
            "file of the tokenizer: a sentencepiece .model or a Hugging Face tokenizer.json; empty: train a"
            " sentencepiece BPE on the input",
        ),
        "vocab_size": Field(32000, "vocabulary size of a tokenizer that is trained on the input", at_least=300),
        "train_documents": Field(
            20000, "number of documents, from the beginning of `input`, that a tokenizer is trained on", at_least=1
        ),
    },
    "seq_len": Field(2048, "tokens that each row trains on; a row holds one token more", at_least=1),
    "bos": Field(True, "put a BOS token before each document"),
    "eos": Field(False, "put an EOS token after each document"),
    "unit_mb": Field(
        64, "approximate size of a unit of work in megabytes of text; each unit becomes one file per split", at_least=1
    ),
    "workers": Field(0, "number of worker processes; 0: one per CPU core", at_least=0),
    "limit_documents": Field(
        0, "number of training documents after which to stop; they are read by one process; 0: no limit", at_least=0
    ),
}
