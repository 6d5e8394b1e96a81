"""Calibration finds what was built into keys, and a head policy is refused wherever it does not fit."""

import io
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from command import last, outcome

from eps_core.config.eps import EpsConfig
from eps_core.decode.cost import Cost
from eps_core.decode.heads import HeadPolicy, check_policy, load_policy, model_fingerprint, modes_of
from eps_core.errors import ConfigError
from eps_core.evaluation import pays
from eps_core.evaluation.calibrate import (
    FRACTIONS,
    MASS,
    CalibrateRequest,
    Kept,
    calibrate,
    classify,
    contexts_below,
    kl_from,
    layer_curves,
    pays_line,
    write_policy,
)
from eps_core.models.config import DEMO_MODEL, read_spec
from eps_core.reference import formulas

CONFIG = EpsConfig.of(method="rq", group_size=4, num_sink_tokens=4, num_recent_tokens=16)
CONTEXT = 260


def built_heads() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """q [2, 6, D], k, v [T, 3, D], lengths [2] of three kv heads: one that looks at the first and last tokens, one at
    eight tokens in the middle, one at all alike."""
    rng, tokens, dim = np.random.default_rng(0), 400, 8
    k, v = rng.normal(0, 0.01, (tokens, 3, dim)), rng.normal(size=(tokens, 3, dim))
    k[:4, 0, 0] = 12
    k[385:, 0, 0] = 12
    k[200:208, 1, 0] = 12
    q = np.zeros((2, 6, dim))
    q[..., 0] = np.sqrt(dim)  # a = 1 along the first axis
    return q, k, v, np.array([399, 400])


def test_built_heads_are_told_apart() -> None:
    q, k, v, lengths = built_heads()
    found = layer_curves(q, k, v, lengths, 8**-0.5, 4, 4, 16)
    outside = found.outside[None]
    assert classify(outside, 0.05) == (("streaming", "retrieval", "retrieval"),)
    # the diffuse head has its mass where the tokens are
    assert outside[0, 2] == pytest.approx(1 - 20 / 400, abs=0.01)
    # 8 tokens are 2 groups of 100; what is spread evenly takes 99 of them
    assert found.needed[1] == pytest.approx(0.02) and found.needed[2] == pytest.approx(0.99, abs=0.011)
    classes = (("streaming", "retrieval"), ("retrieval", "retrieval"))
    assert modes_of(classes, (1,)) == (("dense", "sparse"), ("dense", "dense"))


