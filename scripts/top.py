"""The functions of a speedscope profile by their own time, as `scripts/trace.sh` records one.

    python scripts/top.py trace/decode.speedscope.json

Own: the function itself was at work. All: it or what it called was. Both are shares of the samples of all threads.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import click

from eps_core.errors import ConfigError, exit_code


def totals(profile: dict[str, Any]) -> tuple[Counter[str], Counter[str], float]:
    """(own weight, weight with callees) of each function as "name (file)", and the weight of all samples; a function
    that calls itself counts once a sample."""
    names = [f"{one['name']} ({Path(one.get('file') or '?').name})" for one in profile["shared"]["frames"]]
    own, whole, total = Counter[str](), Counter[str](), 0.0
    for thread in profile["profiles"]:
        for stack, weight in zip(thread["samples"], thread["weights"], strict=True):
            total += weight
            if stack:
                own[names[stack[-1]]] += weight
            for name in {names[frame] for frame in stack}:
                whole[name] += weight
    return own, whole, total


@click.command(help=__doc__)
@click.argument("path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--top", type=click.IntRange(min=1), default=25, show_default=True)
def main(path: Path, top: int) -> None:
    try:
        own, whole, total = totals(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"{path} is no sampled speedscope profile ({error!r}): give one of py-spy's") from error
    print(f"{'own':>7}{'all':>7}  function")
    for name, weight in own.most_common(top):
        print(f"{weight / total:7.1%}{whole[name] / total:7.1%}  {name}")


if __name__ == "__main__":
    sys.exit(exit_code(main))
