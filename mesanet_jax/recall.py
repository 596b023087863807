"""Makes the data of delayed recall, rows like those of mesanet_jax.prepare of which only answers are scored.

python -m mesanet_jax.recall --config.output=DIR --config.seq_len=1024 --config.delay=600

A model trains on it with --config.data.path=DIR, that seq_len and --config.model.vocab_size=259. Its loss is ln(symbols)
without memory (a perplexity of 16, if they are that many) and goes to 0 with it.
"""

import math

from mesanet_jax import cli, schema
from mesanet_jax.data import recall


def main(argv: list[str]) -> None:
    flags = cli.parser(__doc__)
    flags.add_argument("--help-config", action="store_true", help="list the fields of the config and exit")
    args, overrides = cli.parse(flags, argv)
    if args.help_config:
        print(schema.describe(recall.SCHEMA))
        return
    config = schema.build(recall.SCHEMA)
    cli.apply_overrides(config, recall.SCHEMA, overrides)
    done = recall.write(config)
    for split, record in done["splits"].items():
        print(f"{config.output}: {split}: {record['rows']:,} rows of {config.seq_len} + 1, {config.pairs} answers each")
    print(
        f"a validation answer is {config.delay} tokens behind its value: {math.log(config.symbols):.4f} nats without memory;"
        f" windows of W tokens in L layers have none of it where L (W - 1) < {config.delay - 1}"
    )


if __name__ == "__main__":
    cli.run(main)
