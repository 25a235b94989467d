"""Shared by the service's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.cluster import Cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Of a module: a process has one Ray at a time, and other modules start their own."""
    cluster = Cluster()
    try:
        yield cluster
    finally:
        cluster.stop()


def pytest_configure(config: pytest.Config) -> None:
    # Ray's own, hundreds of lines of them.
    config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning:ray")
    config.addinivalue_line("filterwarnings", "ignore:Using extra keyword arguments on `Field`")
    config.addinivalue_line("filterwarnings", "ignore:The `metrics_interval_s` field")
    config.addinivalue_line("filterwarnings", "ignore:`look_back_period_s`")
