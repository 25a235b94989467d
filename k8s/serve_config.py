"""Write serve_config.yaml into the Kubernetes manifests: ``python k8s/serve_config.py``.

KubeRay takes the Serve configuration as a string inside the RayService. So that there is one file to edit, that string
is made here: the repository's serve_config.yaml, then base/serve.patch.yaml, then the overlay's own serve.patch.yaml.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import yaml

K8S = Path(__file__).resolve().parent
_BLOCK = re.compile(r"^  serveConfigV2: \|\n(?:(?:    .*)?\n)*", re.MULTILINE)


def merge(base: Any, patch: Any) -> Any:
    """``base`` with ``patch`` laid over it: dictionaries by key, lists of named things by name, all else replaced."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return base | {key: merge(base[key], value) if key in base else value for key, value in patch.items()}
    if isinstance(patch, list) and all(isinstance(item, dict) and "name" in item for item in patch):
        changes = {item["name"]: item for item in patch}
        if strangers := changes.keys() - {item["name"] for item in base}:
            raise ValueError(f"the patch names what serve_config.yaml does not have: {', '.join(sorted(strangers))}")
        return [merge(item, changes.get(item["name"], {})) for item in base]
    return patch


def manifests() -> dict[Path, list[Path]]:
    """Each manifest that carries a Serve configuration, and the patches that make it, in their order."""
    base = K8S / "base"
    overlays = sorted(patch.parent for patch in K8S.glob("overlays/*/serve.patch.yaml"))
    return {base / "rayservice.yaml": [base / "serve.patch.yaml"]} | {
        folder / "rayservice.yaml": [base / "serve.patch.yaml", folder / "serve.patch.yaml"] for folder in overlays
    }


def serve_config(patches: list[Path]) -> dict[str, Any]:
    """The repository's configuration under these patches."""
    config = yaml.safe_load((K8S.parent / "serve_config.yaml").read_text())
    for patch in patches:
        config = merge(config, yaml.safe_load(patch.read_text()))
    return config


def rendered(manifest: Path, patches: list[Path]) -> str:
    """The manifest's text with its Serve configuration brought up to date."""
    text = yaml.safe_dump(serve_config(patches), sort_keys=False, width=110)
    block = "  serveConfigV2: |\n" + "".join(f"    {line}\n" for line in text.splitlines())
    replaced, count = _BLOCK.subn(lambda _: block, manifest.read_text())
    if count != 1:
        raise ValueError(f"{manifest} must have one line '  serveConfigV2: |', and has {count}")
    return replaced


def main() -> int:
    """Bring every manifest up to date, and say which have changed."""
    for manifest, patches in manifests().items():
        text = rendered(manifest, patches)
        if text != manifest.read_text():
            manifest.write_text(text)
            print(f"{manifest.relative_to(K8S.parent)}: updated")
    return 0


if __name__ == "__main__":
    sys.exit(main())
