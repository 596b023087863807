"""Tests the corpus of the package and the script that builds it."""

import importlib.util
import json
import pathlib

import zstandard

ROOT = pathlib.Path(__file__).parents[2]
EMBEDDED = ROOT / "mesanet_jax" / "data" / "embedded"


def records(split: str) -> list[dict]:
    content = zstandard.ZstdDecompressor().decompress((EMBEDDED / f"austen-{split}.jsonl.zst").read_bytes())
    return [json.loads(line) for line in content.decode().splitlines()]


def test_six_novels_by_chapter():
    train, validation = records("train"), records("validation")
    titles = {record["meta"]["title"] for record in train}
    assert len(titles) == 6 and {record["meta"]["title"] for record in validation} == titles
    assert (len(train), len(validation)) == (259, 10)
    assert all("chapter" in record["text"][:2000].lower() for record in train + validation)
    assert {record["meta"]["redpajama_set_name"] for record in train} == {"Austen"}
    by_chapter = [(record["meta"]["title"], record["meta"]["chapter"]) for record in train + validation]
    assert len(set(by_chapter)) == 269


def test_build_script_cuts_before_headings():
    spec = importlib.util.spec_from_file_location("build_austen", ROOT / "scripts" / "build_austen.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    parts = [
        "TITLE\n\nVOLUME I\n\nCHAPTER I\n\nOne.",
        "chapter 2\n\nIn chapter 3 of it.",
        "VOLUME II\n\nCHAPTER I\n\nThree.",
    ]
    assert build.chapters("\n\n".join(parts) + "\n") == parts
