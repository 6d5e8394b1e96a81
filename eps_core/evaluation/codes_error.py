"""How far K and V as codes (`--kv-bits`) move the next token, measured on the start of a prompt before a run."""

from dataclasses import dataclass, replace

import numpy as np

from eps_core.config.cache import CacheConfig
from eps_core.config.formats import AS_THEY_ARE, EXACT, FORMATS, KvFormats, as_given, described
from eps_core.decode.prefix import Prefix
from eps_core.decode.session import Session
from eps_core.evaluation.runner import Document, Outcome, decode

PROBE_TOKENS = 512  # of the prompt: its prefill bounds what the measurement costs
PROBE_STEPS = 16
MOST_KL = 0.05  # nats; 8-bit codes have 0.0001 to 0.01 on real models


@dataclass(frozen=True)
class CodesError:
    """Mean KL(own dense || dense over codes) of the next token in nats, along `num_steps` tokens of a prompt."""

    kv_bits: KvFormats
    kl: float
    num_steps: int
    milder: tuple[KvFormats, float] | None = None  # where `kl` is above the limit: K in 8 bits, and its KL

    def line(self, dtype: str) -> str:
        """Return the line of a run's header about it: the value, and above the limit that and what to use instead."""
        text = (
            f"{described(dtype, self.kv_bits)}: KL {self.kl:.4f} from the model's own dense, mean of {self.num_steps} "
        )
        text += "tokens of the first prompt"
        if self.kl <= MOST_KL:
            return text
        fix = "leave --kv-bits out"
        if self.milder is not None and self.milder[1] <= MOST_KL:
            fix = f"use --kv-bits {as_given(self.milder[0])} (KL {self.milder[1]:.4f})"
        return f"warning: {text}, above {MOST_KL:g}: {fix}"


def codes_error(session: Session, prompt: list[int]) -> CodesError | None:
    """The error of the session's codes on the first tokens of a prompt; None of a single token. The prefill is exact:
    an error of codes that a prompt is read through comes on top."""
    tokens = prompt[:PROBE_TOKENS]
    if len(tokens) < 2:
        return None
    document = Document.along(tokens, min(PROBE_STEPS, len(tokens) - 1))
    prefix = session.prefix(document.prompt[:-1])
    dense = _decoded(session, EXACT, document, prefix)

    def kl(kv_bits: KvFormats) -> float:
        outcome = _decoded(session, kv_bits, document, prefix)
        outcome.against(dense)
        return max(float(np.mean(outcome.kl)), 0.0)  # type: ignore[arg-type]

    found = CodesError(session.kv_bits, kl(session.kv_bits), document.num_steps)
    k_bits, v_bits = session.kv_bits
    if found.kl > MOST_KL and k_bits != AS_THEY_ARE and FORMATS[k_bits].code_bits < 8:
        return replace(found, milder=((8, v_bits), kl((8, v_bits))))
    return found


def _decoded(session: Session, kv_bits: KvFormats, document: Document, prefix: Prefix) -> Outcome:
    """A dense decode of a document over a cache in these formats."""
    other = session if kv_bits == session.kv_bits else replace(session, kv_bits=kv_bits, checked=set())
    cache, pool = other.cache(CacheConfig(), len(prefix.tokens) + document.num_steps)
    written, cache = prefix.into(session.backend, cache, pool, document.num_steps)
    return decode(session, cache, pool, [document], None, written=[written], keep_logits=True)[0]
