"""The commands of the GPU session are ones that the programs take, in an order that goes on where it stopped."""

import json

from configs import pha
from mesanet_jax import cli
from mesanet_jax import config as config_lib
from scripts import pha_results


def printed(capsys, *argv):
    assert pha_results.main(["--data=DATA", *argv, "--dry_run"]) == 0
    return [line[2:].split() for line in capsys.readouterr().out.splitlines()]


def test_every_variant_is_in_it():
    assert {variant[1:] for variant in pha_results.VARIANTS} == {"", *pha.VARIANTS}


def test_commands(tmp_path, capsys):
    commands = printed(capsys, f"--out={tmp_path}", "--seeds=0,1", "--steps=500")
    compared = [command for command in commands if "mesanet_jax.compare" in command]
    assert len(compared) == 3 and len(commands) == 1 + 3 + 2 * len(pha_results.VARIANTS)
    for command in compared:
        flags = cli.parser("")
        for name in ("configs", "workdir", "steps"):
            flags.add_argument(f"--{name}")
        args, overrides = cli.parse(flags, command[3:])
        for spec in args.configs.split(","):
            config = config_lib.load(spec, overrides | {"steps": args.steps, "optimizer.warmup_steps": "0"})
            assert config.data.path == "DATA"
    assert "--config.optimizer.clip_norm=none" in compared[-1]


def test_finished_evaluations_are_not_repeated_and_are_tabled(tmp_path, capsys):
    argv = (f"--out={tmp_path}", "--seeds=0,1", "--steps=500")
    before = len(printed(capsys, *argv))
    for seed, perplexity in (("0", 20.0), ("1", 22.0)):
        args = cli.parser("").parse_args([])
        args.out, args.size, args.steps, args.split = tmp_path, "90m", 500, "validation"
        path = pha_results.stream_json(args, seed, "-uniform")
        path.parent.mkdir(parents=True)
        record = {"perplexity": perplexity, "word_perplexity": None, "bits_per_byte": 1.0, "parameters": 87_000_000}
        path.write_text(json.dumps(record))
    assert len(printed(capsys, *argv)) == before - 2
    table = pha_results.table(args, ["0", "1"])
    (row,) = [line for line in table.splitlines() if "uniform" in line]
    assert [cell.strip() for cell in row.split("|")[2:-1]] == [
        "87.00M",
        "2",
        "21.0000 +- 1.4142",
        "-",
        "1.0000 +- 0.0000",
    ]
