"""CPU time of the service's processes, by their part in it. Linux only: it reads /proc."""

from __future__ import annotations

import os
from collections import defaultdict
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

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(root: int) -> dict[str, float]:
    """CPU seconds that each part of the service has taken so far: of the process ``root`` and all that it started."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    names: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            names[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has just ended
            continue
        parents[int(folder.name)], seconds[int(folder.name)] = int(stat[1]), (int(stat[11]) + int(stat[12])) / _TICKS
    found: dict[str, float] = defaultdict(float)
    for pid, name in names.items():
        part = next((part for mark, part in PARTS.items() if mark in name), None)
        if part is not None and _descends(pid, root, parents):
            found[part] += seconds[pid]
    return dict(found)


def _descends(pid: int, root: int, parents: dict[int, int]) -> bool:
    while pid and pid != root:
        pid = parents.get(pid, 0)
    return pid == root
