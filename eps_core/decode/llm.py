"""A language model that continues prompts: the Python API, exported as `eps_core.LLM`."""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, Self, TypedDict, Unpack, overload

import numpy as np

from eps_core.config.eps import EpsConfig
from eps_core.config.formats import AS_THEY_ARE, FormatName, KvFormats
from eps_core.config.speculative import SpeculativeConfig
from eps_core.decode.sampling import Sampling
from eps_core.decode.session import Session
from eps_core.decode.stop_strings import StoppedText, check_stop
from eps_core.errors import ConfigError, require
from eps_core.io import records
from eps_core.metrics.rounds import summarise_rounds
from eps_core.metrics.steps import summarise

Prompt = str | list[int]  # text, or token ids


@dataclass(frozen=True)
class Generation:
    """The continuation of one prompt. Bytes, groups, speed and acceptance are those of the whole batch."""

    text: str  # up to the stop string, special tokens left out
    tokens: list[int]  # with the end-of-text token, or with the tokens of the stop string, that ended it
    num_prompt_tokens: int
    finish_reason: Literal["stop", "length"]  # an end-of-text token or stop string, or `max_new_tokens`
    kv_bytes_read: int  # K, V and summaries read by all decode steps
    kv_bytes_dense: int  # K and V, not quantised, that dense attention reads in the same steps
    tokens_per_second: float | None  # prefill and the first two steps left out; None: there are no others
    groups_read: int | None  # summed over steps, layers and kv heads; pages with method off; None: speculative
    groups_total: int | None
    acceptance: float | None  # speculative: share of the drafted tokens that were accepted


class Piece(str):
    """A piece of streamed text, which is a `str`. The last piece, whose text may be empty, has the `result`."""

    tokens: tuple[int, ...]  # those decoded since the piece before
    result: Generation | None

    def __new__(cls, text: str, tokens: Sequence[int] = (), result: Generation | None = None) -> Self:
        piece = super().__new__(cls, text)
        piece.tokens, piece.result = tuple(tokens), result
        return piece


class _Options(TypedDict, total=False):
    """The keywords of `LLM.generate`, which has their defaults."""

    max_new_tokens: int
    temperature: float
    top_p: float
    stop: str | Sequence[str]
    seed: int
    chat: bool
    ignore_eos: bool


