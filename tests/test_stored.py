"""Prompts that are kept between runs: what a second run takes, what it refuses, and that both say the same."""

import errno
import json
import os
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import tiny_models
from command import last, lines_of, outcome

from eps_core import LLM
from eps_core.backend import moves
from eps_core.decode import session as session_module
from eps_core.decode import stored as stored_module
from eps_core.decode.session import Session
from eps_core.decode.stored import METADATA_KEY, StoredCounts, StoredPrompts, weights_digest
from eps_core.errors import ConfigError
from eps_core.io import outputs, tensors
from eps_core.models.folder import WEIGHT_FILE

TEXT = "It was a dark and stormy night; the rain fell in torrents. " * 7
LONGER = TEXT + "And then the light went out. " * 2
RQ = {"method": "rq", "budget": 0.3}  # units of 64 tokens
SETTINGS: dict[str, dict[str, Any]] = {
    "off": {"method": "off"},
    "rq": RQ,
    "bounds": {**RQ, "bound_bits": 8},
    "box": {"method": "box", "group_size": 8, "budget": 0.3},
    "codes": {**RQ, "kv_bits": (8, 4)},
    "bf16": {**RQ, "kv_dtype": "bfloat16"},
    "verified": {**RQ, "speculative": True},
}

Counts = Callable[[], StoredCounts]


def opened(target: tuple, model: Path, folder: Path | None, **settings: Any) -> LLM:
    return tiny_models.open_llm(target, model, cache_dir=folder, **settings)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    """What the last session of a test loaded and stored."""
    made, init = [], StoredPrompts.__init__

    def remember(this: StoredPrompts, *args: Any, **more: Any) -> None:
        init(this, *args, **more)
        made.append(this)

    monkeypatch.setattr(StoredPrompts, "__init__", remember)
    return lambda: made[-1].counts


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_second_run_loads_and_says_the_same(
    target: tuple, model: Path, name: str, tmp_path: Path, counts: Counts
) -> None:
    folder, settings = tmp_path / "kept", SETTINGS[name]
    plain = opened(target, model, None, **settings).generate(TEXT, max_new_tokens=8)
    llm = opened(target, model, folder, **settings)
    unit = llm.config.cache_config.unit_tokens
    first = llm.generate(TEXT, max_new_tokens=8)
    whole = (first.num_prompt_tokens - 2) // unit * unit  # as a pool shares: never the last token of what is prefilled
    assert counts().tokens_loaded == 0 and counts().tokens_stored == whole > 256
    assert counts().bytes_stored == sum(file.stat().st_size for file in files(folder))
    again = opened(target, model, folder, **settings)
    with patch.object(again.session.decoder, "prefill", wraps=again.session.decoder.prefill) as prefill:
        second = again.generate(TEXT, max_new_tokens=8)
    assert counts().tokens_loaded == whole and counts().tokens_stored == 0
    assert sum(len(call.args[1]) for call in prefill.call_args_list) == first.num_prompt_tokens - 1 - whole
    assert first.tokens == second.tokens == plain.tokens
    assert first.kv_bytes_read == second.kv_bytes_read == plain.kv_bytes_read
    if name == "verified":
        assert second.acceptance == first.acceptance


def test_the_longest_stored_prefix_is_taken(target: tuple, model: Path, tmp_path: Path, counts: Counts) -> None:
    llm = opened(target, model, tmp_path, **RQ)
    llm.generate(TEXT[:300], max_new_tokens=2)
    assert (short := counts().tokens_stored) == 256
    llm.generate(TEXT, max_new_tokens=2)
    assert counts().tokens_loaded == short and counts().tokens_stored == 384
    llm.generate(LONGER, max_new_tokens=2)
    assert counts().tokens_loaded == 384 and len(files(tmp_path)) == 3
    llm.generate("X" + LONGER, max_new_tokens=2)
    assert counts().tokens_loaded == 0
    want = opened(target, model, None, **RQ).generate(LONGER, max_new_tokens=6)
    assert llm.generate(LONGER, max_new_tokens=6).tokens == want.tokens


