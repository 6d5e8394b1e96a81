"""The prompts of a run: a text, files, JSONL. Several are one batch, dense and sparse; each is what it is alone."""

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from command import call, last, lines_of, outcome, refused
from test_cli import PROGRESS, PROMPT, RESULT_KEYS

from eps_core.config.eps import EpsConfig
from eps_core.decode.sampling import Sampling
from eps_core.evaluation import compare
from eps_core.evaluation.request import RunRequest
from eps_core.load import backend_name, load_backend

RAGGED = [PROMPT, "x", PROMPT[7:160]]
BOX = EpsConfig.of(method="box", group_size=8, num_sink_tokens=4, num_recent_tokens=16, budget=0.3)


def decode(target: tuple, model: Path, prompts: list[str], **more: Any) -> tuple[dict[str, Any], str]:
    backend, device = target
    out = io.StringIO()
    request = RunRequest(
        BOX, Sampling(), backend_name(backend), device, model, tuple(prompts), 6, "float32", kernels="arrays", **more
    )
    return compare.run(request, out), out.getvalue()


def test_each_prompt_of_a_batch_is_what_it_is_alone(target: tuple, model: Path) -> None:
    together, shown = decode(target, model, RAGGED, kl=True)
    alone = [decode(target, model, [text], kl=True)[0] for text in RAGGED]
    assert together["text"] is together["tokens"] is together["dense"]["tokens"] is together["eps"]["tokens"] is None
    assert together["sequences"] == [
        {
            **{key: one[key] for key in ("prompt_tokens", "new_tokens", "text", "tokens", "tokens_equal")},
            "dense_tokens": one["dense"]["tokens"],
        }
        for one in alone
    ]
    assert together["tokens_equal"] == all(one["tokens_equal"] for one in alone)
    for key in ("prompt_tokens", "new_tokens"):
        assert together[key] == sum(one[key] for one in alone)
    assert together["dense"]["bytes_kv_read"] == sum(one["dense"]["bytes_kv_read"] for one in alone)
    # every step of every prompt counts once
    weights = [one["new_tokens"] for one in alone]
    for key in ("kl_mean", "top1_agreement"):
        assert together[key] == pytest.approx(np.average([one[key] for one in alone], weights=weights), abs=1e-6)
    assert together["kl_max"] == pytest.approx(max(one["kl_max"] for one in alone), abs=1e-6)
    assert "prompts 3 of " in shown
    equal = sum(one["tokens_equal"] for one in alone)
    assert re.search(rf"tokens equal to dense +{equal} of 3 prompts", shown)
    for number, one in enumerate(alone, start=1):
        assert f"eps   {number} > {one['text']}\n" in shown
    assert all("sequences" not in one for one in alone)


def test_prompts_that_stop_apart_are_compared_where_both_speak(model: Path, tmp_path: Path) -> None:
    """One leaves the batch at its stop token; the divergence follows the dense tokens of each."""
    target = (load_backend("numpy"), "cpu")
    free, _ = decode(target, model, RAGGED, stop=False)
    tokens = [one["dense_tokens"] for one in free["sequences"]]
    stop = next(token for token in tokens[0][1:4] if token not in tokens[0][:1] and token not in tokens[2])
    stopping = tiny_models.changed(tmp_path / "stopping", "mistral", config={"eos_token_id": stop})
    result, _ = decode(target, stopping, RAGGED, kl=True)
    said = [one["dense_tokens"] for one in result["sequences"]]
    assert said[0] == tokens[0][: tokens[0].index(stop) + 1] and len(said[0]) < 6 and said[2] == tokens[2]
    assert result["kl_max"] >= result["kl_mean"] >= 0


