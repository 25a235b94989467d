"""Shared by the service's tests."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # Ray's own, hundreds of lines of them.
    config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning:ray")
    config.addinivalue_line("filterwarnings", "ignore:Using extra keyword arguments on `Field`")
    config.addinivalue_line("filterwarnings", "ignore:The `metrics_interval_s` field")
    config.addinivalue_line("filterwarnings", "ignore:`look_back_period_s`")
