"""What mlx-lm does not read of a model's config.json is refused or warned of, before anything runs."""

import json
import logging
from pathlib import Path

import mlx_lm
import pytest
import tiny_models
from command import outcome
from tiny_models import changed

from eps_core.errors import ConfigError
from eps_core.integrations.settings import Settings
from eps_mlx.integrations import mlx_lm as hooks
from eps_mlx.integrations.mlx_lm.engine import open_engine
from eps_mlx.integrations.mlx_lm.hook import Hook

RQ = Settings.of({"method": "rq"})
# transformers writes rope_parameters, which mlx-lm's Llama and Qwen2 do not read
OTHER_BASE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
SCALED = ("llama3.1-tied-sharded", "llama2-linear-biased", "qwen2-yarn")


def opened(path: Path) -> None:
    open_engine(path, RQ, "cpu", "float32").close()


@pytest.mark.parametrize("name", SCALED)
def test_rotary_embeddings_that_mlx_lm_drops_are_refused_and_the_fix_works(name: str, tmp_path: Path) -> None:
    path = changed(tmp_path / name, name, config={"tie_word_embeddings": name.endswith("tied-sharded")})
    with pytest.raises(ConfigError, match=r"does not turn keys as config\.json says") as error:
        opened(path)
    line = str(error.value)
    assert "\n" not in line and str(path) in line
    config = json.loads((path / "config.json").read_text())
    fix = json.loads("{" + line.rpartition("add ")[2].rpartition(" to its config.json")[0] + "}")
    assert fix["rope_theta"] == config["rope_parameters"]["rope_theta"]
    (path / "config.json").write_text(json.dumps(config | fix))
    opened(path)


def test_scaling_that_mlx_lm_reads_and_computes_otherwise_is_refused(tmp_path: Path) -> None:
    """YaRN that is not truncated."""
    scaling = {**tiny_models.YARN_SCALING, "truncate": False}
    theta = scaling.pop("rope_theta")
    config = {"rope_parameters": None, "tie_word_embeddings": False}
    path = changed(tmp_path / "m", "qwen2-yarn", config=config | {"rope_theta": theta, "rope_scaling": scaling})
    with pytest.raises(ConfigError, match=r"with yarn scaling .*: use --engine transformers$"):
        opened(path)


def test_a_base_that_mlx_lm_drops_is_named(tmp_path: Path) -> None:
    path = changed(tmp_path / "m", "llama2", config=OTHER_BASE)
    line = (
        r"base 10,000 and should have base 1,000,000 .*rope_theta.*add \"rope_theta\": 1000000\.0 to its config\.json$"
    )
    with pytest.raises(ConfigError, match=line):
        opened(path)
    with pytest.raises(ConfigError, match=line):
        hooks.load(path, method="rq")
    done = outcome(["run", "--engine", "mlx-lm", "--model", str(path), "--prompt", "a b", "--method", "rq"], tmp_path)
    assert done.code == 2 and "base 10,000" in done.err and len(done.err.strip().splitlines()) == 1


@pytest.mark.parametrize("name", ["llama2", "qwen3", "llama2-dynamic"])
def test_what_is_read_is_not_refused(name: str, tmp_path: Path) -> None:
    rope = {"rope_theta": 1e4, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}} if "dynamic" in name else {}
    opened(changed(tmp_path / "m", name, config=rope))


def test_an_output_head_that_mlx_lm_drops_is_refused(tmp_path: Path) -> None:
    path = changed(tmp_path / "m", "llama2", config={"tie_word_embeddings": None})
    with pytest.raises(ConfigError, match=r'drops the output head .*add "tie_word_embeddings": false to its config'):
        opened(path)
    opened(changed(tmp_path / "n", "llama2", config={"tie_word_embeddings": False}))


def test_a_sliding_window_that_mlx_lm_drops_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = changed(tmp_path / "m", "mistral", config={"sliding_window": 64, "tie_word_embeddings": False})
    with caplog.at_level(logging.WARNING, "eps"):
        opened(path)
    assert "sliding window of 64 tokens (layers 0-1)" in caplog.text and "attends everything" in caplog.text
    caplog.clear()
    opened(changed(tmp_path / "n", "mistral", config={"sliding_window": None, "tie_word_embeddings": False}))
    assert not caplog.records


def test_off_leaves_mlx_lm_as_it_is(tmp_path: Path) -> None:
    path = changed(tmp_path / "m", "llama2", config=OTHER_BASE)
    model, _, config = mlx_lm.load(str(path), return_config=True)  # type: ignore[misc]
    Hook(model, Settings(), str(path), config=config).close()
