"""Tests that the programs accept the commands of the script, and that it continues where it stopped."""

import json

from configs import pha
from mesanet_jax import cli
from mesanet_jax import config as config_lib
from scripts.results import chains, pha_results


def printed(capsys, *argv):
    assert pha_results.main(["--data=DATA", *argv, "--dry-run"]) == 0
    return [line[2:].split() for line in capsys.readouterr().out.splitlines()]


def test_every_variant_is_in_it():
    assert {variant[1:] for variant in pha_results.VARIANTS} == {"", *pha.VARIANTS}


def test_commands(tmp_path, capsys):
    commands = printed(capsys, f"--out={tmp_path}", "--seeds=0,1", "--steps=500", "--config.optimizer.warmup_steps=5")
    compared = [command for command in commands if "mesanet_jax.compare" in command]
    runs = len(pha_results.VARIANTS) + len(pha_results.SEVERAL_SEEDS)
    reports = compared[runs + len(pha_results.WARM_UP_FREE) :]
    assert len(reports) == 3 and len(commands) == 1 + len(compared) + runs
    for command in compared:
        flags = cli.parser("")
        for name in ("configs", "workdir", "steps"):
            flags.add_argument(f"--{name}")
        args, overrides = cli.parse(flags, command[3:])
        for spec in args.configs.split(","):
            config = config_lib.load(spec, overrides | {"steps": args.steps})
            assert config.data.path == "DATA"
            free = "no_warm_up" in args.workdir
            assert (config.optimizer.warmup_steps, config.optimizer.clip_norm) == ((0, None) if free else (5, 1.0))


def test_finished_evaluations_are_not_repeated_and_are_tabled(tmp_path, capsys):
    argv = (f"--out={tmp_path}", "--seeds=0,1", "--steps=500")
    before = len(printed(capsys, *argv))
    for seed, perplexity in (("0", 20.0), ("1", 22.0)):
        args = cli.parser("").parse_args([])
        args.out, args.size, args.steps, args.split, args.seeds = tmp_path, "90m", 500, "validation", "0,1"
        path = pha_results.stream_json(args, seed, "-uniform")
        path.parent.mkdir(parents=True)
        record = {"perplexity": perplexity, "word_perplexity": None, "bits_per_byte": 1.0, "parameters": 87_000_000}
        path.write_text(json.dumps(record))
    assert len(printed(capsys, *argv)) == before - 2
    table = pha_results.table(args)
    (row,) = [line for line in table.splitlines() if "uniform" in line]
    assert [cell.strip() for cell in row.split("|")[2:-1]] == [
        "87.00M",
        "2",
        "21.0000 +- 1.4142",
        "-",
        "1.0000 +- 0.0000",
    ]


def test_a_failed_command_ends_its_chain(tmp_path, capsys):
    log = tmp_path / "logs" / "chain.log"
    fails, never = ["python3", "-c", "raise SystemExit(3)"], ["python3", "-c", "print('ran')"]
    assert not chains.run([fails, never], log) and "ran" not in log.read_text()
    assert chains.run([never], log) and "ran" in log.read_text()
    assert "exit status 3" in capsys.readouterr().out
