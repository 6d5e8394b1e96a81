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

from eps_core.decode.balance import key_factors
from eps_core.decode.session import Session
from eps_core.integrations.balance import balance_loaded
from eps_core.integrations.settings import Settings
from eps_core.load import load_engine
from eps_core.models.config import read_spec
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
            assert made.model.config._attn_implementation == "sdpa"
            with torch.no_grad():
                yield weights, lambda: made.model(torch.tensor([TOKENS])).logits[0].float().numpy()
        else:
            import mlx.core as mx
            from mlx.utils import tree_flatten

            model, flat = made.hook.model, tree_flatten(made.hook.model.parameters())
            weights = {name: np.array(array.astype(mx.float32)) for name, array in flat}
            caches = made.hook.stock_caches()
            yield weights, lambda: np.array(model(mx.array([TOKENS]), cache=caches)[0].astype(mx.float32))
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
def test_bfloat16_logits_keep_their_bits(engine: str) -> None:
    where = engine, uneven("llama2")
    with opened(*where, "box", "bfloat16") as (before, plain), opened(*where, "rq", "bfloat16") as (after, balanced):
        assert np.array_equal(plain(), balanced())
        assert not all(np.array_equal(array, after[one]) for one, array in before.items())


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


@pytest.mark.parametrize("odd", ["half", "codes", "rows", "absent"])
def test_weights_that_cannot_be_multiplied_leave_all_as_they_are(odd: str) -> None:
    """One tensor of half precision, of codes, in shards or under another name leaves all as they are."""
    path = uneven("llama2")
    names = {one.name: (one.stored_shape[0], "float32") for one in weight_names(read_spec(path)).values()}
    last = "model.layers.1.self_attn.k_proj.weight"
    rows = names.pop(last)[0]
    given = {"half": (rows, "float16"), "codes": (rows, "uint8"), "rows": (rows // 2, "float32")}
    weights = names | ({} if odd == "absent" else {last: given[odd]})
    ran: list[Any] = []
    config = Settings.of({"method": "rq"}).config.cache_config
    balance_loaded(path, config, weights, lambda *one: ran.append(one), lambda *one: ran.append(one))
    assert not ran
    balance_loaded(path, config, names | {last: (rows, "bfloat16")}, lambda *one: ran.append(one), lambda *one: None)
    assert len(ran) == 1


def test_a_model_that_mlx_lm_cannot_balance_has_no_eps_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlx_lm")
    from mlx_lm.models import llama

    from eps_mlx.integrations.mlx_lm import engine as module
    from eps_mlx.integrations.mlx_lm.names import ATTENTION, stock_attention

    def broken(hook: Any, path: Path) -> None:
        assert getattr(llama, ATTENTION) is not stock_attention
        raise RuntimeError("a test broke this")

    monkeypatch.setattr(module, "balance", broken)
    with pytest.raises(RuntimeError, match="a test broke this"):
        module.open_engine(uneven("llama2"), Settings.of({"method": "rq"}), device="cpu")
    assert getattr(llama, ATTENTION) is stock_attention


def test_interleaved_rope_of_mlx_lm_is_left_alone(tmp_path: Path) -> None:
    path = shutil.copytree(uneven("llama2"), tmp_path / "model")
    config = json.loads((path / "config.json").read_text()) | {"rope_theta": 1e4, "rope_traditional": True}
    (path / "config.json").write_text(json.dumps(config))
    with opened("mlx-lm", path, "box") as (before, _), opened("mlx-lm", path, "rq") as (after, _):
        assert all(np.array_equal(array, after[one]) for one, array in before.items())


@pytest.mark.parametrize("adapted", [False, True])
def test_adapters_of_mlx_lm_leave_all_as_it_is(adapted: bool) -> None:
    pytest.importorskip("mlx_lm")
    from mlx.utils import tree_flatten
    from mlx_lm import load
    from mlx_lm.tuner.utils import linear_to_lora_layers

    from eps_mlx.integrations.mlx_lm.balance import balance
    from eps_mlx.integrations.mlx_lm.hook import Hook

    model: Any = load(str(uneven("llama2")))[0]
    if adapted:
        linear_to_lora_layers(model, 1, {"rank": 2, "scale": 1.0, "dropout": 0.0})
    before = {name: np.array(array) for name, array in tree_flatten(model.parameters())}
    hook = Hook(model, Settings.of({"method": "rq"}))
    try:
        balance(hook, uneven("llama2"))
    finally:
        hook.close()
    after: Any = tree_flatten(model.parameters())
    assert adapted == all(np.array_equal(before[name], np.array(array)) for name, array in after)
