"""The arguments of `mesanet_jax.train`, which the launchers check before they start anything."""

import argparse

from mesanet_jax import cli
from mesanet_jax import config as config_lib
from mesanet_jax.errors import UserError
from mesanet_jax.runtime import distributed
from mesanet_jax.runtime import workdir as workdir_lib
from mesanet_jax.schema import Config


def parse(argv: list[str], *, doc: str | None = None) -> tuple[argparse.Namespace, Config]:
    """Returns the flags and the checked config of a training command; `doc` is the text of its --help.

    Raises:
      UserError: an unknown flag or field, an impossible value, or a missing --workdir.
    """
    flags = cli.parser(doc)
    flags.add_argument("--config", required=True, help="config file and size, such as configs/mesanet.py:140m")
    flags.add_argument("--workdir", type=workdir_lib.path, help="directory of the run, may be gs://; made if missing")
    flags.add_argument("--help-config", action="store_true", help="list the fields of the config and exit")
    distributed.add_flags(flags)
    args, overrides = cli.parse(flags, argv)
    config = config_lib.load(args.config, overrides)
    if args.workdir is None and not args.help_config:
        raise UserError("--workdir: is missing; name the directory of the run, as --workdir=runs/NAME")
    return args, config
