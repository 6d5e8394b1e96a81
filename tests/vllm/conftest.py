"""Tests inside vLLM, in one process but for those of servers: vLLM must be there, or everything fails."""

import os

# before vLLM is imported. One thread: with more, its pool and ours fight over the cores. Logits are compared bit by
# bit, and what the sampler would compile for them takes half a minute
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip
for name in [name for name in os.environ if name.startswith("EPS_")]:
    del os.environ[name]

from pathlib import Path  # noqa: E402

import engines  # noqa: E402
import pytest  # noqa: E402
import vllm  # noqa: E402


def pytest_report_header() -> str:
    return f"vllm {vllm.__version__}"


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models of several families, and the demo model."""
    folder = tmp_path_factory.mktemp("models")
    return {"demo": engines.DEMO} | {name: engines.save(name, folder / name) for name in engines.FAMILIES}
