"""What `eps-proto run` says of what ran: the names of its columns, the error of codes, and where EPS does not pay."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from command import Outcome, last, outcome

from eps_core.config.eps import EpsConfig
from eps_core.decode.cost import Cost, pays_from
from eps_core.evaluation import pays
from eps_core.evaluation.codes_error import MOST_KL
from eps_core.evaluation.pays import slower_note

MODEL = "llama2"
PROMPT = "It was a dark and stormy night; the rain fell in torrents. " * 5
LINE = ("run", "--backend", "cuda", "--device", "cpu", "--kernels", "arrays", "--no-stop", "--max-new-tokens", "5")


def ran(model: Path, folder: Path, *more: str) -> Outcome:
    done = outcome([*LINE, "--model", str(model), "--prompt", PROMPT, *more], folder)
    assert done.code in (None, 0), done.err
    return done


def columns(done: Outcome) -> list[str]:
    """The table's header."""
    lines = done.out.splitlines()
    (rule,) = [index for index, line in enumerate(lines) if re.fullmatch(r"-[- ]+", line)]
    return re.split(r" {2,}", lines[rule - 1].strip())


BOX = ("--method", "box", "--eps-budget", "0.3")


@pytest.mark.parametrize(
    ("more", "label"),
    [
        ((*BOX,), "EPS"),
        (("--kv-evict", "snapkv", "--kv-keep", "0.5"), "snapkv"),
        (("--kv-evict", "tova", "--kv-keep", "0.5", *BOX), "EPS + tova"),
        (("--kv-bits", "8,4"), "dense, K int8, V int4"),
        (("--kv-bits", "8", *BOX), "EPS, int8"),
        (("--kv-bits", "8", "--kv-evict", "snapkv", "--kv-keep", "0.5"), "snapkv, int8"),
    ],
)
def test_the_columns_and_the_text_are_named_for_what_runs(
    more: tuple[str, ...], label: str, model: Path, tmp_path: Path
) -> None:
    done = ran(model, tmp_path, *more)
    assert columns(done) == ["dense", label]
    shown = [line.split(" > ")[0].strip() for line in done.out.splitlines() if " > " in line]
    assert shown == ["dense", label.lower()]
    assert last(done)["eps"]["label"] == label
    assert columns(ran(model, tmp_path, *more, "--no-baseline")) == [label]


# ------------------------------------------------------------------------------------------------- K and V as codes


@pytest.mark.parametrize("more", [(), BOX], ids=["off", "box"])
def test_codes_are_compared_with_the_models_own_dense_run(more: tuple[str, ...], model: Path, tmp_path: Path) -> None:
    plain = last(ran(model, tmp_path))
    done = ran(model, tmp_path, "--kv-bits", "4", "--kl", "--metrics", "m.jsonl", *more)
    found = last(done)
    assert (
        found["dense"]["tokens"] == plain["tokens"]
        and found["dense"]["bytes_kv_read"] == plain["dense"]["bytes_kv_read"]
    )
    read = found["eps"]["bytes_kv_read"] + found["eps"]["bytes_summary_read"]
    assert found["bytes_ratio"] == pytest.approx(read / found["dense"]["bytes_kv_read"]) and found["bytes_ratio"] < 0.4
    assert found["kl_mean"] > 0 and found["tokens_equal"] == (found["tokens"] == plain["tokens"])
    summary = json.loads((tmp_path / "m.jsonl").read_text().splitlines()[-1])
    assert summary["bytes_ratio"] == found["bytes_ratio"] and summary["dense"]["bytes_ratio"] == 1
    assert re.search(r"^bytes against dense +1\.0000 +0\.\d{4}$", done.out, re.M)


def test_verified_text_over_codes_is_compared_with_the_dense_run_over_them(model: Path, tmp_path: Path) -> None:
    done = ran(model, tmp_path, "--kv-bits", "4", *BOX, "--eps-verify", "tokens")
    assert columns(done) == ["dense, int4", "EPS, int4"] and last(done)["tokens_equal"]
    assert "codes   int4: KL " in done.out
    assert re.search(r"ms a token, p50 / p95 \(warm-up left out: 2 steps, \d rounds\)", done.out)


