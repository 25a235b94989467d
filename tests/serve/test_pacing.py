"""The pacer, on made-up clocks."""

from __future__ import annotations

from deployments.pacing import PERIOD_S, Pacer


class Clocks:
    wall = cpu = 0.0

    def pacer(self) -> Pacer:
        return Pacer(0.02, lambda: self.wall, lambda: self.cpu)

    def run(self, pacer: Pacer, ticks: int, *, busy: float, late: float = 0.0) -> None:
        for _ in range(ticks):
            self.wall += PERIOD_S + late
            self.cpu += busy * (PERIOD_S + late)
            pacer.tick()


def test_idle_process_does_not_pause() -> None:
    clocks = Clocks()
    pacer = clocks.pacer()
    clocks.run(pacer, 100, busy=0.5, late=0.002)
    assert pacer.pause == 0


def test_busy_process_pauses_more_and_more_up_to_a_bound() -> None:
    clocks = Clocks()
    pacer = clocks.pacer()
    pauses = []
    for _ in range(20):
        clocks.run(pacer, 1, busy=1.0)
        pauses.append(pacer.pause)
    assert pauses == sorted(pauses)
    assert 0 < pauses[0] < 0.01
    assert pauses[-1] == 0.02


def test_late_loop_pauses_although_its_process_is_idle() -> None:
    """On a crowded machine a process gets little CPU: it looks idle, and is behind all the same."""
    clocks = Clocks()
    pacer = clocks.pacer()
    clocks.run(pacer, 3, busy=0.1, late=0.05)
    assert pacer.pause > 0


def test_pause_goes_back_to_nothing() -> None:
    clocks = Clocks()
    pacer = clocks.pacer()
    clocks.run(pacer, 20, busy=1.0)
    clocks.run(pacer, 100, busy=0.3)
    assert pacer.pause == 0