def test_curves_rise_to_one_and_follow_the_oracle() -> None:
    rng = np.random.default_rng(3)
    q, k, v = rng.normal(0, 2, (2, 4, 8)), rng.normal(size=(101, 2, 8)), rng.normal(size=(101, 2, 8))
    found = layer_curves(q, k, v, np.array([90, 101]), 8**-0.5, 4, 4, 16)
    assert found.curves.shape == (2, len(FRACTIONS)) and (np.diff(found.curves, axis=1) >= 0).all()
    np.testing.assert_array_equal(found.curves[:, -1], 1.0)
    assert (found.curves > 0).all() and (found.needed > 0).all() and (found.needed <= 1).all()
    for head in range(2):
        tenth, needed, outside = [], [], []
        for step, length in enumerate((90, 101)):
            masses = [formulas.group_masses(q[step, 2 * head + r] / 8**0.5, k[:length, head], 4) for r in (0, 1)]
            order = np.argsort(-np.max(masses, axis=0), kind="stable")
            held = np.mean([np.cumsum(np.exp(m[order])) / np.exp(m).sum() for m in masses], axis=0)
            tenth.append(held[-(-len(order) // 10) - 1])
            needed.append((np.flatnonzero(held >= MASS)[0] + 1) / len(order))
            weights = [np.exp(k[:length, head] @ q[step, 2 * head + r] / 8**0.5) for r in (0, 1)]
            outside.append(max(w[4 : length - 16].sum() / w.sum() for w in weights))
        assert found.curves[head, FRACTIONS.index(0.1)] == pytest.approx(np.mean(tenth))
        assert found.needed[head] == pytest.approx(np.mean(needed))
        assert found.outside[head] == pytest.approx(np.mean(outside))


def test_a_method_pays_where_it_keeps_its_kl_and_saves_time() -> None:
    config = EpsConfig.of(method="rq")
    assert contexts_below(4096, config.sparse_from) == [2048, 4096]  # 1,024 tokens are read whole
    assert contexts_below(300, config.sparse_from) == contexts_below(300, None) == []
    kept = [Kept(1024, 0.02, 0.6), Kept(2048, 0.009, 0.4), Kept(4096, 0.004, 0.2)]
    assert kl_from(kept) == 2048 and kl_from(kept[1:]) == 2048 and kl_from(kept[:1]) is None
    said = pays_line(config, 4096, kept, 3072, True)
    assert "from 2,048 to 4,096 tokens and reads everything below 1,025" in said
    assert said.endswith("pays from 3,072 on.")
    assert pays_line(config, 4096, kept, 700, True).endswith("it pays from 2,048 on.")
    beyond = "5,000 on, where its KL was not measured: add --context 5000."
    assert pays_line(config, 4096, kept, 5000, True).endswith(beyond)
    assert "saves time at no context of this model" in pays_line(config, 4096, kept, None, True)
    assert "time is unknown" in pays_line(config, 4096, kept, None, False)
    assert "0.0200 at 1,024 tokens): raise --eps-budget" in pays_line(config, 1024, kept[:1], 700, True)
    short = pays_line(config, 260, [], None, True)
    assert "less than 1,025 tokens" in short and short.endswith("give a --context of at least 1,025 tokens")


@pytest.mark.parametrize("budget", [0.05, 1.0])
def test_where_it_pays_is_measured(budget: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pays, "cost_of", lambda *args: (Cost((64, 128), (1.0, 3.0), (2.0, 2.0)), True))
    out = io.StringIO()
    config = EpsConfig.of(method="rq", group_size=4, num_sink_tokens=4, num_recent_tokens=16, budget=budget)
    result = calibrate(replace(request(tmp_path / "p.json"), config=config), out)
    if budget == 1:
        assert result["kept"] == [] and result["pays_from_tokens_est"] is None
        assert "reads everything of any" in out.getvalue()
        return
    kept = [Kept(**one) for one in result["kept"]]
    assert [one.context for one in kept] == [32, 65, 130, 260] and all(one.kl_mean >= 0 for one in kept)
    assert kept[-1].kl_mean > 0 and kept[-1].bytes_ratio < kept[0].bytes_ratio
    assert result["kl_from_tokens"] == kl_from(kept) and result["time_from_tokens_est"] == 256
    assert f"{kept[-1].kl_mean:.4f}" in out.getvalue() and pays_line(config, 260, kept, 256, True) in out.getvalue()


def request(path: Path, **more: Any) -> CalibrateRequest:
    return CalibrateRequest(path, CONFIG, context_tokens=CONTEXT, num_steps=3, backend="cuda", device="cpu", **more)


@pytest.fixture(scope="module")
def policy_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's policy."""
    path = tmp_path_factory.mktemp("policy") / "policy.json"
    calibrate(request(path), io.StringIO())
    return path


def test_a_policy_of_the_demo_model(policy_file: Path) -> None:
    policy, spec = load_policy(policy_file), read_spec(DEMO_MODEL)
    check_policy(policy, DEMO_MODEL, spec)
    assert policy.model == "demo" and policy.fingerprint == model_fingerprint(DEMO_MODEL)
    assert (np.diff(policy.curves, axis=2) >= 0).all() and np.shape(policy.curves) == (4, 2, len(FRACTIONS))
    modes = policy.head_modes
    config = EpsConfig.of(method="rq", head_modes=modes)
    assert config.selection_config.head_modes == modes and np.shape(modes) == (4, 2)
    for layer, (classes, mine) in enumerate(zip(policy.classes, modes, strict=True)):
        for kind, mode in zip(classes, mine, strict=True):
            assert mode == ("sparse" if kind == "retrieval" and layer not in policy.dense_layers else "dense")
    assert EpsConfig.of(**policy.settings["config"]) == CONFIG
    again = policy_file.parent / "again.json"
    calibrate(request(again), io.StringIO())
    assert again.read_bytes() == policy_file.read_bytes()
    write_policy(again, policy)
    assert again.read_bytes() == policy_file.read_bytes()
    assert len(list(policy_file.parent.iterdir())) == 2


def test_a_policy_with_the_former_name_of_sparse_is_read(policy_file: Path, tmp_path: Path) -> None:
    text = policy_file.read_text()
    (tmp_path / "old.json").write_text(text.replace('"sparse"', '"gate"'))
    assert '"sparse"' in text and load_policy(tmp_path / "old.json") == load_policy(policy_file)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"dense_fraction": 0.0}, "no kv head is worth sparse attention"),
        ({"streaming_share": 1.0}, "no kv head is worth sparse attention"),
        ({"dense_fraction": 1.0, "streaming_share": 0.0}, "8 of 8 kv heads are worth sparse attention"),
    ],
)
def test_the_verdict_is_said_plainly(limits: dict[str, float], words: str, tmp_path: Path) -> None:
    out = io.StringIO()
    result = calibrate(request(tmp_path / "p.json", **limits), out)
    assert words in out.getvalue()
    assert ("not sparse enough" in out.getvalue()) != result["sparse_enough"]
    if not result["sparse_enough"]:
        assert result["sparse_heads"] == 0
        assert {mode for heads in load_policy(tmp_path / "p.json").head_modes for mode in heads} == {"dense"}


