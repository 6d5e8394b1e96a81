"""The wheel, built and installed in an environment of its own, works there."""

import subprocess
from pathlib import Path


def test_the_wheel_works_where_nothing_else_is_installed() -> None:
    root = Path(__file__).parent.parent
    done = subprocess.run(["scripts/release.sh"], cwd=root, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "needle answered" in done.stdout and "built and tried: dist/eigenpage-" in done.stdout
