"""A decode across an update says what the new weights would have said of the whole text."""

from pathlib import Path

import pytest
import tiny_models

from eps_core.config.eps import EpsConfig
from eps_core.decode.session import Session
from eps_core.errors import ConfigError
from experiments.weight_versions.run import decode_across, with_weights

TEXT = "It was a dark and stormy night; the rain fell in torrents. "
BOX = EpsConfig.of(method="box", group_size=4, num_sink_tokens=4, num_recent_tokens=8, budget=0.3)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one shape, and one of another."""
    names = ("llama2", "llama2", "mistral")
    return [tiny_models.save_model(name, tmp_path_factory.mktemp("model"), seed) for seed, name in enumerate(names)]


@pytest.mark.parametrize("config", [EpsConfig(), BOX], ids=["dense", "box"])
def test_the_new_weights_continue_the_whole_text(models: list[Path], config: EpsConfig) -> None:
    old = Session.open(models[0], "numpy")
    prompts = old.encode_prompts([TEXT, TEXT[3:40]], 12)
    first, second = decode_across([(old, 5), (with_weights(old, models[1]), 7)], prompts, config)
    longer = [[*prompt, *tokens] for prompt, tokens in zip(prompts, first.tokens, strict=True)]
    (want,) = decode_across([(Session.open(models[1], "numpy"), 7)], longer, config)
    assert second.tokens == want.tokens and second.prefilled_tokens == sum(map(len, longer)) - 2
    (alone,) = decode_across([(old, 12)], prompts, config)
    assert [tokens[:5] for tokens in alone.tokens] == first.tokens
    assert [tokens[5:] for tokens in alone.tokens] != second.tokens


def test_another_model_is_refused(models: list[Path]) -> None:
    with pytest.raises(ConfigError, match=r"is another model than .*: family"):
        with_weights(Session.open(models[0], "numpy"), models[2])
