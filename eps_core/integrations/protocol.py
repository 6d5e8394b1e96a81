"""The interface of an engine's hook to `eps-proto run --engine` and `eps-proto serve`: a module, loaded by name."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from eps_core.decode.sampling import Sampling
from eps_core.integrations.layers import SparseAttention
from eps_core.integrations.settings import Settings


@dataclass(frozen=True)
class Step:
    """The tokens that one step of an engine said: `tokens[i]` of prompt number `sequences[i]`, `ms` after the step
    before it. A round of verified decoding is a step that says several tokens of one prompt."""

    sequences: list[int]
    tokens: list[int]
    ms: float


class Engine(Protocol):
    """A model in an engine, with EPS hooked in."""

    sparse: SparseAttention  # the counters; made with keep_records
    prefill_ms: float | None  # of the last `generate`, up to its first token's step
    # whether the first token of a prompt comes from its prefill (dense in every engine), or from a step of its own
    first_token_is_prefill: bool
    # whether a step begins before it is known which sequences have ended with the last: those are read once more
    computes_ahead: bool

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sampling,
        sparse: bool,
        stop: Sequence[int] = (),
    ) -> Iterator[Step]:
        """Continues prompts in one batch, as the engine itself does; a sequence ends after a token of `stop`. With
        `sparse` False the engine runs as if EPS were not there."""
        ...

    def describe(self) -> dict[str, Any]:
        """`engine`, `versions`, `device`, `dtype`, `kernels`."""
        ...

    def close(self) -> None: ...


class EngineModule(Protocol):
    """A hook's module."""

    def open_engine(
        self,
        path: Path,
        settings: Settings,
        device: str = "auto",
        dtype: str = "auto",
        max_tokens: int = 0,
        num_sequences: int = 1,
    ) -> Engine:
        """The model of a Hugging Face directory. Sequences are of up to `max_tokens` tokens, new ones included (0: as
        many as the model's context holds), and `num_sequences` run at once. Raises ConfigError for a version, device,
        model or setting that does not go together."""
        ...

    def serve(self, path: Path, settings: Settings, host: str, port: int, more: Sequence[str]) -> int:
        """Runs the engine's own OpenAI-compatible server on a model with EPS on until it ends, and returns its exit
        code; `more` are arguments of that server."""
        ...
