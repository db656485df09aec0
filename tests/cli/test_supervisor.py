"""Who ended by itself comes back, later each time; who keeps ending is given up."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from pipeline.cli.fleet import API
from pipeline.cli.supervisor import ATTEMPTS, FIRST_S, LONGEST_S, STEADY_S, Supervisor


@dataclass
class Ended:
    name: str

    def epitaph(self) -> str:
        return f"{self.name} ended"


@dataclass
class Processes:
    """Names that are dead now; a restart brings one back."""

    gone: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    serves: bool = True

    def dead(self) -> list[Ended]:
        return [Ended(name) for name in self.gone]

    def restart(self, each: Ended) -> None:
        self.gone.remove(each.name)
        self.log.append(f"restart {each.name}")

    def bury(self, each: Ended) -> None:
        self.gone.remove(each.name)
        self.log.append(f"bury {each.name}")


class Scene:
    def __init__(self) -> None:
        self.now = 1000.0
        self.processes = Processes()
        self.supervisor = Supervisor(self.processes, self.processes.log.append, lambda: self.now)

    def tend_after(self, seconds: float) -> bool:
        self.now += seconds
        return self.supervisor.tend()

    def said(self) -> list[str]:
        log, self.processes.log[:] = list(self.processes.log), []
        return log


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_nothing_ended_nothing_is_said(scene: Scene) -> None:
    assert scene.tend_after(5) is True
    assert scene.said() == []


def test_it_is_told_once_and_started_again_when_due(scene: Scene) -> None:
    scene.processes.gone = ["p"]
    assert scene.tend_after(STEADY_S) is True
    assert scene.said() == ["p ended", "p will be started again in 1 s"]
    assert scene.tend_after(FIRST_S / 2) is True
    assert scene.said() == []
    scene.tend_after(FIRST_S / 2)
    assert scene.said() == ["p is started again", "restart p"]


def test_each_restart_waits_longer_and_the_last_ends_in_a_burial(scene: Scene) -> None:
    waits = []
    for _ in range(ATTEMPTS):
        scene.processes.gone = ["p"]
        scene.tend_after(0)
        waits.append(float(scene.said()[1].split()[-2]))
        scene.tend_after(waits[-1])
        assert scene.said() == ["p is started again", "restart p"]
    assert waits == [1, 2, 4, 8, 16]
    assert max(waits) <= LONGEST_S
    scene.processes.gone = ["p"]
    scene.tend_after(0)
    assert scene.said() == [
        "p ended",
        "p ended 6 times in a row and is given up: see its log, then start anew",
        "bury p",
    ]


def test_who_ran_for_long_begins_anew(scene: Scene) -> None:
    for _ in range(2):
        scene.processes.gone = ["p"]
        scene.tend_after(0)
        scene.tend_after(10)
    scene.said()
    scene.processes.gone = ["p"]
    scene.tend_after(STEADY_S)
    assert scene.said() == ["p ended", "p will be started again in 1 s"]


def test_it_ends_when_nothing_serves_and_nothing_comes_back(scene: Scene) -> None:
    scene.processes.serves = False
    scene.processes.gone = [API]
    assert scene.tend_after(0) is True  # it will come back
    ends = []
    for _ in range(ATTEMPTS):
        scene.tend_after(LONGEST_S)
        scene.processes.gone = [API]
        ends.append(scene.tend_after(0))
    assert ends == [*[True] * (ATTEMPTS - 1), False]
    assert f"{API} ended 6 times in a row and is given up: see its log, then start anew" in scene.said()
    assert scene.tend_after(1) is False
    assert scene.said() == []  # an API cannot be buried: it is told of once


def test_each_is_looked_after_for_itself(scene: Scene) -> None:
    scene.processes.gone = ["p", "d"]
    scene.tend_after(0)
    assert [line for line in scene.said() if "will be" in line] == [
        "p will be started again in 1 s",
        "d will be started again in 1 s",
    ]