class LLM:
    """A model, loaded once, that decodes with sparse attention.

    >>> from eps_core import LLM
    >>> llm = LLM(method="rq", budget=0.05)  # the embedded demo model; LLM("DIR") or LLM("org/name") for another
    >>> prompt = "# The code for otter is 31415.\\n" + "x = 1\\n" * 600
    >>> prompt += "\\n# What is the code for otter? The code for otter is "
    >>> llm.generate(prompt, max_new_tokens=6).text
    '31415.'
    >>> [result.finish_reason for result in llm.generate([prompt, prompt[:90]], max_new_tokens=16, stop=".")]
    ['stop', 'length']
    >>> for piece in llm.stream(prompt, max_new_tokens=6):
    ...     print(piece, end="|")
    3|1|4|1|5|.||
    >>> piece.result.kv_bytes_read < 0.2 * piece.result.kv_bytes_dense
    True
    """

    def __init__(
        self,
        model: Path | str | None = None,
        method: str | None = None,
        *,
        config: EpsConfig | None = None,
        speculative: bool | SpeculativeConfig = False,
        backend: str = "auto",
        device: str = "auto",
        dtype: str = "auto",
        kv_dtype: str = "auto",
        kv_bits: FormatName | KvFormats = AS_THEY_ARE,
        kernels: str = "auto",
        cache_dir: Path | str | None = None,
        weights: str = "full",
        **selection: Any,
    ) -> None:
        """Load a model.

        `model`: a Hugging Face directory, or `org/name[@revision]` of the Hub; None: the embedded demo model.
        `method`: the summary of a group of tokens: "rq" (the default), another of `eps-proto run --help`, or "dense"
            (also "off") for dense attention.
        `selection`: the other fields of `EpsConfig`, by name: `budget=0.05`, `num_recent_tokens=256`, `strict=True`, ..
        `config`: an `EpsConfig`, in the place of method and selection.
        `speculative`: sparse steps draft and a dense pass verifies, so that the text is that of dense decoding in the
            same dtype, which on a CPU is float32 unless `dtype` says otherwise; a `SpeculativeConfig` says how.
        `backend`: "numpy", "cuda" (PyTorch, on CPUs too) or "mlx"; auto: the one that has a GPU, else PyTorch.
        `device`, `dtype` (of the weights), `kv_dtype`, `kernels`, `cache_dir` (keeps prompts between runs): as
            `Session.open` has them. `kv_bits`: the format of K and V, such as 8 or "fp8", or of each, such as (8, 4).

        `weights`: "8bit" or "4bit" makes decode steps read as many bits of each weight; prompts are read with the full
            weights, which stay in memory.

        Raises ConfigError, a ValueError whose one line names the value, the limit and the fix.
        """
        require("verify" not in selection, "LLM has no verify: give speculative=True, or a SpeculativeConfig")
        if method is None and config is None:
            method = "rq"
        if method is not None:
            selection["method"] = "off" if method == "dense" else method
        if not isinstance(speculative, SpeculativeConfig):
            records.check("speculative", speculative, bool)
            speculative = SpeculativeConfig("tokens" if speculative else "off")
        elif not speculative.enabled:
            raise ConfigError(f'speculative {speculative} is off: give mode="tokens", or speculative=False')
        self.session = Session.open(
            model, backend, device, dtype, kv_dtype, kernels, config, speculative, kv_bits, cache_dir, weights,
            **selection,
        )  # fmt: skip
        self.session.load(speculative)

    @property
    def config(self) -> EpsConfig:
        return self.session.config

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, a `tokenizers.Tokenizer`."""
        return self.session.tokenizer

    @overload
    def generate(self, prompts: Prompt, **options: Unpack[_Options]) -> Generation: ...

    @overload
    def generate(
        self, prompts: list[str] | list[list[int]] | list[Prompt], **options: Unpack[_Options]
    ) -> list[Generation]: ...

    def generate(
        self,
        prompts: Any,
        *,
        max_new_tokens: int = 32,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop: str | Sequence[str] = (),
        seed: int = 0,
        chat: bool = False,
        ignore_eos: bool = False,
    ) -> Generation | list[Generation]:
        """Return the continuation of a prompt, or the list of those of a list of prompts, decoded as one batch.

        `prompts`: a text, or a list or NumPy array of token ids, or a list of these.
        `max_new_tokens`: at most so many tokens of each prompt, which must fit into the model's context.
        `temperature`: 0 is greedy. `top_p`, in (0, 1]: draw from the fewest tokens that hold this probability.
        `stop`: a string, or several, before whose first occurrence the text ends. The model's end-of-text tokens end
            it, too, unless `ignore_eos`.
        `seed`: a drawn token depends on the seed, the prompt's place in the list and the token's position alone.
        `chat`: each prompt is a user's message, put into the model's chat template.

        Nothing is kept between calls but in `cache_dir`. Raises ConfigError for a prompt that is empty or too long, and
        for values out of range.
        """
        several = isinstance(prompts, list | tuple) or (isinstance(prompts, np.ndarray) and prompts.ndim > 0)
        one = not several or (len(prompts) > 0 and isinstance(prompts[0], Integral))
        sampling = Sampling(temperature, top_p, seed)
        run = _Run(self.session, [prompts] if one else prompts, max_new_tokens, sampling, stop, chat, ignore_eos)
        for _ in run.steps():
            pass
        results = run.results()
        return results[0] if one else results

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 32,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop: str | Sequence[str] = (),
        seed: int = 0,
        chat: bool = False,
        ignore_eos: bool = False,
    ) -> Generator[Piece, None, None]:
        """Return the text of `generate` in pieces of whole characters, each as soon as its tokens are decoded; the last
        piece has the result. Text that may be the beginning of a stop string waits for the next tokens. Arguments are
        those of `generate`, and errors are raised by this call, not by the first piece."""
        sampling = Sampling(temperature, top_p, seed)
        return _Run(self.session, [prompt], max_new_tokens, sampling, stop, chat, ignore_eos).pieces()


class _Run:
    """The decoding of a batch of prompts; refuses what is wrong when it is made."""

    def __init__(
        self,
        session: Session,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        sampling: Sampling,
        stop: str | Sequence[str],
        chat: bool,
        ignore_eos: bool,
    ) -> None:
        stop = check_stop(stop)
        self.session, self.eos = session, () if ignore_eos else session.spec.eos_token_ids
        self.prompts = session.encode_prompts(prompts, max_new_tokens, chat)
        self.texts = [StoppedText(session.tokenizer, stop) for _ in self.prompts]
        self.ended: set[int] = set()  # prompts that met a stop string
        self.records: list[Any] = []  # a StepRecord a step, or a RoundRecord a round
        self.loop = session.steps(self.prompts, max_new_tokens, sampling, self.eos, self._ends)

    def _ends(self, index: int, token: int) -> bool:
        """Add a token to its text. Returns True where it completes a stop string, which ends its sequence."""
        if self.texts[index].add(token):
            self.ended.add(index)
        return index in self.ended

    def steps(self) -> Iterator[None]:
        """Decode a step or a round at a time, until every prompt has ended."""
        for record in self.loop:
            self.records.append(record)
            yield
        for index, text in enumerate(self.texts):
            if index not in self.ended and text.flush():
                self.ended.add(index)

    def pieces(self) -> Generator[Piece, None, None]:
        """The text of the only prompt, as it is decoded."""
        (text,), shown, used = self.texts, 0, 0
        for _ in self.steps():
            if len(text.text) > shown:
                yield Piece(text.text[shown:], text.tokens[used:])
                shown, used = len(text.text), len(text.tokens)
        (result,) = self.results()
        yield Piece(text.text[shown:], text.tokens[used:], result)

    def results(self) -> list[Generation]:
        speculative = self.session.verify.enabled
        total = summarise_rounds(self.records) if speculative else summarise(self.records)
        return [
            Generation(
                text.text,
                text.tokens,
                len(prompt),
                "stop" if index in self.ended or text.tokens[-1] in self.eos else "length",
                total["bytes_kv_read_est"] + total["bytes_summary_read"],
                total["bytes_kv_dense"],
                total["tokens_per_s"] if total["warm_up_steps"] else None,
                total["pages_visited"],
                total["pages_total"],
                total.get("acceptance"),
            )
            for index, (prompt, text) in enumerate(zip(self.prompts, self.texts, strict=True))
        ]
