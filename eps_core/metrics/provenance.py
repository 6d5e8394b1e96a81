"""Where a record came from: settings, packages, commit, system."""

import platform
import subprocess
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

import eps_core
from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.errors import DISTRIBUTION
from eps_core.io.schema import SCHEMA


def run_line(
    config: EpsConfig, spec: CacheSpec, backend: str, device: str, model: str, versions: dict[str, str], **more: Any
) -> dict[str, Any]:
    """The first line of a JSONL: all that is needed to run it again."""
    return {
        "type": "run",
        "config": config.to_dict(),
        "cache": {f.name: getattr(spec, f.name) for f in fields(spec)},
        "backend": backend,
        "device": device,
        "model": model,
        **provenance(versions),
        **more,
    }


def provenance(versions: dict[str, str]) -> dict[str, Any]:
    """Return the origin of a record: packages (those of the backend given), commit, system."""
    return {
        "schema": SCHEMA,
        "versions": {"eps": package_version(), "python": platform.python_version(), **versions},
        "git_commit": git_commit(),
        "platform": platform.platform(),
    }


def package_version(package: str = DISTRIBUTION) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git_commit() -> str | None:
    """Commit of the checkout this package runs from, "-dirty" if changed; None where it is not a checkout."""
    root = Path(eps_core.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        result = subprocess.run(
            # `describe --dirty` writes the index and takes its lock, which the user's own commit may be waiting for
            ["git", "--no-optional-locks", "-C", str(root), "status", "--porcelain=v2", "--branch",
             "--untracked-files=no"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    lines = result.stdout.splitlines()
    commit = next((line.split()[2] for line in lines if line.startswith("# branch.oid ")), "(none)")
    if commit.startswith("("):  # nothing was committed yet
        return None
    return commit + "-dirty" * any(not line.startswith("#") for line in lines)
