"""Methods for `collective_rpc` in workers: `--worker-extension-cls eps_cuda.integrations.vllm.worker.EpsWorker`."""

from typing import Any

from eps_core.errors import ConfigError
from eps_cuda.integrations.vllm.runtime import Runtime, runtime_in


class EpsWorker:
    """Mixed into vLLM's worker class. Every call returns one plain value per worker; each raises ConfigError in a
    server that was not asked for EPS."""

    model_runner: Any

    def eps_stats(self) -> dict[str, Any]:
        """Counters since the start or `eps_reset`."""
        self.eps_runtime().settle()
        return self.eps_runtime().stats()

    def eps_reset(self) -> None:
        self.eps_runtime().settle()
        self.eps_runtime().reset()

    def eps_set(self, **settings: Any) -> dict[str, Any]:
        """Live knobs: `on`, and how groups are read (`budget`, `policy`, ..); returns the settings in force."""
        return self.eps_runtime().set(**settings)

    def eps_runtime(self) -> Runtime:
        found = runtime_in(self.model_runner.vllm_config)
        if found is None:
            raise ConfigError("this server was not asked for EPS: start it with EPS_METHOD=rq, say")
        return found
