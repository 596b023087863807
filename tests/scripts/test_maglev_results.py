"""Tests that the programs accept the commands of the script, and that its models may be compared."""

from mesanet_jax import cli, compare, evaluate, train
from mesanet_jax.comparing import runs as runs_lib
from mesanet_jax.data import recall
from mesanet_jax.runtime import workdir as workdir_lib
from mesanet_jax.schema import build
from mesanet_jax.training.arguments import parse
from scripts.results import maglev_results


def printed(tmp_path, capsys, *argv) -> list[list[str]]:
    """Returns what --dry-run prints, with rows of recall in `tmp_path`."""
    task = build(recall.SCHEMA)
    task.output, task.seq_len, task.delay, task.train_rows, task.validation_rows = str(tmp_path / "rows"), 64, 40, 8, 8
    recall.write(task)
    flags = [f"--recall={task.output}", f"--out={tmp_path}", "--data=DATA", "--recall_values=seed=4", "--dry-run"]
    assert maglev_results.main([*flags, *argv]) == 0
    return [line[2:].split() for line in capsys.readouterr().out.splitlines()]


def of(program, commands) -> list[list[str]]:
    """Returns the arguments of each command that runs a program."""
    return [command[3:] for command in commands if command[2] == program.__name__]


def test_commands(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(runs_lib, "open_data", lambda config: None)
    commands = printed(tmp_path, capsys, "--config.seed=3", "--config.model.max_sweeps=9", "--cost_size=d16")
    trained, scored, compared = (of(program, commands) for program in (train, evaluate, compare))
    assert len(trained) == len(scored) == 2 * len(maglev_results.MODELS) + len(maglev_results.MAGLEV)
    assert len(commands) == 1 + 2 * len(trained) + 3

    runs = {}
    for argv, (where, *exact) in zip(trained, scored):
        args, config = parse(argv)
        assert where == f"--workdir={args.workdir}"
        assert bool(exact) == ("deployed_by" in config.model)
        on_text = args.workdir.parent.name == "text"
        assert (config.data.path, config.seed) == (("DATA", 3) if on_text else (str(tmp_path / "rows"), 4))
        assert on_text or (config.data.seq_len, config.model.vocab_size) == (64, 259)
        assert config.model.get("max_sweeps", 9) == (9 if on_text or not exact else None)
        runs[args.workdir] = config.to_dict()
    for argv in compared:
        flags = cli.parser("")
        for name in ("configs", "workdir"):
            flags.add_argument(f"--{name}")
        args, overrides = cli.parse(flags, argv)
        for run in runs_lib.load(args.configs.split(","), overrides, workdir_lib.path(args.workdir)):
            assert run.config.to_dict() == runs.pop(run.workdir)
    assert not runs


def test_finished_runs_are_not_repeated(tmp_path, capsys):
    before = printed(tmp_path, capsys, "--steps=5")
    png = tmp_path / "text" / "lrt-d12" / "evaluation" / "validation-5.png"
    png.parent.mkdir(parents=True)
    png.touch()
    after = printed(tmp_path, capsys, "--steps=5")
    gone = [command for command in before if command not in after]
    assert len(gone) == 2 and all(f"--workdir={tmp_path}/text/lrt-d12" in command for command in gone)
