"""Linear attention with a state of fixed size in place of K and V: a baseline of constant bytes, untrained.

S_t = gamma S_(t-1) + phi(k_t) v_t^T and z_t = gamma z_(t-1) + phi(k_t); a query's output is phi(q)^T S_t / phi(q)^T z_t
(Katharopoulos et al. 2020, arXiv 2006.16236, equations 16 to 20; gamma as in RetNet, Sun et al. 2023, arXiv
2307.08621). Models that attend so are trained to; these weights were trained for softmax, and what is measured is what
a state of that size loses under them, not what such models can do. Keys and queries are those that attention reads,
after RoPE.

Letters as in `attention.protocol`; m features, T tokens.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from eps_core.attention.layer import collect
from eps_core.attention.protocol import Array
from eps_core.attention.stats import Eviction, StepOutput
from eps_core.config.cache import CacheConfig
from eps_core.decode.forward import Decoder
from eps_core.decode.layers import run_layers
from eps_core.decode.prefix import Prefix
from eps_core.decode.session import Session
from eps_core.errors import require
from eps_core.evaluation.runner import Document, Outcome, decode

FEATURES = ("elu", "favor")
STATE_BYTES = 4  # of a number of the state: float32, in which such models keep it; sums here are float64


@dataclass(frozen=True)
class State:
    """The state that a kv head keeps of all its tokens. `features`: elu, elu(x) + 1 of each dimension (Katharopoulos et
    al.); favor, `num_features` positive random ones, whose products are unbiased estimates of the softmax's exp(q k)
    (Choromanski et al. 2021, arXiv 2009.14794, lemma 1; directions drawn independently, not orthogonal)."""

    features: str = "elu"
    num_features: int | None = None  # of favor; elu has D
    gamma: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.features in FEATURES, f"features {self.features!r} are unknown: choose one of {FEATURES}")
        require(0 < self.gamma <= 1, f"gamma {self.gamma} is outside (0, 1]")
        require(
            (self.num_features is not None and self.num_features >= 1) == (self.features == "favor"),
            f"{self.features} with {self.num_features} features: favor needs a number, 1 or more, elu has the head's",
        )

    def bytes_kept(self, num_layers: int, num_kv_heads: int, head_dim: int) -> int:
        """Bytes of S [m, D] and z [m] of all layers and kv heads: what a step reads, however long the text."""
        return num_layers * num_kv_heads * (self.num_features or head_dim) * (head_dim + 1) * STATE_BYTES

    def map(self, x: np.ndarray, query: bool = False) -> np.ndarray:
        """phi [.., m] of x [.., D], which is divided by D^(1/4), so that products are of q k / sqrt(D). A `query`'s may
        be scaled by any number, as its output is a ratio: favor's largest is 1, so that none overflows."""
        x = x.astype(np.float64) / x.shape[-1] ** 0.25
        if self.features == "elu":
            found: np.ndarray = np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))
            return found
        shape = x.shape[-1], self.num_features or 0
        directions = np.random.default_rng([self.seed, x.shape[-1]]).standard_normal(shape)
        power = x @ directions - np.square(x).sum(axis=-1, keepdims=True) / 2
        found = np.exp(power - power.max(axis=-1, keepdims=True) if query else power)
        return found


class Recurrent:
    """The state of one layer: S [Hkv, m, D] and z [Hkv, m] float64 on the host."""

    def __init__(self, state: State, keys: np.ndarray, values: np.ndarray) -> None:
        """Sum a prompt's k and v [T, Hkv, D]."""
        self.state = state
        weights = state.gamma ** np.arange(len(keys))[::-1]
        phi = state.map(keys) * weights[:, None, None]
        self.sums = np.einsum("thm,thd->hmd", phi, values.astype(np.float64))
        self.normaliser = phi.sum(axis=0)

    def add(self, k: np.ndarray, v: np.ndarray) -> None:
        """One more token: k, v [Hkv, D]."""
        phi = self.state.map(k)
        self.sums = self.state.gamma * self.sums + phi[:, :, None] * v[:, None, :]
        self.normaliser = self.state.gamma * self.normaliser + phi

    def read(self, q: np.ndarray) -> np.ndarray:
        """out [Hq, D] of q [Hq, D], unscaled."""
        heads, dim = len(self.sums), q.shape[-1]
        phi = self.state.map(q.reshape(heads, -1, dim), query=True)
        out: np.ndarray = (phi @ self.sums) / (phi @ self.normaliser[..., None])
        return out.reshape(-1, dim)


class LinearDecoder(Decoder):
    """A decoder of one sequence whose steps read a `Recurrent` a layer. The cache is the decode loop's alone: nothing
    is written to it, and what it counts as read is the state."""

    def __init__(self, session: Session, state: State, cache: Any, prefix: Prefix) -> None:
        super().__init__(session.backend, session.decoder.model)
        self.spec.require_full_attention("linear attention")
        kept = [self.backend.to_host(cache, list(pair)) for pair in prefix.keys_values]
        if not kept:  # a prompt of one token
            kept = [[np.zeros((0, self.spec.num_kv_heads, self.spec.head_dim))] * 2] * self.spec.num_layers
        self.states = [Recurrent(state, k, v) for k, v in kept]
        self.num_bytes = state.bytes_kept(self.spec.num_layers, self.spec.num_kv_heads, self.spec.head_dim)

    def step(  # type: ignore[override]
        self, cache: Any, tokens: np.ndarray, slots: np.ndarray, table: np.ndarray, lengths: np.ndarray, *more: Any
    ) -> tuple[Any, StepOutput]:
        """`Decoder.step` of one sequence, which is never sparse."""
        assert len(tokens) == 1, "a state is of one sequence"
        eps, model = self.backend, self.model
        self._check_tokens(tokens)

        def attention(layer: int, *projected: Array) -> Array:
            q, k, v = (one[0] for one in eps.to_host(cache, list(projected)))
            self.states[layer].add(k, v)
            return eps.from_numpy(self.states[layer].read(q)[None].astype(np.float32), model.dtype, model.device)

        with model.scope():
            model = model.for_rows(cache.kernels, len(tokens))
            x = run_layers(model, model.embed(tokens), model.rotation(lengths - 1), attention)
            _, (logits,) = collect(eps, cache, [], model.logits(x))
        return cache, StepOutput(logits, self.num_bytes, eviction=Eviction(self.num_bytes, 0, 0))


def decode_state(session: Session, document: Document, state: State, prefix: Prefix) -> Outcome:
    """Return how a document goes on after a dense prefill of `prefix` from which the state alone is kept."""
    cache, pool = session.cache(CacheConfig(), len(document.prompt) + document.num_steps)
    sequence, _ = pool.open()
    pool.append(sequence, prefix.tokens)
    decoder = LinearDecoder(session, state, cache, prefix)
    forced = document.forced is not None
    outcome, _ = decode(session, cache, pool, [document], None, decoder=decoder, written=[sequence], keep_logits=forced)
    return outcome
