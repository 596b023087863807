"""Makes the data of delayed recall: `python -m mesanet_jax.recall --config.output=DIR`

A few tokens of each row can only be predicted by remembering others, --config.delay tokens before. The rows have the
form of those of mesanet_jax.prepare, but only the answers are scored. To train on them, set --config.data.path=DIR,
--config.data.seq_len to the --config.seq_len of this command, and --config.model.vocab_size=259. Without memory, the
loss stays at ln(symbols); with memory, it falls towards 0. docs/data.md describes the task.
"""

import math

from mesanet_jax import cli, schema
from mesanet_jax.data import recall


def main(argv: list[str]) -> None:
    """Runs the command."""
    flags = cli.parser(__doc__)
    flags.add_argument(
        "--help-config", action="store_true", help="print the fields of the config with their meaning, and exit"
    )
    args, overrides = cli.parse(flags, argv)
    if args.help_config:
        print(schema.describe(recall.SCHEMA))
        return
    config = schema.build(recall.SCHEMA)
    cli.apply_overrides(config, recall.SCHEMA, overrides)
    done = recall.write(config)
    for split, record in done["splits"].items():
        rows = f"{record['rows']:,} rows of {config.seq_len + 1} tokens"
        print(f"{config.output}: {split}: {rows}, {config.pairs} answers per row")
    print(
        f"validation answers are {config.delay} tokens behind their values; without memory, an answer costs"
        f" {math.log(config.symbols):.4f} nats"
    )
    print(f"L layers of windows of W tokens do not see the values if L (W - 1) < {config.delay - 1}")


if __name__ == "__main__":
    cli.run(main)
