"""`transformers serve` with EPS in the model that it serves."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from eps_core.engine.settings import Settings, check_version
from eps_core.errors import ConfigError, install, require
from eps_cuda.hooks.transformers.context import eps

# flags of that server under which no cache of `generate` would be there to gate
_REFUSED = {
    "--continuous-batching": "its continuous batching has a paged cache of its own",
    "--compile": "a compiled model has a static cache",
    "--attn-implementation": "EPS is an attention implementation itself",
}


def serve(path: Path, settings: Settings, host: str, port: int, more: Sequence[str]) -> int:
    """Runs `transformers serve` on a model directory, with EPS on, until it is stopped; `more` are its own arguments.
    /v1/completions and /v1/chat/completions answer one request after another, each in a cache of its own."""
    check_version("transformers")
    for flag, reason in _REFUSED.items() if settings.config.store.enabled else ():
        given = any(one == flag or one.startswith(f"{flag}=") for one in more)
        require(not given, f"transformers serve {flag} cannot go with EPS, because {reason}: leave it out")
    try:
        import typer
        from transformers.cli.serve import Serve
    except ImportError as error:
        raise ConfigError(f"transformers serve cannot be loaded ({error}): {install('transformers')}") from error

    class EpsServe(Serve):
        """transformers' own, which has loaded its model when it comes to start."""

        def start_server(self) -> None:
            manager = self._model_manager
            model, _ = manager.load_model_and_processor(manager.process_model_name(str(path)))
            on = settings.config.store.enabled
            extras: dict[str, Any] = {"metrics": settings.metrics, "audit_every": settings.audit_every}
            with eps(model, settings.config, kernels=settings.kernels, **extras) if on else nullcontext():
                self.server.run()

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(EpsServe)
    arguments = [str(path), "--host", host, "--port", str(port), "--non-blocking", *more]
    try:
        code = app(arguments, prog_name="transformers serve", standalone_mode=False)
    except (ImportError, ValueError, OSError) as error:
        raise ConfigError(f"transformers serve cannot start: {error}") from error
    return int(code) if isinstance(code, int) else 0
