"""Builds the embedded corpus from a folder with the six novels as .txt files: `python -m scripts.build_austen FOLDER`

Each chapter, with its heading, is a document; the heading of a volume belongs to its first chapter. The validation
split consists of the 4 % of each novel's chapters whose hashes are smallest.
"""

import argparse
import hashlib
import json
import pathlib
import re

import zstandard

_OUTPUT = pathlib.Path(__file__).parent.parent / "mesanet_jax" / "data" / "embedded"
_CHAPTER = re.compile(r"^(?:VOLUME [IVX]+\n+)?chapter (?:[ivxl]+|\d+)$", re.IGNORECASE | re.MULTILINE)
_VALIDATION_FRACTION = 0.04


def chapters(text: str) -> list[str]:
    """Returns the text, cut before each heading; the title page belongs to the first chapter."""
    cuts = [0, *[match.start() for match in _CHAPTER.finditer(text)][1:], len(text)]
    return [text[begin:end].strip() for begin, end in zip(cuts, cuts[1:])]


def held_out(texts: list[str]) -> set[int]:
    """Returns the indices of the chapters of a novel that are for validation."""
    by_hash = sorted(range(len(texts)), key=lambda index: hashlib.sha256(texts[index].encode()).hexdigest())
    return set(by_hash[: max(1, round(_VALIDATION_FRACTION * len(texts)))])


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("folder", type=pathlib.Path, help="folder with the novels as .txt files")
    folder = flags.parse_args().folder
    splits: dict[str, list[str]] = {"train": [], "validation": []}
    for path in sorted(folder.glob("*.txt")):
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
    main()
