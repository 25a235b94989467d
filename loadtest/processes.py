"""CPU time and memory of the service's processes, by their part in it. Linux only: it reads /proc."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

PARTS = {
    "ServeReplica:llm:Ingress": "ingress",
    "ServeReplica:llm:EngineReplica": "replica",
    "nanoengine.process": "engine",
    "ProxyActor": "proxy",
    "HAProxyManager": "proxy",
    "haproxy": "proxy",
}
"""What their command lines have in them."""

_TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(root: int) -> dict[str, float]:
    """CPU seconds that each part of the service has taken so far: of the process ``root`` and all that it started."""
    return _sums(root, lambda process: (int(_stat(process)[11]) + int(_stat(process)[12])) / _TICKS)


def resident_bytes(root: int) -> dict[str, float]:
    """Memory that each part has now, shared pages included."""
    return _sums(root, lambda process: int((process / "statm").read_text().split()[1]) * _PAGE)


def _sums(root: int, measure: Callable[[Path], float]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for process in _descendants(root):
        with suppress(OSError):  # it has just ended
            name = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if (part := next((part for mark, part in PARTS.items() if mark in name), None)) is not None:
                found[part] += measure(process)
    return dict(found)


def _descendants(root: int) -> Iterator[Path]:
    children: dict[int, list[int]] = defaultdict(list)
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            children[int(_stat(process)[1])].append(int(process.name))
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        yield Path(f"/proc/{pid}")
        waiting += children[pid]


def _stat(process: Path) -> list[str]:
    return (process / "stat").read_text().rpartition(")")[2].split()