def test_files_and_lines_are_prompts_in_their_order(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(RAGGED[0])
    lines = [json.dumps({"prompt": RAGGED[1], "id": 7}), "", json.dumps(RAGGED[2]), json.dumps("a\u2028b")]
    (tmp_path / "b.jsonl").write_text("\n".join(lines) + "\n")
    metrics, table = tmp_path / "m.jsonl", tmp_path / "m.csv"
    done = call(
        "run", "--backend", "numpy", "--model", model, "--prompt-file", tmp_path / "a.txt", "--prompt-file",
        tmp_path / "b.jsonl", "--max-new-tokens", 4, "--no-stop", "--no-baseline", "--eps-method", "box",
        "--eps-group-size", 8, "--eps-recent-tokens", 16, "--eps-audit-every", 2, "--metrics", metrics, "--csv", table,
    )  # fmt: skip
    assert done.returncode == 0 and re.fullmatch(PROGRESS.replace("prefill", r"\w+"), done.stderr), done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert list(result) == [*RESULT_KEYS, "sequences"]
    assert result["tokens_equal"] is result["dense"] is None
    sequences = result["sequences"]
    assert [one["prompt_tokens"] for one in sequences][:2] == [len(PROMPT), 1]
    assert [one["new_tokens"] for one in sequences] == [4] * 4 and sequences[0]["dense_tokens"] is None
    first, *steps, last = lines_of(metrics)
    assert first["prompt_tokens"] == last["prompt_tokens"] == result["prompt_tokens"]
    assert first["cache"]["max_open_groups"] == 4
    for number, one in enumerate(sequences):
        assert [step["tokens"][number] for step in steps] == one["tokens"]
        assert [step["lengths"][number] for step in steps] == [one["prompt_tokens"] + i for i in range(4)]
    # not the first step: of one token there is nothing to audit
    assert [step["audited"] for step in steps] == [False, False, True, False]
    assert len(table.read_text().splitlines()) == 5


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("", "p.jsonl has no lines"),
        ("\n \n", "p.jsonl has no lines"),
        ('{"prompt": "x"}\n{"prompt": ', "p.jsonl, line 2: no JSON in UTF-8"),
        ("[" * 100_000, "p.jsonl, line 1: no JSON in UTF-8"),
        ('{"text": "x"}', 'p.jsonl, line 1: no "prompt" that is text'),
        ('\n{"prompt": 5}', 'p.jsonl, line 2: no "prompt" that is text'),
        ("5", 'p.jsonl, line 1: no "prompt" that is text'),
        ('"x"\n\n""', "p.jsonl, line 3: the prompt is empty"),
        (
            '"x"\n"' + "x" * 600 + '"',
            r"prompt 2 of more than 512 tokens and 32 new ones exceed the model's context of 512 tokens",
        ),
        ('"\\ud800"', "half of a surrogate pair"),
    ],
    ids=lambda value: value[:20],
)
def test_a_wrong_line_is_named(model: Path, tmp_path: Path, lines: str, words: str) -> None:
    (tmp_path / "p.jsonl").write_text(lines)
    refused(["run", "--backend", "numpy", "--model", model, "--prompt-file", "p.jsonl"], tmp_path, words)


def test_a_pool_too_small_for_a_batch_says_what_it_needs(model: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, ("x" * 30, "y" * 100))))
    line = ["run", "--backend", "numpy", "--model", model, "--prompt-file", "p.jsonl", "--max-new-tokens", 4]
    words = (
        "2 sequences of 138 tokens, new ones included, need 10 pool groups of 16 tokens, and pool-tokens 140 holds 8: "
        "raise it to 160"
    )
    refused([*line, "--pool-tokens", 140], tmp_path, words)


ENDS = {"plain": "abc", "unix": "abc\n", "windows": "abc\r\n", "two": "abc\n\n"}


@pytest.mark.parametrize(("name", "left", "kept"), [("plain", 3, 3), ("unix", 3, 4), ("windows", 3, 5), ("two", 4, 5)])
def test_one_final_newline_of_a_file_is_no_part_of_the_prompt(
    name: str, left: int, kept: int, model: Path, tmp_path: Path
) -> None:
    """Editors add it; a model continues after it otherwise than after the text. --prompt and JSONL are as they are."""
    (tmp_path / "p.txt").write_bytes(ENDS[name].encode())
    (tmp_path / "p.jsonl").write_text(json.dumps(ENDS[name]) + "\n")
    run = ["run", "--model", str(model), "--backend", "numpy", "--max-new-tokens", "1"]

    def tokens(*more: str, stdin: str = "") -> int:
        return int(last(outcome([*run, *more], tmp_path, stdin))["prompt_tokens"])

    assert tokens("--prompt-file", "p.txt") == tokens("--prompt-file", "-", stdin=ENDS[name]) == left
    assert tokens("--prompt-file", "p.txt", "--keep-newline") == kept
    assert tokens("--prompt", ENDS[name]) == tokens("--prompt-file", "p.jsonl") == kept


def test_keep_newline_needs_a_file(model: Path, tmp_path: Path) -> None:
    done = outcome(["run", "--model", str(model), "--prompt", "x", "--keep-newline"], tmp_path)
    assert done.code == 2 and "--keep-newline" in done.err and "--prompt-file" in done.err
