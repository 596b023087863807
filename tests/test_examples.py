"""The scripts in examples/ run and print what they promise."""

import pytest

from examples import mesa_op, open_checkpoint
from tests.helpers.tiny_run import save_run


def test_mesa_op(capsys):
    errors = mesa_op.main()
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(errors)
    assert errors["30 steps"] < 1e-4 and errors["decoding"] < 1e-4
    assert errors["30 steps"] < errors["until the residual is 1e-4 of its first"] < errors["5 steps"] < 0.1


@pytest.mark.parametrize("mixer", ["mesa", "attention"])
def test_open_checkpoint(mixer, tiny_data, tmp_path, capsys):
    save_run(tmp_path, tiny_data, mixer=mixer)
    open_checkpoint.main([f"--workdir={tmp_path}", "--text=The café", "--top=3"])
    title, loss, *tokens = capsys.readouterr().out.splitlines()
    assert title.endswith("step 8")
    assert loss.startswith("loss: ") and loss.endswith("over 9 tokens")  # bytes
    assert len(tokens) == 1 + 3 and all("%" in line for line in tokens[1:])
