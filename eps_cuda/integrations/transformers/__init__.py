"""EPS inside Hugging Face transformers, through its public interfaces: an attention function and its mask under the
name "eps", and a cache of own layers.

    with eps(model, method="rq", budget=0.05) as sparse:  # generate, pipelines, evaluation: what makes its own cache
        model.generate(**inputs)
    print(sparse.stats())

    model.set_attn_implementation("eps")  # or from_pretrained(.., attn_implementation="eps")
    model.generate(**inputs, past_key_values=EpsCache(model, method="rq", budget=0.05))

Without an `EpsCache` attention "eps" is sdpa, bit for bit.
"""

from eps_cuda.integrations.transformers.attention import NAME
from eps_cuda.integrations.transformers.cache import EpsCache, EpsLayer, plan_of
from eps_cuda.integrations.transformers.context import eps
from eps_cuda.integrations.transformers.engine import open_engine
from eps_cuda.integrations.transformers.gguf import without_weights
from eps_cuda.integrations.transformers.server import serve

__all__ = ["NAME", "EpsCache", "EpsLayer", "eps", "open_engine", "plan_of", "serve", "without_weights"]
