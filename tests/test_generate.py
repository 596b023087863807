"""The command that samples text: its prompts, its output, its errors."""

import io
import sys
from types import SimpleNamespace

import pytest

from mesanet_jax import generate
from mesanet_jax.data.tokenizer import Bytes
from mesanet_jax.errors import UserError
from mesanet_jax.inference.sampler import Sampler
from tests.helpers.tiny_run import prepare_data, save_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("generate")
    save_run(root / "run", prepare_data(root / "data", seq_len=32, eos=True), mixer="mesa")
    return f"--workdir={root / 'run'}"


def output(capsys, *argv):
    generate.main(list(argv))
    return capsys.readouterr()


def test_command(run, capsys):
    shown = output(capsys, run, "--prompt=The café", "--max_tokens=20", "--step=4")
    assert shown.out.startswith("The café") and shown.out.endswith("\n") and len(shown.out) > len("The café\n")
    assert "tokens/s" in shown.err and "bytes per sequence" in shown.err


def test_a_sample_does_not_depend_on_how_many(run, capsys):
    """The prompt is empty, so it is BOS alone; the same seed gives the same text in another call."""
    one = output(capsys, run, "--max_tokens=10").out
    two = output(capsys, run, "--max_tokens=10", "--num_samples=2").out
    first, second = two.removeprefix("--- sample 1 of 2\n").split("--- sample 2 of 2\n")
    assert first == one != second


def test_prompt_from_stdin_file_or_flag(monkeypatch, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("naïve\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("naïve\n"))

    def read(prompt, prompt_file=None):
        return generate.read_prompt(SimpleNamespace(prompt=prompt, prompt_file=prompt_file))

    assert read("-") == read("", file) == read("naïve\n")
    with pytest.raises(UserError, match="give only one of them"):
        read("a", file)


def test_stops_at_the_end_of_a_document(run, capsys, monkeypatch):
    stop = Bytes.eos_id
    monkeypatch.setattr(Sampler, "tokens", lambda *_, **__: iter([ord("x"), ord("y"), stop, ord("z")]))
    assert output(capsys, run, "--prompt=a").out == "axy\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--temperature=-1", "temperature=-1"), ("--top_p=0", "top_p=0"), ("--top_k=-2", "top_k=-2"),
        ("--max_tokens=0", "--max_tokens=0"), ("--num_samples=0", "--num_samples=0"), ("--step=7", r"\[4, 8\]"),
        ("--prompt_file=missing.txt", "missing.txt"), ("--max_token=3", "did you mean --max_tokens"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(run, argv, message):
    with pytest.raises(UserError, match=message) as raised:
        generate.main([run, argv])
    assert "\n" not in str(raised.value)


def test_empty_workdir(tmp_path):
    with pytest.raises(UserError, match="no run"):
        generate.main([f"--workdir={tmp_path}", "--prompt=a"])


def test_no_beginning_without_bos():
    rows = SimpleNamespace(tokenizer=Bytes(), manifest={"bos": False})
    with pytest.raises(UserError, match="no BOS"):
        generate.prompt_ids(rows, "")
