"""The flags by which processes find each other; what they do together is in test_processes.py."""

import pytest

from mesanet_jax import cli, train
from mesanet_jax.errors import UserError
from mesanet_jax.runtime import distributed
from mesanet_jax.training.arguments import parse


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--processes=2"], "go with --coordinator=HOST:PORT alone"),
        (["--coordinator=auto", "--process=0"], "go with --coordinator=HOST:PORT alone"),
        (["--coordinator=host:1234", "--processes=2"], "needs --processes=N and --process=I"),
        (["--coordinator=host", "--processes=2", "--process=0"], "needs HOST:PORT, or auto"),
        (["--coordinator=host:1234", "--processes=2", "--process=2"], "must be from 0 to 1"),
    ],
)
def test_flags_that_name_no_group(argv, message):
    with pytest.raises(UserError, match=message):
        train.main(["--config=configs/mesanet.py:smoke", "--workdir=runs/none", *argv])


def test_no_cluster_here(monkeypatch):
    flags = cli.parser("")
    distributed.add_flags(flags)
    args, _ = cli.parse(flags, ["--coordinator=auto"])
    monkeypatch.setattr(distributed.jax.distributed, "initialize", raiser(ValueError("no cluster")))
    monkeypatch.setattr(distributed.jax.config, "update", lambda *_: None)
    settings = parse(["--config=configs/mesanet.py:smoke", "--workdir=w"])[1].processes
    remedy = "--coordinator=auto: no cluster .*--coordinator=HOST:PORT --processes=N"
    with pytest.raises(UserError, match=remedy), distributed.joined(args, settings):
        pass


def raiser(error):
    def call(*_, **__):
        raise error

    return call