def test_a_batch_loads_each_of_its_prompts(target: tuple, model: Path, tmp_path: Path, counts: Counts) -> None:
    prompts = [TEXT, "x", LONGER, TEXT[5:300]]
    alone = opened(target, model, None, **RQ).generate(prompts, max_new_tokens=4)
    llm = opened(target, model, tmp_path, **RQ)
    first = llm.generate(prompts, max_new_tokens=4)
    second = llm.generate(prompts, max_new_tokens=4)
    assert counts().tokens_loaded == 384 + 448 + 256 and counts().tokens_stored == 0
    assert [one.tokens for one in first] == [one.tokens for one in second] == [one.tokens for one in alone]


@pytest.mark.parametrize("name", ["box", "bounds", "bounded-codes"])
def test_a_file_is_of_its_prompt_alone(target: tuple, model: Path, name: str, tmp_path: Path) -> None:
    """Whatever was decoded after it, and beside it."""
    settings = SETTINGS.get(name, {**SETTINGS["box"], "kv_bits": (8, 4)})
    runs: list[tuple[str | list[str], int]] = [(TEXT, 1), (TEXT, 40)]
    if name != "bounds":
        runs.append(([TEXT, "{[<%&>]}" * 30], 1))
    held = []
    for run, (prompts, num_new) in enumerate(runs):
        folder = tmp_path / str(run)
        opened(target, model, folder, **settings).generate(prompts, max_new_tokens=num_new, ignore_eos=True)
        held.append([tensors.read(file)[1] for file in files(folder)])
    ((first,), *others) = held
    for other in others:
        (same,) = (one for one in other if np.array_equal(one["tokens"], first["tokens"]))
        for key, array in first.items():
            np.testing.assert_array_equal(same[key].view(np.uint8), array.view(np.uint8), err_msg=key)


def test_codes_about_a_centre_are_of_one_prompt(target: tuple, model: Path, tmp_path: Path) -> None:
    llm = opened(target, model, tmp_path, **SETTINGS["bounds"])
    with pytest.raises(ConfigError, match="one prompt"):
        llm.generate([TEXT, LONGER], max_new_tokens=2)


