"""EPS under lm-evaluation-harness: its own Hugging Face model with EPS in it, by the name eps-hf.

    python -m eps_cuda.integrations.lm_eval run --model eps-hf \\
        --model_args pretrained=DIR,eps_method=rq,eps_budget=0.05 --tasks NAME --include_path TASKS --output_path OUT

is `lm-eval` with that name registered; every argument is the harness's own. EPS_METHOD, EPS_BUDGET, .. say the same.
EPS changes decode steps, so it changes tasks that generate (`generate_until`). Log-likelihoods of given text are one
dense forward each, so multiple-choice tasks score as without EPS; `eps` in the results' config says what was read.
"""

from contextlib import ExitStack
from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from eps_core.integrations.settings import Settings, from_environment
from eps_core.io.schema import current_settings
from eps_core.models.folder import refuse_adapter
from eps_cuda.integrations.transformers import eps

PREFIX = "eps_"


@register_model("eps-hf")
class EpsHFLM(HFLM):
    """`HFLM`, whose model attends as EPS says while this object lives."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Arguments of `HFLM`; those that begin with eps_ are EPS's. Raises ConfigError for a wrong one before the
        model is read."""
        given = {name.removeprefix(PREFIX): kwargs.pop(name) for name in list(kwargs) if name.startswith(PREFIX)}
        settings = Settings.of({**from_environment(), **current_settings(given)})
        refuse_adapter(str(kwargs.get("pretrained", args[0] if args else "")))
        super().__init__(*args, **kwargs)
        self._eps = ExitStack()
        self.sparse = self._eps.enter_context(eps(self.model, settings))

    def get_model_info(self) -> dict[str, Any]:
        """The harness's own, which it asks for at the end, and what EPS read until then."""
        return {**super().get_model_info(), "eps": {**self.sparse.config.to_dict(), **self.sparse.stats()}}


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
