"""What a clone and a wheel must hold, and must not."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(*extras: str) -> list[Requirement]:
    lists = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] for extra in extras)]
    return [Requirement(text) for one in lists for text in one]


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    return [path for name in listed.split("\0") if name and (path := ROOT / name).exists()]


def test_everything_that_is_installed_by_name_is_pinned_within_its_range() -> None:
    pins = {normal(name): Version(version) for name, version in PINS.items()}
    for requirement in requirements("test", "loadtest", "lint"):
        assert requirement.specifier.contains(pins[normal(requirement.name)]), requirement


def test_constraints_hold_versions_and_nothing_else() -> None:
    """No index, no file, no local build; and nothing that only torch can choose."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert len(lines) == len(PINS)
    assert not [line for line in lines if not re.fullmatch(r"[\w.-]+==\d[\w.]*", line)]
    assert not [name for name in PINS if normal(name).startswith(("nvidia", "triton", "cuda", "pytorch-triton"))]


def test_extras_are_what_the_makefile_installs() -> None:
    (installed,) = re.findall(r"--editable '\.\[(.+)\]'", (ROOT / "Makefile").read_text())
    assert set(installed.split(",")) == {"test", "loadtest", "lint"} <= PROJECT["optional-dependencies"].keys()


def test_imports_are_declared() -> None:
    """Every third-party module that the packages import is a dependency, not a guest of another package."""
    service = {
        "ray",
        "grpc",
        "fastapi",
        "starlette",
        "httpx",
        "pydantic",
        "msgspec",
        "yaml",
    }  # starlette: fastapi's interface
    models = {"torch", "transformers", "tokenizers", "safetensors", "gguf", "huggingface_hub", "jinja2", "numpy"}
    engine = models | {"llguidance"}
    gpu = {"triton", "flash_attn"}
    loadtest = {"locust", "gevent", "geventhttpclient", "httptools"}  # locust, and what its interface consists of
    provided = service | engine | gpu | loadtest | {"filelock", "tqdm"}
    own = {"nanoengine", "deployments", "loadtest", *sys.stdlib_module_names}
    found: dict[str, str] = {}
    for package in ("nanoengine", "deployments", "loadtest"):
        for path in (ROOT / package).rglob("*.py"):
            for name in re.findall(
                r"^\s*(?:import|from) (\w+)[\w.]*(?: import| as|,|$)", path.read_text(), re.MULTILINE
            ):
                found.setdefault(name, str(path.relative_to(ROOT)))
    assert not {name: path for name, path in found.items() if name not in own | provided}


def test_wheel_holds_the_packages_and_no_tests(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("nanoengine", "deployments", "loadtest", "tests", "k8s"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", "dist", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        text = archive.read(metadata).decode()
    sources = {str(path.relative_to(ROOT)) for p in ("nanoengine", "deployments") for path in (ROOT / p).rglob("*.py")}
    assert sources <= names
    assert {name.split("/")[0] for name in names} <= {"nanoengine", "deployments", "loadtest", metadata.split("/")[0]}
    for extra in PROJECT["optional-dependencies"]:
        assert f"Provides-Extra: {extra}\n" in text


def test_no_large_files(tracked: list[Path]) -> None:
    assert not {str(path): path.stat().st_size for path in tracked if path.stat().st_size > 2_000_000}


# Written so that this file does not match itself.
_MACHINE_PATH = re.compile(r"(?<![\w.~$}/-])/(?:work|farm|root|home/(?!nanoserve\b)\w+|Users/\w+)/")
_REGISTRY = re.compile(
    r"\b(?:(?:py[p]i|python[h]osted|npm[j]s|deb[.]debian|anaconda[.]or[g])[\w.-]*[.](?:org|com|net))\b"
)


@pytest.mark.parametrize("pattern", [_MACHINE_PATH, _REGISTRY], ids=["path of one machine", "registry's host"])
def test_nothing_of_one_machine_is_committed(tracked: list[Path], pattern: re.Pattern[str]) -> None:
    found = []
    for path in tracked:
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in pattern.finditer(text)]
    assert not found


def test_those_patterns_can_match() -> None:
    assert _MACHINE_PATH.search("see /" + "work/x")
    assert _MACHINE_PATH.search("'/" + "home/ann/x'")
    assert not _MACHINE_PATH.search("../" + "work/x, $HOME/" + "work/x")
    assert _REGISTRY.search("https://py" + "pi.org/simple")


def test_ci_and_make_agree() -> None:
    """CI does what a person does."""
    script = (ROOT / ".ci/run").read_text()
    assert re.findall(r"^make (\w+)$", script, re.MULTILINE) == ["lint", "test"]
    assert (ROOT / ".ci/run").stat().st_mode & 0o111
    assert "set -euo pipefail" in script
