"""Several real processes with CPU devices: they compute the same training as one process, and end together.

Their collectives use gloo, which sums in another order than one process, so losses agree only up to rounding.
"""

import signal
import time

import numpy as np
import pytest

from mesanet_jax.runtime import distributed
from tests.helpers.processes import Group
from tests.helpers.smoke import relative_distances
from tests.test_train import Runs

STEPS = 16
OPTIONS = {"steps": STEPS, "checkpoint.every": 100, "train.log_every": 1, "processes.heartbeat_seconds": 10}
MIXED = {"mesh.fsdp": 2, "mesh.tensor": 2}  # data takes what remains


class ProcessRuns(Runs):
    """Runs of one to four processes; `counts` are (processes, devices per process)."""

    def begin(self, name: str, counts: tuple[int, int], overrides: dict | None = None) -> Group:
        argv = ["--config=configs/transformer.py:smoke", *self.argv(name, OPTIONS | MIXED | (overrides or {}))[1:]]
        return Group("mesanet_jax.train", [argv] * counts[0], devices=counts[1])

    def finish(self, name: str, counts: tuple[int, int], overrides: dict | None = None) -> list:
        ends = self.begin(name, counts, overrides).ended()
        assert {end.status for end in ends} == {0}, ends
        return ends

    def await_step(self, name: str, step: int, group: Group) -> None:
        while group.running() and max(self.losses(name), default=0) < step:
            time.sleep(0.02)

    def signalled(self, name: str, counts: tuple[int, int], step: int, *, index: int, number: int, overrides=None):
        """Sends a signal to one process after `step`; returns the ends of all processes and when it was sent."""
        group = self.begin(name, counts, overrides)
        self.await_step(name, step, group)
        sent = group.signal(index, number)
        return group.ended(), sent


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_data):
    return ProcessRuns(tmp_path_factory.mktemp("processes"), tiny_data)


@pytest.fixture(scope="module")
def alone(runs):
    """The name of a complete run of one process with four devices."""
    runs.finish("alone", (1, 4))
    return "alone"


def assert_same_training(runs, one: str, other: str) -> None:
    """Compares every loss, and the parameters at the end."""
    losses, wanted = runs.losses(one), runs.losses(other)
    assert list(losses) == list(wanted) == list(range(1, STEPS + 1))
    np.testing.assert_allclose(list(losses.values()), list(wanted.values()), rtol=2e-6)
    np.testing.assert_allclose(*(list(runs.losses(run, "validation_loss").values()) for run in (one, other)), rtol=2e-6)
    (step, state), (other_step, other_state) = runs.state(one), runs.state(other)
    assert step == other_step == STEPS
    distances = relative_distances(state["params"], other_state["params"])
    assert max(distances.values()) < 1e-5, distances


def test_two_then_one_then_four_processes(runs, alone):
    """A signal to one process stops all after the same step; another number of processes continues the run."""
    name, begun = "elastic", 0
    for counts, index, number in (((2, 2), 1, signal.SIGTERM), ((1, 4), 0, signal.SIGINT)):
        ends, _ = runs.signalled(name, counts, begun + 3, index=index, number=number)
        assert {end.status for end in ends} == {128 + number}, ends
        stopped = runs.steps(name)[-1]
        assert begun < stopped < STEPS and f"step {stopped} is saved" in ends[0].output
        assert "Traceback" not in "".join(end.output for end in ends)
        begun = stopped
    first, *others = runs.finish(name, (4, 1))
    assert f"resuming after step {begun}" in first.output and "goodput" in first.output
    assert not any("step" in end.output for end in others)  # only process 0 prints progress
    assert_same_training(runs, name, alone)


