"""Run Triton kernels in the tests' corrected and faster interpreter, in processes with this folder on their path."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import triton_interpreter  # noqa: F401
