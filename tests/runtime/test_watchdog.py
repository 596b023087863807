"""A run that hangs ends and says where; a run that makes progress does not end."""

import re
import subprocess
import sys
import time

from mesanet_jax.runtime import distributed
from mesanet_jax.runtime.watchdog import Watchdog
from tests.helpers.smoke import ROOT

# Beats for longer than the limit, then hangs.
HANGING = """
import time
from mesanet_jax.runtime.watchdog import Watchdog

def waits_for_a_lost_host():
    time.sleep(60)

with Watchdog(1 / 60) as watchdog:
    for _ in watchdog.watched(range(12)):
        time.sleep(0.1)
    print("still here", flush=True)
    waits_for_a_lost_host()
"""


def test_a_run_that_hangs_prints_every_stack():
    done = subprocess.run([sys.executable, "-c", HANGING], cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert done.returncode == distributed.STUCK and done.stdout == "still here\n"
    assert "in waits_for_a_lost_host" in done.stderr
    silence = re.search(r"error: no step finished for (.*) minutes", done.stderr)
    assert 1 / 60 <= float(silence[1]) < 2 / 60


def test_it_waits_longer_for_the_first_step(monkeypatch):
    """Twice the limit without a beat is allowed only before the first beat. With None nothing ends the run."""
    ended = []
    monkeypatch.setattr(distributed, "end", lambda status, text: ended.append(status))
    monkeypatch.setattr("faulthandler.dump_traceback", lambda **_: None)
    with Watchdog(0.6 / 60) as watchdog, Watchdog(None):
        time.sleep(1.2)
        assert not ended
        watchdog.beat()
        time.sleep(1.2)  # less than what is allowed before the first beat
        assert ended == [distributed.STUCK]
    with Watchdog(0.2 / 60):
        pass
    time.sleep(1.0)
    assert ended == [distributed.STUCK]
