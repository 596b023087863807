"""Goodput, measured with a clock that the tests set."""

import json

import pytest

from mesanet_jax.errors import UserError
from mesanet_jax.runtime.goodput import FILE, Goodput


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def process(workdir, clock, *, resumed: int, start_up: float = 10) -> Goodput:
    """Returns the goodput of a process that has resumed after a step."""
    goodput = Goodput(clock)
    clock.now += start_up
    goodput.resume(workdir, resumed)
    goodput.enter("training")
    return goodput


def test_every_moment_belongs_to_one_kind(tmp_path):
    clock = Clock()
    goodput = process(tmp_path, clock, resumed=0)
    clock.now += 60
    with pytest.raises(KeyError), goodput.spending("evaluation"):
        clock.now += 20
        raise KeyError
    with goodput.spending("checkpoint"):
        clock.now += 4
    clock.now += 6
    assert goodput.summary() == "goodput 66.0 % of 1m40s: training 1m06s, evaluation 20s, start-up 10s, checkpoint 4s"


def test_training_after_the_last_checkpoint_is_lost(tmp_path):
    """A process trains 100 s up to the checkpoint of step 5, writes its record 20 s later, and crashes."""
    clock = Clock()
    crashed = process(tmp_path, clock, resumed=0)
    clock.now += 100
    crashed.saved(5)
    clock.now += 20
    crashed.write(tmp_path)
    clock.now += 10_000  # the time between two processes is not counted
    resumed = process(tmp_path, clock, resumed=5)
    clock.now += 50
    resumed.write(tmp_path)
    seconds = json.loads((tmp_path / FILE).read_text())["seconds"]
    assert {kind: value for kind, value in seconds.items() if value} == {"training": 150, "start-up": 20, "lost": 20}
    assert resumed.fraction == 150 / 190


def test_a_checkpoint_before_the_newest(tmp_path):
    """If step 8 is damaged, the training after step 5 is lost and step 8 is forgotten."""
    clock = Clock()
    first = process(tmp_path, clock, resumed=0)
    for step, seconds in ((5, 100), (8, 60)):
        clock.now += seconds
        first.saved(step)
    first.write(tmp_path)
    second = process(tmp_path, clock, resumed=5)
    assert second.seconds["training"] == 100 and second.seconds["lost"] == 60
    second.write(tmp_path)
    assert list(json.loads((tmp_path / FILE).read_text())["training_seconds_at_checkpoint"]) == ["0", "5"]


def test_a_file_that_is_not_a_record(tmp_path):
    for text in ("", "[]", '{"seconds": {}}', '{"seconds": 3}'):
        (tmp_path / FILE).write_text(text)
        with pytest.raises(UserError, match="not a goodput record"):
            Goodput().resume(tmp_path, 0)
