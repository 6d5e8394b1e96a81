"""eps-proto as a user runs it: a process, its exit code, what it prints and what it leaves behind."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from command import Outcome, call, last, lines_of, outcome, process_line
from test_metrics import KEYS

from eps_core.cli import __main__ as entry
from eps_core.cli.main import cli
from eps_core.cli.options import config_of, given_flags, method_option, selection_options, summary_options
from eps_core.config.cache import METHODS
from eps_core.config.eps import EpsConfig
from eps_core.config.formats import KV_BITS
from eps_core.errors import ConfigError
from eps_core.load import BACKENDS

MODEL = "llama2-bf16-sharded"
PROMPT = "It was a dark and stormy night; the rain fell in torrents. " * 5  # 295 tokens
# where stderr is no terminal: on a slow machine, and what compiles once
PROGRESS = r"(prefill: [\d,]+ of [\d,]+ tokens[^\n]*\n|compiling CPU kernels .*\n|kernels: compiling .*\n)*"
RESULT_KEYS = [
    "backend", "device", "kernels", "kernels_fault", "model", "weights", "kv_bits", "prompt_tokens", "new_tokens",
    "text", "tokens", "tokens_equal", "bytes_ratio", "dense", "eps",
]  # fmt: skip
DENSE_KEYS = ["tokens", "decode_ms_p50", "decode_ms_p95", "tokens_per_s", "bytes_kv_read"]
EPS_KEYS = [
    "label", *DENSE_KEYS, "method", "policy", "bytes_summary_read", "kept_ratio", "rows_moved", "units_freed",
    "pages_total", "pages_visited", "pages_skipped",
    "pages_always_selected", "prepass_ms_p50", "skipped_mass_mean", "skipped_mass_bound_max",
    "skipped_mass_true_max", "audit_alarms", "extensions", "fallbacks",
]  # fmt: skip


def succeed(*args: object, **more: Any) -> dict[str, Any]:
    """The last stdout line's object of a process that must succeed and say nothing on stderr but progress."""
    done = call(*args, **more)
    assert re.fullmatch(PROGRESS, done.stderr), done.stderr
    return last(Outcome(done.returncode, done.stdout, done.stderr))


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """An environment in which neither MLX nor Torch can be imported."""
    for name in ("mlx", "torch"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('no such library')")
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


@pytest.fixture
def run(model: Path, tmp_path: Path) -> Any:
    """Runs the tiny model on numpy, in this process; flags given again replace these."""

    def start(*args: object) -> dict[str, Any]:
        line = "run", "--backend", "numpy", "--model", model, "--prompt", PROMPT, "--max-new-tokens", 4, *args
        done = outcome([*map(str, line)], tmp_path)
        assert re.fullmatch(PROGRESS, done.err), done.err
        return last(done)

    return start


def test_sparse_run_reports_both_sides(model: Path, tmp_path: Path) -> None:
    metrics, table = tmp_path / "m.jsonl", tmp_path / "m.csv"
    (tmp_path / "prompt.txt").write_text(PROMPT)
    done = call(
        "run", "--backend", "numpy", "--device", "cpu", "--model", model, "--prompt-file", tmp_path / "prompt.txt",
        "--max-new-tokens", 6, "--dtype", "float32", "--kv-dtype", "bfloat16", "--prefill-chunk", 33,
        "--pool-tokens", 512, "--no-stop", "--temperature", 0.8, "--top-p", 0.9, "--seed", 4, "--kl",
        "--metrics", metrics, "--csv", table, "--eps-method", "rq", "--eps-rq-bounds",
        "--eps-group-size", 4, "--eps-policy", "topk", "--eps-budget", 0.3, "--eps-sink-tokens", 4,
        "--eps-recent-tokens", 8, "--eps-scope", "union", "--eps-seed", 3, "--eps-min-context", 10, "--block-size", 8,
    )  # fmt: skip
    assert done.returncode == 0 and re.fullmatch(PROGRESS, done.stderr), done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert list(result) == [*RESULT_KEYS, "kl_mean", "kl_max", "top1_agreement"]
    assert list(result["dense"]) == DENSE_KEYS and list(result["eps"]) == EPS_KEYS
    dense, eps = result["dense"], result["eps"]
    assert result["backend"] == "numpy" and result["device"] == "cpu" and result["model"] == str(model)
    assert result["prompt_tokens"] == len(PROMPT) and result["new_tokens"] == 6
    assert result["tokens"] == eps["tokens"] and len(dense["tokens"]) == 6
    assert result["tokens_equal"] == (eps["tokens"] == dense["tokens"])
    assert eps["method"] == "rq" and eps["policy"] == "topk"
    assert eps["pages_total"] == eps["pages_visited"] + eps["pages_skipped"] and eps["pages_skipped"] > 0
    # dense reads lengths 295..300 of 2 layers, 2 kv heads of 16, K and V in bfloat16
    dense_bytes = sum(range(295, 301)) * 2 * 2 * 64
    assert dense["bytes_kv_read"] == dense_bytes
    assert result["bytes_ratio"] == pytest.approx((eps["bytes_kv_read"] + eps["bytes_summary_read"]) / dense_bytes)
    assert 0 <= result["kl_mean"] <= result["kl_max"] and 0 <= result["top1_agreement"] <= 1
    for row in ("tokens equal to dense", "kl mean", "visited", "pre-pass ms", "decode ms"):
        assert row in done.stdout

    first, *steps, last = lines_of(metrics)
    config = EpsConfig.of(
        method="rq", rq_bounds=True, group_size=4, budget=0.3, num_sink_tokens=4, num_recent_tokens=8, scope="union",
        seed=3, min_context=10, block_size=8,
    )  # fmt: skip
    assert first["type"] == "run" and EpsConfig.of(**first["config"]) == config
    assert first["cache"]["dtype"] == "bfloat16" and first["cache"]["num_units"] == 512 // 64
    assert first["dtype"] == "float32"
    assert first["sampling"] == {"temperature": 0.8, "top_p": 0.9, "seed": 4, "by": "gumbel"}
    assert {"eps", "numpy", "python"} <= set(first["versions"]) and "git_commit" in first
    assert [step["step"] for step in steps] == list(range(6))
    for step in steps:
        assert list(step) == KEYS
        assert step["pages_total"] == step["pages_visited"] + step["pages_skipped"]
        assert step["pages_visited"] >= step["pages_always_selected"] > 0
        assert step["bytes_kv_dense"] == step["lengths"][0] * 2 * 2 * 64
        assert step["eps_prepass_ms"] + step["attention_ms"] <= step["decode_ms"]
        assert 0 <= step["skipped_mass_mean"] <= 1
        # its bounds bound, nothing is audited
        assert 0 < step["skipped_mass_bound_max"] <= 1 and step["output_error_bound"] > 0
        assert step["skipped_mass_true_max"] is None and not step["audited"] and step["extensions"] == 0
    assert [step["tokens"][0] for step in steps] == eps["tokens"]
    assert last["type"] == "summary" and last["tokens_equal"] == result["tokens_equal"]
    assert sum(step["pages_visited"] for step in steps) == last["pages_visited"] == eps["pages_visited"]
    ratios = last["selected_ratio_by_layer_and_head"]
    assert len(ratios) == 2 and all(len(row) == 2 and all(0 < ratio < 1 for ratio in row) for row in ratios)
    assert last["dense"]["decode_ms_p50"] == dense["decode_ms_p50"] and last["kl_mean"] == result["kl_mean"]
    with open(table, newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == KEYS[1:]
    assert [int(row["bytes_kv_read_est"]) for row in rows] == [step["bytes_kv_read_est"] for step in steps]
    assert {path.name for path in tmp_path.iterdir()} == {"prompt.txt", "m.jsonl", "m.csv"}


@pytest.mark.parametrize("method", METHODS[1:])
def test_every_method_runs(run: Any, method: str) -> None:
    result = run("--eps-method", method, "--no-baseline", "--eps-recent-tokens", 16, "--eps-budget", 0.1)
    assert result["dense"] is None and result["tokens_equal"] is None and result["eps"]["method"] == method
    assert result["eps"]["bytes_summary_read"] > 0


def test_reading_everything_says_what_dense_says(run: Any) -> None:
    result = run("--eps-method", "rq", "--eps-budget", 1, "--kl")
    assert result["tokens_equal"] and result["kl_max"] < 1e-6 and result["top1_agreement"] == 1


def test_off_is_a_run_without_eps(run: Any, tmp_path: Path) -> None:
    """Same tokens and bytes as a run with no flag, as the baseline of a sparse run, and as rollback with flags left."""
    plain = run("--metrics", tmp_path / "m.jsonl")
    off = run("--eps-method", "off", "--eps-budget", 0.3, "--eps-mean-tokens", 32)
    sparse = run("--eps-method", "rq")
    assert plain["eps"] is None and plain["bytes_ratio"] is None and off["eps"] is None
    for other in (off, sparse):
        assert other["dense"]["tokens"] == plain["dense"]["tokens"] == plain["tokens"]
        assert other["dense"]["bytes_kv_read"] == plain["dense"]["bytes_kv_read"]
    first, *steps, last = lines_of(tmp_path / "m.jsonl")
    assert first["config"]["method"] == "off" and last["dense"] is None
    assert all(step["bytes_summary_read"] == 0 == step["pages_skipped"] for step in steps)


def test_the_demo_answers_its_needle_with_eps_on() -> None:
    done = call("run", "--backend", "cuda", "--device", "cpu", "--max-new-tokens", 6)
    result = last(Outcome(done.returncode, done.stdout, done.stderr))
    answer = re.search(r"needle document whose answer is (\d{5})", done.stdout)
    assert answer is not None and result["text"].startswith(answer[1])
    assert result["model"] == "demo" and result["prompt_tokens"] == 4096
    assert result["eps"]["method"] == "rq" and result["eps"]["policy"] == "topk" and result["bytes_ratio"] < 0.3
    assert re.search(r"needle answered +yes +yes", done.stdout) and "the demo's default" in done.stdout
    # what EPS is for, in the same table
    assert result["layer"]["context"] == 32768 and result["layer"]["bytes_ratio"] < 0.15
    times = f"{result['layer']['best_dense_ms']:.2f} +{result['layer']['step_ms']:.2f}"
    assert re.search(rf"8B model's layer, rq, 32,768 tokens: ms +{times}\n", done.stdout)
    assert "(warm-up left out: 2 steps)" in done.stdout


@pytest.mark.parametrize("fault", [ConfigError("needs 3 GiB"), MemoryError(), RuntimeError("no such kernel")], ids=repr)
def test_a_demo_whose_last_figure_fails_is_whole(
    fault: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(*_: object) -> None:
        raise fault

    monkeypatch.setattr("eps_core.bench.layer.Bench", fails)
    flags = ["--backend", "cuda", "--device", "cpu", "--max-new-tokens", "1", "--metrics", str(tmp_path / "m")]
    done = CliRunner().invoke(cli, ["run", *flags])
    assert done.exit_code == 0 and "tokens equal to dense" in done.stdout
    assert "layer" not in json.loads(done.stdout.splitlines()[-1])
    assert "needle answered" not in done.stdout  # of whose 5 digits one was asked for
    assert re.search(r"no figure of an 8B model's layer \([^\n]+\)\n", done.stderr)
    assert lines_of(tmp_path / "m")[-1]["type"] == "summary"


def test_info_counts_memory_within_the_limits() -> None:
    info = succeed("info")
    sizes = {"layers": 32, "kv_heads": 32, "head_dim": 128, "context": 65536}
    assert info["shape"] == {**sizes, "kv_bytes": 2**35, "kv_bits": [16, 16]}
    coarse = {row["method"]: row for row in info["summaries"] if row["kind"] == "coarse"}
    assert list(coarse) == [method for method in METHODS[1:] if method != "rq"]
    assert {row["group_size"] for row in coarse.values()} == {128}
    assert all(row["summary_mib"] <= 150 for row in coarse.values())
    assert coarse["jl"]["summary_mib"] == 72 and coarse["moments"]["summary_mib"] == 136
    fine = [row for row in info["summaries"] if row["kind"] == "fine"]
    plain = next(row for row in fine if row["method"] == "rq" and not (row["rq_bounds"] or row["bound_bits"]))
    # two bits, each 16 bytes and a scale of one; of 64 tokens the mean key in 8 bits
    assert plain["bytes_per_group"] == 34 + 130 / 64 and plain["group_size"] == 1
    assert plain["share_of_kv"] == (34 + 130 / 64) / 512
    bounded = next(row for row in fine if row["method"] == "rq" and row["rq_bounds"])
    assert bounded["bytes_per_group"] == 34 + 130 / 64 + 3 * 2
    # K in a byte a number, V in half of one, a scale of two bytes each
    coded = succeed("info", "--kv-bits", "8,4")
    assert coded["shape"]["kv_bytes"] == 32 * 32 * 65536 * (128 + 2 + 64 + 2)
    shares = [one["summaries"][0]["share_of_kv"] for one in (info, coded)]
    assert shares[1] == pytest.approx(shares[0] * 512 / 196)
    kept = {(tuple(row["kv_bits"]), row["kept_share"]): row for row in coded["kept"]}
    assert {bits for bits, _ in kept} == {(one, one) for one in KV_BITS} | {(8, 4)}
    assert kept[(8, 4), 0.5]["kv_bytes"] == coded["shape"]["kv_bytes"] / 2
    assert kept[(4, 4), 1.0]["summary_bytes"] == plain["summary_bytes"]
    assert {"box", "rq"} <= {row["method"] for row in fine} and all(row["group_size"] <= 16 for row in fine)
    assert list(info["backends"]) == list(BACKENDS)
    assert all(status["usable"] and "cpu" in status["devices"] for status in info["backends"].values())


def test_info_takes_shape_and_flags(model: Path, bare: dict[str, str]) -> None:
    info = succeed(
        "info", "--layers", 2, "--kv-heads", 3, "--head-dim", 64, "--context", 1024, "--eps-dim", 4,
        "--eps-group-size", 8, "--block-size", 32, env=bare,
    )  # fmt: skip
    rows = {(row["kind"], row["method"], row["rq_bounds"]): row for row in info["summaries"] if not row["bound_bits"]}
    assert rows["coarse", "jl", False]["group_size"] == 256 and rows["coarse", "jl", False]["bytes_per_group"] == 40
    rq = rows["fine", "rq", False]
    assert rq["group_size"] == 8 and rq["bytes_per_group"] == 26.25
    assert rq["summary_bytes"] == 2 * 3 * 128 * 26.25
    keys = next(row for row in info["summaries"] if row["bound_bits"])  # a code and four fp16 scalars of each
    assert keys["bytes_per_group"] == rq["bytes_per_group"] + 8 * (64 + 4 * 2)
    assert keys["summary_bytes"] == rq["summary_bytes"] + 2 * 3 * 1024 * (64 + 4 * 2)
    assert rows["fine", "rq", True]["bytes_per_group"] == 32.25
    assert next(row for row in info["kept"] if row["kept_share"] == 1)["summary_bytes"] == rq["summary_bytes"]
    blocks = succeed("info", "--model", model, "--eps-group-blocks", 4, env=bare)
    assert blocks["shape"]["layers"] == 2 and blocks["shape"]["context"] == 512
    assert {row["group_size"] for row in blocks["summaries"] if row["kind"] == "coarse"} == {64}


def test_a_backend_that_does_not_import_is_named_with_its_mend(bare: dict[str, str]) -> None:
    done = call("info", env=bare)
    backends = last(Outcome(done.returncode, done.stdout, done.stderr))["backends"]
    assert backends["numpy"]["usable"] and not backends["mlx"]["usable"] and not backends["cuda"]["usable"]
    assert "pip install" in backends["mlx"]["why_not"] and backends["mlx"]["why_not"] in done.stdout
    done = call("run", "--backend", "mlx", "--prompt", "x", env=bare)
    assert done.returncode == 2 and re.fullmatch(r"error: backend mlx cannot be loaded .*\n", done.stderr)


LONG = 400  # tokens: seconds, in which a busy machine must let two processes go on in turn


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=lambda how: how.name)
def test_a_killed_run_leaves_whole_lines_only(model: Path, tmp_path: Path, how: signal.Signals) -> None:
    metrics = tmp_path / "m.jsonl"
    args = process_line(
        "run", "--backend", "numpy", "--model", model, "--prompt", PROMPT[:60], "--max-new-tokens", LONG, "--no-stop",
        "--no-baseline", "--eps-method", "rq", "--metrics", metrics, "--csv", tmp_path / "m.csv",
    )  # fmt: skip
    process = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 300
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 5):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(how)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == (130 if how == signal.SIGINT else -how)
    assert b"Traceback" not in errors
    first, *steps = lines_of(metrics)
    assert first["type"] == "run" and len(steps) >= 4
    assert [step["step"] for step in steps] == list(range(len(steps))) and len(steps) < LONG
    # a kill leaves the locks, empty: test_outputs says what becomes of them
    left = {path.name for path in tmp_path.iterdir() if how == signal.SIGINT or path.stat().st_size}
    assert left == {"m.jsonl"}


@pytest.mark.parametrize("args", [["info"], ["run", "--prompt", "x", "--max-new-tokens", 3]], ids=["info", "run"])
def test_a_reader_that_has_gone_is_no_error(args: list, bare: dict[str, str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(process_line(*args), stdout=writer, stderr=subprocess.PIPE, timeout=300, env=bare)
    os.close(writer)
    assert done.returncode != 0 and done.stderr == b""


def test_help_and_version() -> None:
    for args in (["--help"], ["info", "-h"], ["--version"]):
        done = call(*args)
        assert done.returncode == 0 and done.stdout and done.stderr == ""
        if args == ["--help"]:
            listed = re.findall(r"^  (\w+) +\w", done.stdout.partition("Commands:")[2], re.MULTILINE)
            assert listed == sorted("run balance bench info capture replay calibrate evaluate report serve".split())


@click.command()
@click.option("--model", type=Path)
@method_option("off")
@selection_options
@summary_options
@click.pass_context
def configured(ctx: click.Context, /, **flags: Any) -> EpsConfig:
    return config_of(flags, given_flags(ctx, flags))


FINE, WIDE = {"num_sink_tokens": 4, "num_recent_tokens": 8}, {"num_sink_tokens": 16, "num_recent_tokens": 128}
TOPK = {"policy": "topk", "budget": 0.1}
CODES = {"mean_tokens": 64, "cascade": [0.5], "rescore": 0.125}


@pytest.mark.parametrize(
    ("flags", "want"),
    [
        ("", {"method": "rq", "group_size": 1, "budget_floor": 1024, **CODES, **TOPK, **FINE}),
        ("--eps-mean-tokens 64 --eps-cascade 0.5,0.2", {"mean_tokens": 64, "cascade": [0.5, 0.2], "rescore": 0.125}),
        ("--eps-cascade 0", {"mean_tokens": 64, "cascade": []}),
        ("--eps-budget 0.2", {"policy": "topk", "budget": 0.2, **FINE}),
        ("--eps-top-pages 7", {"policy": "topk", "top_pages": 7, **FINE}),
        ("--eps-policy threshold --eps-top-pages 7", {"policy": "threshold", "top_pages": 7}),
        ("--eps-method box", {"policy": "topk", "budget": 0.1, "rescore": 0, **WIDE}),
        ("--eps-method jl --eps-rescore 0", {"policy": "topk", "rescore": 0, **WIDE}),
        ("--eps-recent-tokens 64", {"num_sink_tokens": 4, "num_recent_tokens": 64}),
        ("--eps-sink-tokens 8 --eps-recent-tokens 16", {"num_sink_tokens": 8, "num_recent_tokens": 16}),
        ("--eps-policy threshold --eps-top-pages 5 --eps-alpha 1.05", {"policy": "threshold", "alpha": 1.05}),
        ("--eps-budget 64", {"budget": 64.0}),
        (
            "--eps-method box --eps-group-blocks 2 --eps-first-n 2 --eps-last-n 3",
            {"num_sink_tokens": 64, "num_recent_tokens": 96},
        ),
        ("--eps-method jl --eps-dim 3 --eps-group-size 16", {"method": "jl", "dim": 3}),
        ("--eps-last-n 3", {"num_sink_tokens": 4, "num_recent_tokens": 3}),
        ("--eps-rescore 0", {"rescore": 0}),
        ("--eps-rescore 1", {"rescore": 1, "cascade": [1]}),
        ("--eps-bound-bits 4 --eps-strict", {"bound_bits": 4, "strict": True, "epsilon": 0.01, **TOPK}),
        ("--eps-method moments --eps-strict --eps-epsilon 0.2", {"strict": True, "epsilon": 0.2, "policy": "topk"}),
    ],
    ids=lambda value: value or "default" if isinstance(value, str) else "",
)
def test_defaults_follow_the_method(flags: str, want: dict) -> None:
    config = configured.main(flags.split(), standalone_mode=False)
    assert want.items() <= config.to_dict().items()
    assert EpsConfig.of(**json.loads(json.dumps(config.to_dict()))) == config


def test_the_command_line_loads_no_array_library_but_numpy() -> None:
    code = "import sys, eps_core.cli.main; assert not {'torch', 'mlx', 'mlx.core'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_ctrl_c_while_modules_are_imported_is_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupts:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "eps_core.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "eps_core.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupts(), *sys.meta_path])
    with pytest.raises(SystemExit) as end:
        entry.main()
    assert end.value.code == 130
