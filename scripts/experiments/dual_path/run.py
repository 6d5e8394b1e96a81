"""DualPath (arXiv 2602.21548), simulated: prompts kept on storage reach a prefill node over its own storage link, or
over a decode node's idle one and the network between both. Nothing is sent; bytes are whole, times are exact fractions.

A request goes where it ends first: over P (storage -> prefill node), or over D (storage -> decode node -> network).
Each link serves one request after the other. Our reconstruction: a request is not split, and the network passes what
has wholly arrived at the decode node.

    python scripts/experiments/dual_path/run.py --bytes 137125720
"""

import sys
from dataclasses import dataclass
from fractions import Fraction

import click

from eps_core.errors import exit_code

LINKS = ("prefill storage", "decode storage", "network")


@dataclass(frozen=True)
class Loaded:
    """One request: the path it took, and when it was whole at the prefill node, in seconds."""

    path: str
    num_bytes: int
    done: Fraction


def simulate(
    requests: list[tuple[Fraction, int]], prefill: int, decode: int, network: int, dual: bool
) -> tuple[list[Loaded], dict[str, int]]:
    """(what became of each request (arrival in seconds, bytes), bytes over each of LINKS). Requests are in order of
    arrival; speeds are bytes a second. Without `dual` all take P."""
    free = dict.fromkeys(LINKS, Fraction(0))
    carried = dict.fromkeys(LINKS, 0)
    found = []
    for arrival, size in requests:
        direct = max(arrival, free["prefill storage"]) + Fraction(size, prefill)
        fetched = max(arrival, free["decode storage"]) + Fraction(size, decode)
        passed = max(fetched, free["network"]) + Fraction(size, network)
        if dual and passed < direct:
            ends = {"decode storage": fetched, "network": passed}
        else:
            ends = {"prefill storage": direct}
        for link, end in ends.items():
            free[link] = end
            carried[link] += size
        found.append(Loaded("D" if len(ends) == 2 else "P", size, max(ends.values())))
    return found, carried


@click.command()
@click.option("--bytes", "size", type=click.IntRange(1), default=137125720, show_default=True, help="Of a sequence.")
@click.option("--requests", type=click.IntRange(1), default=64, show_default=True, help="All there at once.")
@click.option("--storage", type=click.IntRange(1), default=50 * 10**9, show_default=True, help="Bytes a second a node.")
@click.option("--network", type=click.IntRange(1), default=50 * 10**9, show_default=True, help="Bytes a second.")
def main(size: int, requests: int, storage: int, network: int) -> None:
    """Prints when all requests are loaded, over one path and over two: a simulation."""
    wanted = [(Fraction(0), size)] * requests
    click.echo(f"simulated: {requests} loads of {size:,} bytes\npath  seconds  " + "  ".join(LINKS))
    ends = []
    for name, dual in (("P", False), ("P+D", True)):
        found, carried = simulate(wanted, storage, storage, network, dual)
        ends.append(max(one.done for one in found))
        click.echo(f"{name:4}  {float(ends[-1]):7.4f}  " + "  ".join(f"{carried[link]:,}" for link in LINKS))
    click.echo(f"gain  {float(ends[0] / ends[1]):7.4f}")


if __name__ == "__main__":
    sys.exit(exit_code(main))
