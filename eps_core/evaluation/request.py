"""The settings of one `eps-proto run`, and which of them exclude each other."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eps_core.config.eps import EpsConfig
from eps_core.config.formats import EXACT, KvFormats
from eps_core.config.speculative import SpeculativeConfig
from eps_core.decode.prompts import PREFILL_CHUNK
from eps_core.decode.sampling import Sampling
from eps_core.decode.session import Session
from eps_core.errors import require
from eps_core.evaluation.runner import UNVERIFIED
from eps_core.evaluation.trace import Trace
from eps_core.eviction.config import EvictionConfig
from eps_core.io.outputs import Output
from eps_core.load import OWN
from eps_core.metrics.steps import AUDIT_FACTOR

KEEP_ALL = EvictionConfig()


@dataclass(frozen=True)
class RunRequest:
    """Settings that the command line asked for. `model` None is the demo model; no prompt is its needle document."""

    config: EpsConfig
    sampling: Sampling
    backend: str = "auto"
    device: str = "auto"
    model: Path | None = None
    prompts: tuple[str | Path, ...] = ()  # decoded in one batch; a path: the file that holds it, or several
    max_new_tokens: int = 32
    dtype: str = "auto"
    kv_dtype: str = "auto"
    kv_bits: KvFormats = EXACT
    prefill_chunk: int = PREFILL_CHUNK
    pool_tokens: int | None = None
    baseline: bool = True
    kl: bool = False
    stop: bool = True
    method_is_default: bool = False  # for the header
    metrics: Path | None = None
    csv: Path | None = None
    audit_every: int = 0
    audit_factor: float = AUDIT_FACTOR
    audit_off: bool = False
    kernels: str = "auto"
    chat: bool = False  # prompts are messages, put into the model's chat template
    keep_newline: bool = False  # the final one of a prompt's file
    auto_min_context: bool = False  # measured by `prepare`, which settles the config
    verify: SpeculativeConfig = UNVERIFIED  # of the EPS side
    keep: EvictionConfig = KEEP_ALL  # the same
    weights: str = "full"  # of decode steps, dense and sparse
    cache_dir: Path | str | None = None  # where prompts are kept between runs
    engine: str = OWN  # the decoder that runs the model: our own, or another engine with EPS in it
    plot: Callable[[Trace], None] | None = None  # where set, called at the end with what the sparse steps read
    # with the built-in prompt: times one layer of a large model, for the end of the table
    layer: Callable[[Session], dict[str, Any] | None] | None = None

    @property
    def own_dense(self) -> KvFormats:
        """In what K and V of the dense run lie: as the model has them, but where verified decoding promises the dense
        text over the same cache."""
        return self.kv_bits if self.verify.enabled else EXACT

    @property
    def changes(self) -> bool:
        """Return whether anything but the model's own dense decoding runs."""
        return self.config.cache_config.enabled or self.keep.enabled or self.kv_bits != EXACT

    @property
    def reads(self) -> str:
        """Return the name of what reads the cache beside the dense run."""
        named = ("EPS", self.config.cache_config.enabled), (self.keep.policy, self.keep.enabled)
        return " + ".join(name for name, on in named if on) or "dense"

    def judged(self, answer: str | None) -> str | None:
        """Return the demo's answer, where no fewer tokens are asked for than it has, one a character; else None: the
        start of an answer is neither right nor wrong."""
        return answer if answer is not None and len(answer) <= self.max_new_tokens else None

    def outputs(self, stack: ExitStack) -> tuple[Output | None, Output | None]:
        """Return the files of metrics and of CSV, where they are asked for: this process's own until `stack` closes."""
        lines, csv = (
            None if path is None else stack.enter_context(Output(path, what))
            for path, what in ((self.metrics, "metrics file"), (self.csv, "csv file"))
        )
        return lines, csv

    def check(self) -> None:
        """Raises ConfigError, in one line, for what excludes each other or asks for nothing."""
        for wrong, why in (
            (not self.config.cache_config.enabled, "--plot draws what sparse steps read: choose a --method"),
            (self.verify.enabled, "--plot draws steps and --eps-verify decodes in rounds: drop one"),
            (self.keep.enabled, "--plot draws all of a prompt and --kv-evict keeps a part of it: drop one"),
        ):
            require(self.plot is None or not wrong, why)
        self.verify.check(self.config, self.sampling.temperature, self.sampling.by, self.audit_every)
        self.keep.check(self.config)
        require(self.audit_every >= 0, f"audit-every {self.audit_every}: give a number of steps, 0 for no audits")
        require(
            self.baseline or self.changes,
            "--no-baseline with EPS off leaves nothing to run: drop it, or choose a --method, --kv-evict or --kv-bits",
        )
        require(
            not self.kl or (self.baseline and self.changes),
            "--kl compares with the dense run: it needs a --method, --kv-evict or --kv-bits, and no --no-baseline",
        )
        require(
            not self.audit_every or self.config.cache_config.enabled,
            "--audit-every audits sparse steps: choose a --method",
        )
        require(
            not (self.verify.enabled and self.kl),
            "--kl measures how far EPS moves the text and --eps-verify moves none: drop one",
        )
        for name, on, why in (
            ("--eps-verify", self.verify.enabled, "a dense pass needs all that was evicted"),
            ("--audit-every", self.audit_every > 0, "an audit attends densely to all that was evicted"),
            ("--pool-tokens", self.pool_tokens is not None, "its cache is made for what is kept"),
            ("--cache-dir", self.cache_dir is not None, "what is left of a prompt is no prefix of another"),
        ):
            require(not (self.keep.enabled and on), f"--kv-evict and {name} exclude each other, as {why}: drop one")
