"""Tests progress, plain lines without a terminal and a bar on one, and the measurement of speed."""

import io
import sys
from types import SimpleNamespace

import pytest

from mesanet_jax import formatting
from mesanet_jax.reporting import progress
from mesanet_jax.reporting.progress import Progress
from mesanet_jax.training import throughput
from mesanet_jax.training.throughput import Throughput

SCALARS = {"loss": 2.5, "learning_rate": 1e-3, "tokens_per_second": 12_345.0, "mfu": 0.412}


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """Replaces time.monotonic by a value that the test sets."""
    now = SimpleNamespace(seconds=100.0)
    for module in (progress, throughput):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    return now


def test_plain_lines(capsys, clock):
    with Progress(100, start=20) as bar:
        clock.seconds += 80
        bar.update(40, SCALARS)  # 4 s per step, 60 steps to go
        bar.message("saved")
        bar.update(60, {"loss": 2.0})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step  40/100  loss 2.5000  12.3k tokens/s  MFU 41.2 %  ETA 4m00s"
    assert lines[1] == "saved"
    assert lines[2] == "step  60/100  loss 2.0000  ETA 1m20s"


def test_disabled_prints_nothing(capsys):
    with Progress(10, enabled=False) as bar:
        bar.update(1, SCALARS)
        bar.message("hello")
    assert capsys.readouterr() == ("", "")


def test_live_bar_on_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "120")
    with Progress(10, start=4) as bar:
        bar.update(5, SCALARS)
        bar.message("saved")
        bar.update(5, {"validation_loss": 2.75, "validation_bits_per_byte": 1.25})
        bar.update(6, {"loss": 2.25})
    text = sys.stdout.getvalue()
    assert "saved\n" in text
    last = text.split("\r")[-1]
    assert "step 6/10" in last
    assert "loss 2.2500  12.3k tokens/s  MFU 41.2 %  val loss 2.7500  1.2500 bits/byte" in last


def test_live_false_gives_plain_lines_on_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    with Progress(10, live=False) as bar:
        bar.update(5, {"loss": 1.0})
    assert "\r" not in sys.stdout.getvalue()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (950, "950"),
        (1000, "1.00k"),
        (12_345, "12.3k"),
        (999_999, "1.00M"),
        (123e6, "123M"),
        (1.5e12, "1.50T"),
    ],
)
def test_short_number(value, text):
    assert formatting.short_number(value) == text


def test_throughput_leaves_out_the_first_window_and_what_follows_a_restart(clock):
    device = SimpleNamespace(device_kind="cpu", process_index=0, memory_stats=lambda: None)
    speed = Throughput(1000, flops_per_token=1e9, devices=[device])
    clock.seconds += 500  # compilation
    assert speed.measure(1) == {}
    clock.seconds += 20
    assert speed.measure(11) == {"step_seconds": 2.0, "tokens_per_second": 500.0}
    speed.restart()
    clock.seconds += 300  # an evaluation
    assert speed.measure(20) == {}
    clock.seconds += 10
    assert speed.measure(30)["step_seconds"] == 1.0


def test_throughput_reports_mfu_and_memory_of_the_fullest_device(clock):
    device = lambda peak: SimpleNamespace(
        device_kind="NVIDIA H200", process_index=0, memory_stats=lambda: {"peak_bytes_in_use": peak}
    )
    speed = Throughput(989, flops_per_token=1e9, devices=[device(2e9), device(3e9)])
    speed.measure(0)
    clock.seconds += 1e-3
    scalars = speed.measure(1)
    assert scalars["mfu"] == pytest.approx(0.5, rel=1e-6)
    assert scalars["memory_gb"] == 3.0
