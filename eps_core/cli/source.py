"""The flags that say which model runs where; several commands share them."""

from pathlib import Path

import click

from eps_core.config.store import DTYPE_BYTES
from eps_core.load import BACKENDS

# outputs: click's own check would ask that they can be read, which another user's pipe behind /dev/stdout cannot
OUTPUT = click.Path(path_type=Path, readable=False)
backend_option = click.option("--backend", type=click.Choice(("auto", *BACKENDS)), default="auto", show_default=True)
device_option = click.option(
    "--device", type=click.Choice(("auto", "cpu", "cuda", "xpu", "mps")), default="auto", show_default=True
)
model_option = click.option(
    "--model", type=click.Path(path_type=Path), metavar="MODEL",
    help="Hugging Face directory, or org/name[@revision] of the Hub.  [default: demo]",
)  # fmt: skip
dtype_option = click.option(
    "--dtype", type=click.Choice(("auto", *DTYPE_BYTES)), default="auto", show_default=True,
    help="Of the weights; auto: float32 on a CPU, else as stored.",
)  # fmt: skip
kv_dtype_option = click.option(
    "--kv-dtype", type=click.Choice(tuple(DTYPE_BYTES)), help="Of the KV cache.  [default: as --dtype]"
)
