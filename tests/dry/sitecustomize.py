"""Every Python that has this folder on its path runs Triton kernels as tests do: in the mended, faster interpreter."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import triton_interpreter  # noqa: F401