@pytest.mark.parametrize("name", ["off", "rq", "bounds", "box", "codes", "bf16"])
def test_units_come_back_as_they_were(
    target: tuple, model: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into other units of another cache; the summaries are valid there, and their neighbours untouched."""
    monkeypatch.setattr(moves, "NORM_UNITS", 2)
    session = opened(target, model, None, **SETTINGS[name]).session
    cache_config, backend, prefix = session.config.cache_config, session.backend, session.prefix(session.encode(TEXT))
    unit = cache_config.unit_tokens
    num_units = 256 // unit
    cache, pool = session.cache(cache_config, 1024)
    sequence, cache = prefix.into(backend, cache, pool)
    other, _ = session.cache(cache_config, 1024)
    places = [2 * i + 1 for i in range(num_units)]
    held = backend.export_units(cache, sequence.table[:num_units])
    alone = [backend.export_units(cache, [one]) for one in sequence.table[:num_units]]
    for key in (key for key in held if "largest" in key):
        np.testing.assert_array_equal(held[key], np.maximum.reduce([one[key] for one in alone]), err_msg=key)
    before = backend.export_units(other, [0])
    other = backend.import_units(other, places, held)
    again = backend.export_units(other, places)
    assert held.keys() == again.keys() == backend.export_units(other, []).keys()
    for key, array in held.items():
        np.testing.assert_array_equal(again[key].view(np.uint8), array.view(np.uint8), err_msg=key)
    for key, array in backend.export_units(other, [0]).items():
        if not key.startswith("heads."):
            np.testing.assert_array_equal(array.view(np.uint8), before[key].view(np.uint8), err_msg=key)
    for layer in range(session.spec.num_layers):
        got, want = (
            backend.read_kv(one, layer, np.array(table), 256)
            for one, table in ((other, places), (cache, sequence.table[:num_units]))
        )
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(backend.to_numpy(a), backend.to_numpy(b))
        for one in other.parts():
            per_unit = one.cache_config.spans_per_unit
            state = one.state[layer].valid(np.arange(8 * per_unit)).reshape(8, per_unit)
            assert [bool(row.all()) for row in state] == [i in places for i in range(8)]
            assert not state[0].any()


# ---- files that are not what they must be


def damaged(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def rewritten(change: Callable[[dict[str, Any], Any], None]) -> Callable[[Path], None]:
    """Changes what a file says and holds; its header stays right."""

    def change_it(file: Path) -> None:
        metadata, arrays, data = tensors.read(file)
        values = json.loads(metadata[METADATA_KEY])
        change(values, data)
        layout = {name: (list(array.shape), array.dtype.name) for name, array in arrays.items()}
        start, _ = tensors.header({METADATA_KEY: json.dumps(values)}, layout)
        file.write_bytes(start + data)

    return change_it


def to_another_prompt(values: dict[str, Any], data: Any) -> None:
    data[0] ^= 1  # the first token: what follows it in the file is the layout's
    values["blake2b"] = stored_module._digest(data)


def foreign(file: Path) -> None:
    start, _ = tensors.header({}, {"x": ([2], "int8")})
    file.write_bytes(start + b"ab")


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "damaged": (damaged, "damaged: its contents"),
    "cut": (cut, "truncated"),
    "empty": (lambda file: file.write_bytes(b""), "truncated"),
    "text": (lambda file: file.write_bytes(b"hello, this is no such file"), "truncated, or no"),
    "json": (lambda file: file.write_bytes((2).to_bytes(8, "little") + b"[]"), "no safetensors file"),
    "fractions": (
        lambda file: file.write_bytes(
            (len(head := b'{"k":{"dtype":"F32","shape":[2.0,2],"data_offsets":[0,16]}}')).to_bytes(8, "little")
            + head
            + bytes(16)
        ),
        "damaged, or no safetensors file",
    ),
    "foreign": (foreign, "foreign"),
    "weights": (
        rewritten(lambda values, data: values["identity"].update(weights="0")),
        "stale: it is of other weights",
    ),
    "version": (rewritten(lambda values, data: values.update(format_version=0)), "stale: it has format 0"),
    "prompt": (rewritten(to_another_prompt), "foreign: it is of another prompt"),
    "directory": (lambda file: (file.unlink(), file.mkdir()), "directory"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_refused_in_a_line_and_remade(
    model: Path, name: str, tmp_path: Path, counts: Counts, capsys: pytest.CaptureFixture
) -> None:
    llm = LLM(model, backend="numpy", cache_dir=tmp_path, **RQ)
    want = llm.generate(TEXT, max_new_tokens=4).tokens
    (file,) = files(tmp_path)
    right = file.read_bytes()
    spoil, reason = WRONG[name]
    spoil(file)
    capsys.readouterr()
    assert llm.generate(TEXT, max_new_tokens=4).tokens == want and counts().tokens_loaded == 0
    error = capsys.readouterr().err
    assert str(file) in error and reason.lower() in error.lower()
    if name == "directory":  # which cannot be replaced, and says so
        assert error.count("\n") == 2 and "is not stored" in error
        return
    assert error.count("\n") == 1 and file.read_bytes() == right and counts().tokens_stored == 384
    assert llm.generate(TEXT, max_new_tokens=4).tokens == want and counts().tokens_loaded == 384


@pytest.mark.parametrize(
    "settings",
    [{"kv_dtype": "float16"}, {"kv_bits": (8, 8)}, {"method": "rq"}, {"method": "rq", "seed": 3}, {"dtype": "float16"}],
    ids=str,
)
def test_other_settings_have_other_files(model: Path, settings: dict[str, Any], tmp_path: Path, counts: Counts) -> None:
    LLM(model, "off", backend="numpy", cache_dir=tmp_path).generate(TEXT, max_new_tokens=2)
    LLM(model, backend="numpy", cache_dir=tmp_path, **{"method": "off", **settings}).generate(TEXT, max_new_tokens=2)
    assert counts().tokens_loaded == 0 and len(files(tmp_path)) == 2


def test_prompts_are_of_the_weights_that_were_read(tmp_path: Path, counts: Counts) -> None:
    """A checkpoint that is saved over the model is another one, whoever still holds the first."""
    path, settings = tiny_models.save_model("mistral", tmp_path / "model"), {**RQ, "backend": "numpy"}
    first = LLM(path, cache_dir=tmp_path / "kept", **settings)
    os.replace(tiny_models.save_model("mistral", tmp_path / "new", seed=1) / WEIGHT_FILE, path / WEIGHT_FILE)
    first.generate(TEXT, max_new_tokens=4)
    assert counts().tokens_stored == 384
    second = LLM(path, cache_dir=tmp_path / "kept", **settings)
    made = second.generate(TEXT, max_new_tokens=4)
    assert counts().tokens_loaded == 0 and made.tokens == LLM(path, **settings).generate(TEXT, max_new_tokens=4).tokens
    first.generate(TEXT, max_new_tokens=4)
    assert counts().tokens_loaded == 0


def test_weights_that_change_while_they_are_read_keep_no_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    path, real = tiny_models.save_model("mistral", tmp_path / "model"), session_module.load_decoder

    def load_decoder(*args: Any) -> Any:
        tiny_models.save_model("mistral", path, seed=1)
        return real(*args)

    monkeypatch.setattr(session_module, "load_decoder", load_decoder)
    llm = LLM(path, backend="numpy", cache_dir=tmp_path / "kept", **RQ)
    llm.generate(TEXT, max_new_tokens=4)
    assert not (tmp_path / "kept").exists()
    assert f"weights in {path} changed while they were read" in capsys.readouterr().err


def test_a_full_disk_costs_a_line(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    class Full(outputs._File):
        def write(self, data: Any) -> int:
            raise outputs._failed(self.path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    monkeypatch.setattr(outputs, "_File", Full)
    llm = LLM(model, "off", backend="numpy", cache_dir=tmp_path / "kept")
    assert len(llm.generate(TEXT, max_new_tokens=3).tokens) == 3
    error = capsys.readouterr().err
    assert "No space left" in error and "is not stored" in error and error.count("\n") == 1
    assert not list((tmp_path / "kept").iterdir())


def test_the_command_tells_what_it_loaded(model: Path, tmp_path: Path) -> None:
    line = [
        "run", "--model", str(model), "--backend", "numpy", "--prompt", TEXT, "--max-new-tokens", "3", "--method", "rq",
        "--cache-dir", "kept", "--metrics", "m.jsonl",
    ]  # fmt: skip
    results = []
    for _ in range(2):
        done = outcome(line, tmp_path)
        results.append(last(done))
        assert lines_of(tmp_path / "m.jsonl")[-1]["stored"] == results[-1]["stored"]["eps"]
    assert "prompt tokens loaded" in done.out and "time to first token" in done.out
    assert results[0]["tokens"] == results[1]["tokens"]
    for side, tokens in (("dense", 384), ("eps", 384)):
        first, second = (result["stored"][side] for result in results)
        assert first["tokens_stored"] == second["tokens_loaded"] == tokens and second["tokens_stored"] == 0
        assert first["bytes_stored"] == second["bytes_loaded"] > 0 and second["ttft_ms"] > second["load_ms"] > 0


def test_what_is_no_folder_of_its_own_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", model):
        with pytest.raises(ConfigError, match="--cache-dir"):
            Session.open(model, "numpy", cache_dir=folder)


def test_a_digest_of_weights_is_of_all_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_module.caches, "folder", lambda: tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"a" * 5000)
    first = weights_digest(tmp_path)
    assert weights_digest(tmp_path) == first == blake2b(path.read_bytes(), digest_size=16).hexdigest()
    known = json.loads((tmp_path / "weights.json").read_text())
    assert list(known.values()) == [first]
    path.write_bytes(b"a" * 4999 + b"b")
    os.utime(path, ns=(1, 1))
    assert weights_digest(tmp_path) != first
    (tmp_path / "weights.json").write_text("[no")
    assert weights_digest(tmp_path) != first
