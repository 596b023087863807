"""The commands of the GPU session are ones that the programs take, and their models may be compared."""

from mesanet_jax import cli, compare
from mesanet_jax import config as config_lib
from mesanet_jax.data import recall
from mesanet_jax.schema import build
from scripts import maglev_results


def test_commands(tmp_path, capsys):
    task = build(recall.SCHEMA)
    task.output, task.seq_len, task.delay, task.train_rows, task.validation_rows = str(tmp_path / "rows"), 64, 40, 8, 8
    recall.write(task)
    argv = [f"--recall={task.output}", f"--out={tmp_path}", "--data=DATA", "--config.seed=3", "--recall_values=seed=4"]
    assert maglev_results.main([*argv, "--dry_run"]) == 0
    commands = [line[2:].split() for line in capsys.readouterr().out.splitlines()]
    assert len(commands) == 1 + 2 * len(maglev_results.MODELS) + 2
    for command in commands[1:]:
        flags = cli.parser("")
        for name in ("configs", "workdir", "steps"):
            flags.add_argument(f"--{name}")
        args, overrides = cli.parse(flags, command[3:])
        specs = args.configs.split(",")
        configs = [config_lib.load(spec, overrides | {"steps": args.steps}) for spec in specs]
        on_text = args.workdir.endswith("text")
        assert {config.data.path for config in configs} == {"DATA" if on_text else task.output}
        assert {config.seed for config in configs} == {3 if on_text else 4}
        assert on_text or {(config.data.seq_len, config.model.vocab_size) for config in configs} == {(64, 259)}
        compare.check_equal([compare.Run(spec, config, tmp_path) for spec, config in zip(specs, configs)])
