"""The flags that say which model runs where; several commands share them."""

import click

from eps_core.cli.help import FILE, MODEL, option
from eps_core.cli.numbers import KvBits
from eps_core.config.cache import DTYPE_BYTES
from eps_core.config.formats import WEIGHT_BITS
from eps_core.load import BACKENDS

backend_option = option(
    "--backend", heading=MODEL, type=click.Choice(("auto", *BACKENDS)), default="auto", help="Array library."
)
device_option = option(
    "--device", heading=MODEL, type=click.Choice(("auto", "cpu", "cuda", "xpu", "mps")), default="auto"
)
model_option = option(
    "--model",
    heading=MODEL,
    type=FILE,
    metavar="MODEL",
    help="Hugging Face directory, or org/name[@revision] of the Hub.  [default: demo]",
)
dtype_option = option(
    "--dtype", heading=MODEL, type=click.Choice(("auto", *DTYPE_BYTES)), default="auto",
    help="Weight dtype; auto: as stored; on a CPU float32, but bfloat16 in Torch where steps are faster in it.",
)  # fmt: skip
weights_option = option(
    "--weights", heading=MODEL, type=click.Choice(tuple(WEIGHT_BITS)), default="full",
    help="Weights that decode steps read, dense and sparse. 8bit, 4bit: steps read a half or a quarter of the bytes; "
    "prompts are read with the full weights, which stay in memory.",
)  # fmt: skip
kv_dtype_option = option(
    "--kv-dtype", heading=MODEL, type=click.Choice(tuple(DTYPE_BYTES)), help="KV cache dtype.  [default: as --dtype]"
)
kv_bits_option = option(
    "--kv-bits", heading=MODEL, type=KvBits(), default="16",
    help="Quantized KV: 8, fp8, 4 or nvfp4, with one scale a token and head; 8,4: K, V; 16: not quantized.",
)  # fmt: skip
