"""Who says nothing is at work or stuck."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
import pytest

from nanoengine import pulse as pulse_module
from nanoengine.pulse import Pulse, cpu_seconds


def looks(monkeypatch: pytest.MonkeyPatch, use: float, until: float) -> float | None:
    """When a process that uses so much of a processor is called stuck, in seconds of silence."""
    pulse = Pulse(0)
    for silent_s in np.arange(0.0, until, 0.5).tolist():
        monkeypatch.setattr(pulse_module, "cpu_seconds", lambda pid, now=silent_s: 7.0 + use * now)
        if pulse.stuck(silent_s):
            return silent_s
    return None


def test_a_process_that_does_nothing_is_found_out_in_time_and_one_at_work_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = looks(monkeypatch, 0.0, 10.0)
    assert found is not None
    assert 3.0 < found < 4.6, "with a look each half second: red within five"
    assert looks(monkeypatch, 0.005, 10.0) == found, "it still takes in messages"
    for use in (0.05, 1.0, 8.0):
        assert looks(monkeypatch, use, 100.0) is None


def test_a_process_that_stops_after_long_work_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pulse, found = Pulse(0), 0.0
    for silent_s in np.arange(0.0, 30.0, 0.5).tolist():
        monkeypatch.setattr(pulse_module, "cpu_seconds", lambda pid, now=silent_s: min(now, 20.0))
        if pulse.stuck(silent_s):
            found = silent_s
            break
    assert 22.0 < found < 24.0


def test_who_looks_late_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the process has said meanwhile may lie unread here."""
    monkeypatch.setattr(pulse_module, "cpu_seconds", lambda pid: 1.0)
    pulse = Pulse(0)
    assert not pulse.stuck(60.0)
    assert not pulse.stuck(60.5)
    assert not pulse.stuck(0.1)
    assert not pulse.stuck(60.0)


def test_processor_time_of_a_process_and_of_what_it_has_begun() -> None:
    busy = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"
    waits = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {busy + 'input()'!r}])\ninput()\n"
    with subprocess.Popen([sys.executable, "-c", waits], stdin=subprocess.PIPE) as process:
        deadline = time.monotonic() + 30
        while cpu_seconds(process.pid) < 0.3:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert process.poll() is None
        process.communicate(b"\n\n")
    with pytest.raises(OSError):
        cpu_seconds(process.pid)
    assert cpu_seconds(os.getpid()) > 0
    assert not Pulse(process.pid).stuck(10.0), "its end is noticed by other means"
