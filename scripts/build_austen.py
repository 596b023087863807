"""Builds the embedded corpus: `python scripts/build_austen.py FOLDER` with the six novels as .txt files.

A chapter is a document, its heading kept; a volume's heading goes with its first chapter. Of each novel the 4 % of
chapters with the smallest hashes are the validation split.
"""

import hashlib
import json
import pathlib
import re
import sys

import zstandard

_OUTPUT = pathlib.Path(__file__).parent.parent / "mesanet_jax" / "data" / "embedded"
_CHAPTER = re.compile(r"^(?:VOLUME [IVX]+\n+)?chapter (?:[ivxl]+|\d+)$", re.IGNORECASE | re.MULTILINE)
_VALIDATION_FRACTION = 0.04


def chapters(text: str) -> list[str]:
    """The text cut before each heading; the title page goes with the first chapter."""
    cuts = [0, *[match.start() for match in _CHAPTER.finditer(text)][1:], len(text)]
    return [text[begin:end].strip() for begin, end in zip(cuts, cuts[1:])]


def held_out(texts: list[str]) -> set[int]:
    """Which chapters of one novel are for validation."""
    by_hash = sorted(range(len(texts)), key=lambda index: hashlib.sha256(texts[index].encode()).hexdigest())
    return set(by_hash[: max(1, round(_VALIDATION_FRACTION * len(texts)))])


def main(folder: str) -> None:
    splits: dict[str, list[str]] = {"train": [], "validation": []}
    for path in sorted(pathlib.Path(folder).glob("*.txt")):
        texts = chapters(path.read_text(encoding="utf-8"))
        validation = held_out(texts)
        for index, text in enumerate(texts):
            meta = {"redpajama_set_name": "Austen", "title": path.stem.replace("_", " ").title(), "chapter": index + 1}
            line = json.dumps({"text": text, "meta": meta}, ensure_ascii=False)
            splits["validation" if index in validation else "train"].append(line + "\n")
    for split, lines in splits.items():
        content = zstandard.ZstdCompressor(level=19).compress("".join(lines).encode())
        (_OUTPUT / f"austen-{split}.jsonl.zst").write_bytes(content)
        print(f"{split}: {len(lines)} chapters, {len(content):,} bytes")


if __name__ == "__main__":
    main(sys.argv[1])
