"""`transformers serve` with EPS in the model that it serves."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import CacheNotFound

from eps_core.errors import ConfigError, install, one_line, require
from eps_core.integrations.settings import Settings
from eps_core.integrations.versions import check_version
from eps_core.models.tokenizer import end_tokens
from eps_cuda.integrations.transformers.balance import balance
from eps_cuda.integrations.transformers.context import eps

# flags of that server under which no cache of `generate` would be there to make sparse
_REFUSED = {
    "--continuous-batching": "its continuous batching has a paged cache of its own",
    "--compile": "a compiled model has a static cache",
    "--attn-implementation": "EPS is an attention implementation itself",
}


def serve(path: Path, settings: Settings, host: str, port: int, more: Sequence[str]) -> int:
    """Runs `transformers serve` on a model directory, with EPS on, until it is stopped; `more` are its own arguments.
    /v1/completions and /v1/chat/completions answer one request after another, each in a cache of its own; /eps/stats
    says what EPS has read."""
    check_version("transformers")
    for flag, reason in _REFUSED.items() if settings.config.cache_config.enabled else ():
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
            manager: Any = self._model_manager
            model, _ = manager.load_model_and_processor(manager.process_model_name(str(path)))
            set_ends(model, path)
            balance(model, path, settings.config.cache_config)
            if hasattr(manager, "get_gen_models"):  # up to 5.23, which lists no folder
                theirs, served = manager.get_gen_models, {"owned_by": "", "id": str(path), "object": "model"}
                created = int(time.time())
                manager.get_gen_models = lambda *args: [{**served, "created": created}, *_listed(theirs, *args)]
            if not settings.config.cache_config.enabled:
                self.server.run()
                return
            with eps(model, settings) as sparse, _terminated():
                print(sparse.plan.line(sparse.config), file=sys.stderr, flush=True)
                app: Any = self.server.config.app
                app.get("/eps/stats")(sparse.stats)
                self.server.run()

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(EpsServe)
    arguments = [str(path), "--host", host, "--port", str(port), "--non-blocking", *more]
    try:
        code = app(arguments, prog_name="transformers serve", standalone_mode=False)
    except (ImportError, ValueError, OSError) as error:
        raise ConfigError(f"transformers serve cannot start: {one_line(error)}") from error
    except Exception as error:
        if not hasattr(error, "format_message"):  # of a wrong flag, whose kind is another in each version of typer
            raise
        raise ConfigError(f"transformers serve: {error.format_message()}") from error
    return int(code) if isinstance(code, int) else 0


def set_ends(model: Any, path: Path) -> None:
    """Makes `generate` end at the tokenizer's end-of-text token where the model's own files name none: a chat would go
    on and answer itself."""
    if model.generation_config.eos_token_id is None:
        model.generation_config.eos_token_id = list(end_tokens(path)) or None


def _listed(models: Callable[..., list[dict[str, Any]]], *args: Any) -> list[dict[str, Any]]:
    """The models of the Hub's cache, which need not be there where a folder is served."""
    try:
        return models(*args)
    except CacheNotFound:
        return []


@contextmanager
def _terminated() -> Iterator[None]:
    """Makes a plea to end an exception: the server hands it on when it has shut down, and what is measured so far is
    still to be written."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
