"""The README's three "Engines" blocks as a reader would paste them: each in a fresh copy of the checkout, in a virtual
environment that it makes itself, with nothing else.

    python scripts/experiments/engine_blocks/run.py mlx-lm transformers vllm
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from eps_core.errors import ConfigError, exit_code, require
from eps_core.evaluation.compare import demo_document
from eps_core.load import ENGINES

ROOT = Path(__file__).resolve().parents[3]
LINES = 5  # of a block, at most


def readme_blocks() -> dict[str, str]:
    """engine -> the block that ends in running it."""
    found = {}
    for block in re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S):
        named = re.search(r"eps-proto run --engine (\S+)", block)
        if named:
            found[named[1]] = block
    return found


def run_block(engine: str, block: str) -> str:
    """Runs a block, and says what came of it. Raises ConfigError where that is not what the README promises."""
    require(len(block.splitlines()) <= LINES, f"the block of {engine} has more than {LINES} lines")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(f"git -C '{ROOT}' archive HEAD | tar -x -C '{folder}'", shell=True, check=True)
        # neither this process's packages nor its settings
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("EPS_", "PYTHON", "VIRTUAL"))}
        done = subprocess.run(["bash", "-euc", block], cwd=folder, env=kept, stdout=subprocess.PIPE, text=True)
    require(done.returncode == 0, f"the block of {engine} ended with status {done.returncode}")
    last = json.loads(done.stdout.splitlines()[-1])
    answer = bytes(demo_document().answer.encode())
    for side in ("dense", "eps"):
        said = bytes(last[side]["tokens"])  # a token a byte
        if not said.startswith(answer):
            raise ConfigError(f"{engine} {side} says {said!r}: the needle is {answer!r}")
    require(last["bytes_ratio"] < 0.1, f"{engine} reads {last['bytes_ratio']:.3f} of the bytes: a tenth is promised")
    return (
        f"{engine:12} needle {answer.decode()} dense and with EPS, {last['bytes_ratio']:.4f} of the bytes "
        f"({time.monotonic() - started:.0f} s)"
    )


@click.command()
@click.argument("engines", nargs=-1, type=click.Choice(ENGINES))
def main(engines: tuple[str, ...]) -> None:
    """Runs the README's blocks of ENGINES (default: all; minutes each, mostly downloads) in fresh environments. Passes
    where each ends with the needle answered densely and sparse at under a tenth of the bytes."""
    blocks = readme_blocks()
    for engine in engines or ENGINES:
        print(run_block(engine, blocks[engine]), flush=True)


if __name__ == "__main__":
    sys.exit(exit_code(main))
