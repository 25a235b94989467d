"""The README's own example against serve_config.yaml as it is, by plain `serve run`: the default model answers through
the whole service."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from nanoengine.errors import ModelLoadError
from nanoengine.weights.sources import resolve_model
from tests.serve.cluster import CONFIG, Cluster

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture
def service() -> Iterator[Cluster]:
    data = yaml.safe_load(CONFIG.read_text())
    try:
        resolve_model(data["applications"][0]["args"]["engine"]["model"])
    except ModelLoadError as error:
        pytest.skip(f"the default model cannot be had: {error}")
    cluster = Cluster(environment={})
    try:
        cluster.deploy(data, timeout=120)
        yield cluster
    finally:
        cluster.stop()


def test_the_openai_client_streams_the_capital_of_france(service: Cluster) -> None:
    examples = [code for code in re.findall(r"```python\n(.*?)```", README.read_text(), re.S) if "OpenAI(" in code]
    assert len(examples) == 1
    script = examples[0].replace("http://127.0.0.1:8000", service.url)
    assert service.url in script
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert "Paris" in done.stdout
