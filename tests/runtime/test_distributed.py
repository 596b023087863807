"""The flags of several processes; test_processes.py runs several processes."""

import pytest

from mesanet_jax import cli, train
from mesanet_jax.errors import UserError
from mesanet_jax.runtime import distributed
from mesanet_jax.training.arguments import parse


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--processes=2"], "can only be used together with --coordinator=HOST:PORT"),
        (["--coordinator=auto", "--process=0"], "can only be used together with --coordinator=HOST:PORT"),
        (["--coordinator=host:1234", "--processes=2"], "also needs --processes=N and --process=I"),
        (["--coordinator=host", "--processes=2", "--process=0"], "must be HOST:PORT or auto"),
        (["--coordinator=host:1234", "--processes=2", "--process=2"], "must be from 0 to 1"),
    ],
)
def test_incompatible_flags(argv, message):
    with pytest.raises(UserError, match=message):
        train.main(["--config=configs/mesanet.py:smoke", "--workdir=runs/none", *argv])


def test_no_cluster_here(monkeypatch):
    flags = cli.parser("")
    distributed.add_flags(flags)
    args, _ = cli.parse(flags, ["--coordinator=auto"])
    monkeypatch.setattr(distributed.jax.distributed, "initialize", raiser(ValueError("no cluster")))
    monkeypatch.setattr(distributed.jax.config, "update", lambda *_: None)
    settings = parse(["--config=configs/mesanet.py:smoke", "--workdir=w"])[1].processes
    remedy = "--coordinator=auto: no cluster .*elsewhere use --coordinator=HOST:PORT --processes=N"
    with pytest.raises(UserError, match=remedy), distributed.joined(args, settings):
        pass


def raiser(error):
    def call(*_, **__):
        raise error

    return call