def test_a_killed_process_ends_the_others(runs):
    """They end within the time of the heartbeat: a collective fails, or jax.distributed aborts them."""
    ends, sent = runs.signalled("killed", (2, 2), 3, index=1, number=signal.SIGKILL)
    survivor = ends[0]
    said = {
        distributed.LOST: "process 0: error: a collective failed, another process has probably died; see its log",
        -signal.SIGABRT: "The following tasks are unhealthy (stopped sending heartbeats):\n1\n",
    }
    assert survivor.status in said and said[survivor.status] in survivor.output, survivor
    assert survivor.at - sent < OPTIONS["processes.heartbeat_seconds"] + 5


def test_the_error_of_one_process_ends_all(runs, tmp_path):
    argvs = [runs.argv("wrong", OPTIONS | options) for options in ({}, {"data.path": tmp_path / "missing"})]
    ends = Group("mesanet_jax.train", argvs, devices=2).ended()
    for end in ends:
        assert end.status == 2, ends
        assert f"process 1: error: {tmp_path}/missing/manifest.json: missing" in end.output
        assert "Traceback" not in end.output


def test_a_workdir_that_is_not_shared(runs):
    ends = Group("mesanet_jax.train", [runs.argv(name, OPTIONS) for name in ("here", "there")], devices=2).ended()
    for end in ends:
        assert end.status == 2, ends
        assert (
            f"process 1: error: --workdir={runs.root}/there: this is not the directory that process 0 writes to"
            in end.output
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        {"mesh.fsdp": 4, "mesh.tensor": 2},
        {"mesh.fsdp": 1, "mesh.tensor": 4},
        {"mesh.fsdp": 1, "mesh.tensor": 1, "mesh.sequence": 4},
        {"mesh.tensor": 1},
    ],
)
def test_four_processes_equal_one(runs, mesh):
    """If the tensor or the sequence axis spans two processes, both read the same rows."""
    one, four = (f"{count}-{'-'.join(map(str, mesh.values()))}" for count in ("one", "four"))
    runs.finish(one, (1, 8), mesh)
    runs.finish(four, (4, 2), mesh)
    assert_same_training(runs, four, one)


@pytest.mark.slow
def test_evaluation_by_two_processes(runs, alone):
    evaluate = lambda count: Group("mesanet_jax.evaluate", [[f"--workdir={runs.root / alone}"]] * count, devices=2)
    tables = []
    for count in (1, 2):
        first, *others = evaluate(count).ended()
        assert {end.status for end in (first, *others)} == {0}, first
        tables.append([line for line in first.output.splitlines() if line.startswith("|")])
        assert all("|" not in end.output for end in others)
    assert tables[0] == tables[1] and len(tables[0]) > 10


@pytest.mark.slow
def test_a_frozen_process_ends_the_others(runs):
    """It sends no heartbeat, like a lost host; when it runs again, it is told that the others have ended."""
    group = runs.begin("frozen", (2, 2))
    runs.await_step("frozen", 3, group)
    sent = group.signal(1, signal.SIGSTOP)
    group.processes[0].wait(timeout=60)
    assert time.monotonic() - sent < OPTIONS["processes.heartbeat_seconds"] + 5
    group.processes[1].send_signal(signal.SIGCONT)
    ends = group.ended()
    assert [end.status for end in ends] == [-signal.SIGABRT] * 2, ends


@pytest.mark.slow
def test_the_watchdog_of_one_process_ends_all(runs):
    """One process is frozen and the heartbeat has a long limit, so the watchdog of the other one ends the run."""
    group = runs.begin("stuck", (2, 2), {"train.watchdog_minutes": 0.1, "processes.heartbeat_seconds": 600})
    runs.await_step("stuck", 3, group)
    group.signal(1, signal.SIGSTOP)
    group.processes[0].wait(timeout=60)
    group.processes[1].send_signal(signal.SIGCONT)
    ends = group.ended()
    assert ends[0].status == distributed.STUCK, ends
    assert "in report" in ends[0].output and "process 0: error: no step finished for 0.1" in ends[0].output
    assert ends[1].status in (distributed.STUCK, -signal.SIGABRT)
