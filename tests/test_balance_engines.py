"""Keys that are balanced in the weights which an engine has loaded: as by our own decoder, dense logits bit for bit."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_balance import MODELS, uneven
from tiny_models import saved

from eps_core.decode.balance import key_factors
from eps_core.decode.session import Session
from eps_core.integrations.settings import Settings
from eps_core.load import load_engine
from eps_core.models.weights import weight_names

TOKENS = list(range(40))
BACKENDS = {"transformers": "cuda", "mlx-lm": "mlx"}


@contextmanager
def opened(engine: str, path: Path, method: str, dtype: str = "float32") -> Iterator[tuple[dict[str, Any], Any]]:
    """(weights by name, a function of their logits along some tokens) of the model that an engine opens."""
    made: Any = load_engine(engine).open_engine(path, Settings.of({"method": method}), device="cpu", dtype=dtype)
    try:
        if engine == "transformers":
            torch = pytest.importorskip("torch")
            weights = {name: array.detach().float().numpy() for name, array in made.model.named_parameters()}
            with torch.no_grad():
                yield weights, lambda: made.model(torch.tensor([TOKENS])).logits[0].numpy()
        else:
            import mlx.core as mx
            from mlx.utils import tree_flatten

            model, flat = made.hook.model, tree_flatten(made.hook.model.parameters())
            weights = {name: np.array(array.astype(mx.float32)) for name, array in flat}
            yield weights, lambda: np.array(model(mx.array([TOKENS]), cache=made.hook.stock_caches())[0])
    finally:
        made.close()


@pytest.mark.parametrize("name", MODELS[:-1])
@pytest.mark.parametrize("engine", BACKENDS)
def test_rows_are_multiplied_as_our_own_decoder_multiplies_them(engine: str, name: str, tmp_path: Path) -> None:
    path = shutil.copytree(uneven(name), tmp_path / name)
    config = json.loads((path / "config.json").read_text())
    rope = {"rope_type": "default", **config["rope_parameters"]}  # mlx-lm reads keys of their own
    config["rope_theta"] = rope.pop("rope_theta")
    if rope["rope_type"] != "default":
        config["rope_scaling"] = {**rope, "type": rope["rope_type"]}
    (path / "config.json").write_text(json.dumps(config))
    session = Session.open(path, BACKENDS[engine], "cpu", "float32", method="rq")
    session.load()
    spec, names = session.spec, weight_names(session.spec)
    with opened(engine, path, "box") as (before, plain), opened(engine, path, "rq") as (after, balanced):
        assert np.array_equal(plain(), balanced())
        for layer in range(spec.num_layers):
            for one, factors in key_factors(spec, layer, session.exponents[layer]).items():
                stored = names[one]
                rows = before[stored.name][stored.first : stored.first + len(factors)]
                rows *= factors.reshape(-1, *[1] * (rows.ndim - 1))
        assert before.keys() == after.keys() and session.exponents.any()
        for one, array in before.items():
            assert np.array_equal(array, after[one]), one


@pytest.mark.parametrize("engine", BACKENDS)
def test_what_is_not_balanced_keeps_its_weights(engine: str, tmp_path: Path) -> None:
    """Methods without codes, norms that are stored about 1, float16, and files that our own decoders do not read."""
    unread = shutil.copytree(uneven("llama2"), tmp_path / "unread")
    config = (unread / "config.json").read_text()
    (unread / "config.json").write_text(config.replace('"hidden_act": "silu"', '"hidden_act": "gelu"'))
    cases = [(uneven("llama2"), "box", "float32"), (uneven("llama2"), "rq", "float16")]
    if engine == "transformers":
        cases += [(uneven(MODELS[-1]), "rq", "float32"), (unread, "rq", "float32")]
    for path, method, dtype in cases:
        with opened(engine, path, "meanstd", dtype) as (before, _), opened(engine, path, method, dtype) as (after, _):
            assert all(np.array_equal(array, after[one]) for one, array in before.items()), (path, method, dtype)


def test_quantised_weights_of_transformers_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    from eps_cuda.integrations.transformers.balance import balance

    model = transformers.AutoModelForCausalLM.from_pretrained(uneven("llama2"))
    model.is_quantized = True
    before = {name: array.detach().clone() for name, array in model.named_parameters()}
    balance(model, uneven("llama2"), Settings.of({"method": "rq"}).config.cache_config)
    assert all((array == before[name]).all() for name, array in model.named_parameters())


def test_two_models_of_mlx_lm_may_have_eps_on() -> None:
    """Balancing the second leaves the first's attention in its place."""
    pytest.importorskip("mlx_lm")
    from eps_mlx.integrations.mlx_lm.names import ATTENTION, attention

    module = load_engine("mlx-lm")
    first: Any = module.open_engine(saved("llama2"), Settings.of({"method": "rq"}), device="cpu")
    try:
        second: Any = module.open_engine(uneven("llama2"), Settings.of({"method": "rq"}), device="cpu")
        second.close()
        import mlx_lm.models.llama as llama

        assert getattr(llama, ATTENTION) is attention
    finally:
        first.close()