def test_a_policy_of_another_model_is_refused(policy_file: Path, tmp_path: Path) -> None:
    policy = load_policy(policy_file)
    tiny = tiny_models.save_model("qwen2-tied", tmp_path / "tiny")
    with pytest.raises(ConfigError, match=r"4 layers x 2 kv heads of 64, the model has 2 x 2 of 16: calibrate"):
        check_policy(policy, tiny, read_spec(tiny))
    other = tiny_models.save_model("qwen2-tied", tmp_path / "other", seed=1)
    assert model_fingerprint(tiny) != model_fingerprint(other)
    grid = (("sparse", "sparse"),) * 2
    mine = replace(policy, num_layers=2, head_dim=16, fingerprint=model_fingerprint(other), head_modes=grid)
    check_policy(mine, other, read_spec(other))
    with pytest.raises(ConfigError, match="another model"):
        check_policy(mine, tiny, read_spec(tiny))


# what is changed in a good policy, or what stands in its place, and words that the one line must hold
FAULTS: dict[str, tuple[dict[str, Any] | str, str]] = {
    "no-json": ("{", "not JSON"),
    "list": ("[1]", "no head policy"),
    "empty": ("{}", "no head policy"),
    "version-alone": ('{"format_version": 1}', "classes"),
    "unknown-key": ({"extra": 1}, "extra"),
    "other-version": ({"format_version": 2}, "format 2"),
    "shape": ({"num_layers": 3}, "3 layers"),
    "no-shape": ({"num_kv_heads": "2"}, "'2' is not a whole number"),
    "heads": ({"classes": [["retrieval"]] * 4}, "2 kv heads"),
    "class": ({"classes": [["retrieval", "sleepy"]] * 4}, "sleepy"),
    "class-of-another-kind": ({"classes": [["retrieval", {"3": 3}]] * 4}, "classes {'3': 3} is not a text"),
    "modes": ({"head_modes": [["window", "window"]] * 4}, "head_modes"),
    "dense-layers": ({"dense_layers": [4]}, "dense_layers (4,)"),
    "falling-curve": ({"curves": [[[0.5] * 11 + [0.4]] * 2] * 4}, "falls"),
    "short-curve": ({"curves": [[[0.5]] * 2] * 4}, "12 shares"),
    "beyond-one": ({"outside_share": [[0.5, 1.5]] * 4}, "within 0 to 1"),
    "nan": ({"fraction_needed": [[0.5, float("nan")]] * 4}, "NaN is no number of JSON"),
    "fractions": ({"fractions": [0.5, 0.1]}, "fractions"),
    "fingerprint": ({"fingerprint": None}, "fingerprint"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_policy_is_one_line(name: str, policy_file: Path, tmp_path: Path) -> None:
    faulty, words = FAULTS[name]
    path = tmp_path / "p.json"
    with pytest.raises(ConfigError, match="cannot be read"):
        load_policy(path)
    good = json.loads(policy_file.read_text())
    path.write_text(faulty if isinstance(faulty, str) else json.dumps(good | faulty))
    with pytest.raises(ConfigError) as error:
        load_policy(path)
    assert words in str(error.value) and "\n" not in str(error.value) and "calibrate" in str(error.value)


def test_every_field_is_checked() -> None:
    """A field that is added to the policy must be thought of in these tests too."""
    assert len(asdict(HeadPolicy(1, "", "", 1, 1, 1, {}, (), (), (), (), (), (), ()))) == 14


def test_the_command_prints_a_table_and_an_object(tmp_path: Path) -> None:
    flags = "--context 280 --steps 2 --backend cuda --eps-method box --eps-group-size 8 -o p.json"
    done = outcome(["calibrate", *flags.split()], tmp_path)
    assert "bytes against dense" in done.out and "groups of 8 tokens at 280 tokens" in done.out
    result, policy = last(done), load_policy(tmp_path / "p.json")
    assert result["heads"] == 8 and result["dense_layers"] == list(policy.dense_layers)
    assert policy.settings["config"]["group_size"] == 8
