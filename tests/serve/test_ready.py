"""`make serve` says when the service answers, and only then."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from deployments.ready import url_of


class _Service(http.server.BaseHTTPRequestHandler):
    """Its engine comes up with the third request for a token."""

    asked = 0

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "a-model"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        type(self).asked += 1
        self._send(503 if self.asked < 3 else 200, {"choices": []})

    def _send(self, status: int, body: object) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None: ...


def test_ready_waits_for_a_token(tmp_path: Path) -> None:
    config = tmp_path / "serve_config.yaml"
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Service) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        config.write_text(f"http_options: {{port: {server.server_port}}}")
        command = [sys.executable, "-m", "deployments.ready", str(config), str(os.getpid())]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        server.shutdown()
    assert _Service.asked == 3
    assert f"curl http://127.0.0.1:{server.server_port}/v1/chat/completions" in done.stdout
    assert '"model": "a-model"' in done.stdout


def test_ready_ends_with_the_service(tmp_path: Path) -> None:
    config = tmp_path / "serve_config.yaml"
    config.write_text("http_options: {port: 9}")
    script = f"{sys.executable} -m deployments.ready {config} $$ &"  # and the shell, its parent, ends
    done = subprocess.run(["bash", "-c", script], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert done.stdout == "", "reading came to its end, so it has ended too"


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http_options: {host: 0.0.0.0, port: 9000}", "http://127.0.0.1:9000"),
        ("http_options: {host: 192.0.2.7}", "http://192.0.2.7:8000"),
        ("applications: []", "http://127.0.0.1:8000"),
    ],
)
def test_url(tmp_path: Path, text: str, url: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    assert url_of(tmp_path / "c.yaml") == url