def test_stored_prompts_are_of_the_side_with_codes(model: Path, tmp_path: Path) -> None:
    line = ("--kv-bits", "8", "--cache-dir", "kept")
    first, second = (last(ran(model, tmp_path, *line)) for _ in range(2))
    assert first["stored"]["eps"]["tokens_loaded"] == 0 < second["stored"]["eps"]["tokens_loaded"]
    assert "dense" not in second["stored"] and first["tokens"] == second["tokens"]


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 whose keys have a few dimensions that are large in every token, as real ones do."""
    return tiny_models.save_model("qwen2-tied", tmp_path_factory.mktemp("biased"), change=_bias)


def _bias(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data[::8] += 40.0
        layer.self_attn.q_proj.weight.data *= 12.0


def test_codes_that_move_the_text_are_warned_of_with_a_measured_error(
    biased: Path, model: Path, tmp_path: Path
) -> None:
    done = ran(biased, tmp_path, "--kv-bits", "4")
    (line,) = [one for one in done.out.splitlines() if one.startswith("codes")]
    measured = float(re.search(r"warning: int4: KL ([\d.]+) from the model's own dense", line)[1])  # type: ignore[index]
    assert measured > MOST_KL and last(done)["kv_bits_kl"] == pytest.approx(measured, abs=1e-4)
    assert re.search(r", above 0\.05: (use --kv-bits 8,4 \(KL 0\.0\d+\)|leave --kv-bits out)$", line), line
    calm = ran(model, tmp_path, "--kv-bits", "8")
    assert "codes   int8: KL 0.0" in calm.out and "warning" not in calm.out
    assert "codes" not in ran(model, tmp_path).out and "kv_bits_kl" not in last(ran(model, tmp_path))


# --------------------------------------------------------------------------------------------- where EPS does not pay


def summary(tokens_per_s: float | None, **more: Any) -> dict[str, Any]:
    return {"tokens_per_s": tokens_per_s, "steps": 10, "warm_up_steps": 2, **more}


def note(eps: dict[str, Any], pays: Any = None, label: str = "EPS", context: int = 800) -> str | None:
    return slower_note(label, context, summary(10.0), eps, pays)


def test_one_line_says_that_eps_does_not_pay_here_and_from_where_it_does() -> None:
    assert note(summary(10.1)) is note(summary(9.9)) is note(summary(None)) is None
    here = "EPS is slower than dense here, 8.0 tokens a second against 10.0 at 800 tokens, and does not pay"
    assert note(summary(8.0), lambda: 4096) == (
        f"{here}: it pays from about 4,096 tokens on (estimated from one layer's times): use longer contexts, or "
        "--eps-min-context 4096"
    )
    assert note(summary(8.0), lambda: 700) == (
        f"{here}: one layer alone pays from about 700 tokens on, the rest of a step costs more than that saves: use "
        "longer contexts"
    )
    assert (
        note(summary(8.0), lambda: None)
        == f"{here}: it pays at no context that this model holds (estimated from one layer's times): use --method off"
    )
    assert note(summary(8.0)) == (
        f"{here}: array operations are for checks, and their times say nothing: use --backend auto --kernels auto"
    )
    assert note(summary(8.0, steps=9)) is None  # too few to tell
    assert note(summary(8.0, pages_skipped=0)) is None  # all that it did was dense
    assert note(summary(8.0, pages_skipped=0), label="snapkv") is not None
    assert note(summary(8.0), label="snapkv").startswith("snapkv is slower than dense here")  # type: ignore[union-attr]
    saves = "here, 8.0 tokens a second against 10.0 at 800 tokens: what it saves is memory"
    for label, skipped in (("EPS + snapkv", 0), ("EPS + snapkv", 9), ("EPS, int8", 0)):
        assert note(summary(8.0, pages_skipped=skipped), lambda: 4096, label).endswith(saves)  # type: ignore[union-attr]
    assert note(summary(8.0, rounds=10, steps=0, tokens_per_round=2.0), lambda: 4096) == (
        f"{here}: a round gives 2.0 tokens and must give more than 2.5: use --eps-draft auto, which drafts "
        "where it pays"
    )


@pytest.mark.parametrize("backend", ["numpy", "cuda"])
@pytest.mark.parametrize("most", [500, 513])  # the model holds 512
def test_a_run_that_is_slower_says_so(
    backend: str, most: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pays, "NOISE", -1e9)  # whatever this machine's times are
    monkeypatch.setattr(pays, "cost_of", lambda *args: (Cost((256, 512), (1.0, 3.0), (2.0, 2.0)), True))
    monkeypatch.setattr(pays, "pays_from", lambda *args: most)
    long = ("--max-new-tokens", "10", "--backend", backend)
    rq = (*long, "--method", "rq", "--eps-budget", "0.2", "--eps-budget-floor", "0")
    wanted = "it pays from about 500 tokens on" if most == 500 else "it pays at no context that this model holds"
    wanted = "say nothing:" if backend == "numpy" else wanted
    kernels = () if backend == "numpy" else ("--kernels", "auto")
    (line,) = [one for one in ran(model, tmp_path, *rq, *kernels).out.splitlines() if "does not pay" in one]
    assert line.startswith("note    EPS is slower than dense here") and wanted in line
    assert "slower" not in ran(model, tmp_path, *rq, *kernels, "--max-new-tokens", "9").out  # 7 timed steps
    assert "does not pay" not in ran(model, tmp_path, *long).out
    assert "does not pay" not in ran(model, tmp_path, *rq, "--no-baseline").out


def test_a_budget_that_covers_what_is_kept_is_said_before_it_runs(model: Path, tmp_path: Path) -> None:
    box = ("--method", "box", "--eps-budget", "200")
    said = "every step is dense: the budget covers all of up to {} tokens"
    few, many = (("--kv-evict", "snapkv", "--kv-keep", str(rows)) for rows in (150, 250))
    assert said.format(155) in ran(model, tmp_path, *box, *few).out
    for more in ((), many, ("--kv-evict", "adakv", "--kv-keep", "150")):  # the last divides unevenly
        assert "every step is dense" not in ran(model, tmp_path, *box, *more).out


@pytest.mark.parametrize(
    ("settings", "least"),
    [
        ({}, 1025),  # rq reads at least 1,024 tokens
        ({"budget": 0.05}, 13),  # its sink and recent tokens
        ({"budget": 1.0}, None),
        ({"budget": 2048.0}, 2049),
        ({"budget": 0.05, "min_context": 4000}, 4000),
        ({"top_pages": 100}, 101),
        ({"policy": "threshold", "top_pages": 100}, 13),
    ],
)
def test_below_its_floor_a_method_reads_everything(settings: dict[str, Any], least: int | None) -> None:
    config = EpsConfig.of(method="rq", **settings)
    assert config.sparse_from == least
    for length in (20, 200, 1024, 1030, 2048, 5000):
        assert config.reads_all(0, [length]) == (least is None or length < least)
    cost = Cost((256, 512), (1.0, 3.0), (2.0, 2.0))
    assert pays_from(config, cost) == (None if least is None else max(least, 512))
