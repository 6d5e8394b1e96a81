"""The tables of results/ are those that its raw rows give, and what is kept there is small and of no machine."""

import gzip
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import shared
import speed_tables
import tables

from eps_core.errors import ConfigError
from experiments.real import answers
from experiments.real import run as real

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"


def blocks() -> list[tuple[Path, str, str]]:
    """Return (page, command, table) of every table in results/."""
    pages = sorted(RESULTS.glob("*.md"))
    return [(page, *found) for page in pages for found in tables.BLOCK.findall(page.read_text())]


@pytest.mark.parametrize(("page", "command", "table"), [pytest.param(*one, id=one[1]) for one in blocks()])
def test_the_published_tables_are_those_of_the_raw_rows(page: Path, command: str, table: str) -> None:
    assert tables.printed(command) == table


def test_every_table_of_measured_rows_is_published() -> None:
    published = {command for _, command, _ in blocks()}
    names = {f"experiments/real/run.py --tables {name} -o results/real.jsonl.gz" for name in real.TABLES}
    names.remove("experiments/real/run.py --tables weights -o results/real.jsonl.gz")
    names |= {
        "experiments/real/run.py --tables weights -o results/real-weights.jsonl",
        "race.py --table -o results/race.jsonl",
        "race.py --table -o results/prompts.jsonl",
        "experiments/soak/run.py --table -o results/soak.jsonl",
        "experiments/lm_eval/served.py --table -o results/lm_eval.jsonl",
        "experiments/gpu_model/run.py --rows results/gpu/times-at-once.jsonl",
        "experiments/gpu_model/run.py --rows results/gpu/times-at-once.jsonl --fused",
        "experiments/gpu_model/run.py --rows results/gpu/times-at-once.jsonl --fused --kernels H200",
        "experiments/gpu_model/run.py --rows results/gpu/times-at-once.jsonl --fused --share 0.1",
        "experiments/gpu_model/run.py --rows results/gpu/times-at-once.jsonl --fused --share 0.1 --limit",
    }
    names |= {f"experiments/real/answers.py --tables {name} -o results/real-answers.jsonl" for name in answers.TABLES}
    names |= {f"speed_tables.py results {name}" for name in speed_tables.TABLES}
    assert names == published and sum(table.count("\n|") for _, _, table in blocks()) > 150


def test_a_gpu_table_is_of_the_cells_that_all_files_have(tmp_path: Path) -> None:
    folder = shutil.copytree(RESULTS / "gpu", tmp_path / "gpu")
    lines = (folder / "times.jsonl").read_text().splitlines(keepends=True)
    (folder / "times.jsonl").write_text("".join(lines[:2]))
    assert speed_tables.gpu_table(tmp_path).count("\n") == 2 < speed_tables.gpu_table(RESULTS).count("\n")
    (folder / "times-at-once.jsonl").write_text("".join(lines[:1]))
    assert speed_tables.gpu_kernels_table(tmp_path).count("\n") == 2  # the gaps of no cell
    (folder / "times-first.jsonl").unlink()
    line = [sys.executable, ROOT / "scripts" / "speed_tables.py", tmp_path, "gpu"]
    said = subprocess.run(line, capture_output=True, text=True, check=True)
    assert said.stdout == "Not measured with the current default (`scripts/gpu_check.sh`).\n"


def test_a_table_that_differs_is_found_and_remade(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "results").mkdir()
    shutil.copy(RESULTS / "real-answers.jsonl", tmp_path / "results")
    page, block = (
        tmp_path / "results" / "README.md",
        "<!-- experiments/real/answers.py --tables -o results/real-answers.jsonl -->",
    )
    page.write_text(f"# Before\n\n{block}\nold\n<!-- end -->\n\nAfter.\n")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    for flags, code in ((["--check"], 1), ([], 0), (["--check"], 0)):
        monkeypatch.setattr(sys, "argv", ["tables.py", *flags])
        assert tables.main() == code
    text = page.read_text()
    assert text.startswith(f"# Before\n\n{block}\n| model |") and text.endswith("|\n<!-- end -->\n\nAfter.\n")
    assert "out of date: README.md" in capsys.readouterr().out


def row(kind: str, kl: list[float], **values: object) -> dict:
    row = {"model": "m", "context_tokens": 4096, "document": 0, "kind": kind, "method": "EPS", "budget": 0.1}
    return real.stored({**row, "bytes": 0.2, "kl": kl, "agree": [step < 0.1 for step in kl], **values})


def test_tables_of_real_models_by_hand() -> None:
    """Two points of a curve in log-log, a bound over a value, an FP8 cache's KL, means by kind of text."""
    rows = [
        row("code", [0.02, 0.02], budget=0.1, bytes=0.1),
        row("code", [0.005, 0.005], budget=0.2, bytes=0.2),
        row("code", [0.001, 0.001], method="oracle", budget=0.1, bytes=0.1),
        row("code", [0.02, 0.02], method="UNIQUE", budget=0.3, bytes=0.4),
        row("code", [0.004, 0.006], method="FP8", budget=1.0, bytes=0.5),
        row("code", [0.0, 0.01], method="EPS default", budget=None),
        row("chat", [0.0, 0.2], method="EPS default", budget=None, document=3),
    ]
    assert real.crossing(rows[:2]) == (pytest.approx(0.1 * 2**0.5), "measured")
    assert real.crossing(rows[:2], by="budget") == (pytest.approx(0.1 * 2**0.5), "measured")
    cells = real.by_cell(rows)
    assert "| UNIQUE | > 0.400 |" in real.peers_table(cells) and "| Quest | - |" in real.peers_table(cells)
    claims = real.claims_table(cells)
    assert "| bytes over UNIQUE's | 0.23 | at most 0.5 | < 0.354 |" in claims
    assert "| tokens over the oracle's | - | at most 1.5 | > 1.414 |" in claims
    assert "| default: mean KL | 0.005 | at most 0.01 | 0.0525 |" in claims
    assert "| default: largest KL of a step | - | at most 1 | 0.200 |" in claims
    assert "| default: top-1 agreement | - | at least 0.97 | 0.750 |" in claims
    beside = "| m | 4,096 | 0.500, 0.200 | 0.0050, 0.0525 | 0.006, 0.194 | 1.000, 0.750 | 0.200 |"
    assert beside in real.fp8_table(cells)
    default = "| m | 4,096 | 2 x 2 | 0.200 | 0.0525 | 0.0050 | - | 0.1000 | 0.194 | 0.200 | 0.750 |"
    assert default in real.default_table(cells)
    short = [row("code", [0.0], method="EPS default", bytes=1.0, context_tokens=context) for context in (40, 700)]
    assert "| m | 40 to 700 | 2 x 1 | 1.000 | 0.0000 |" in real.default_table(real.by_cell(short))
    small = [row("code", [0.0, 0.01], method="8bit", bytes=0.5), row("code", [0.0, 0.03], method="8bit, EPS default")]
    line = "| m | 4,096 | 8bit | 1 x 2 | 0.500 | 0.0050 | 0.010 | 1.000 | 0.0150 |"
    assert line in real.weights_table(real.by_cell(small))
    assert real.over((0.1, "<"), (0.2, "<")) == (None, "-"), "bounds that contradict each other"


def test_look_ups_and_verified_texts_by_hand() -> None:
    cell = {"model": "m", "context_tokens": 4096}
    asked = {"type": "lookups", **cell, "dense": [True, True, False, False], "eps": [True, False, True, False]}
    assert "| m | 4,096 | 1 | 2 of 4 (0.15 to 0.85) | 2 of 4 (0.15 to 0.85) | 1 | 1 |" in answers.lookups_table([asked])
    said = {"type": "verified", **cell, "temperature": 0.8, "draft_budget": None, "steps": 48, "tokens_per_round": 8}
    rows = [{**said, "bytes_ratio": 0.1 * n, "acceptance": 0.4 * n, "equal": n == 1} for n in (1, 2)]
    rows.append({**rows[0], "draft_budget": 0.1, "acceptance": 1.0})
    line = "| m | 4,096 | 0.8 | 2 x 48 | 0.150 | 0.600 | 8.0 | 1 of 2 |"
    assert line in answers.verified_table([asked, *rows])


def test_tables_of_an_absent_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rows\.jsonl is absent: measure first"):
        shared.rows_of(tmp_path / "rows.jsonl", "row")


def test_rows_that_are_packed_are_those_of_the_file(tmp_path: Path) -> None:
    plain, packed = RESULTS / "real-weights.jsonl", tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert shared.rows_of(packed, "row") == shared.rows_of(plain, "row") != []


def test_raw_rows_name_no_place_of_the_machine_that_made_them() -> None:
    files = [path for path in RESULTS.iterdir() if path.suffix in (".gz", ".json", ".jsonl", ".md")]
    assert len(files) > 5
    for path in files:
        assert not re.search(r"(?<![\w./])(~|/(root|home|tmp|work|Users|mnt))/", shared.text_of(path)), path


def test_the_bounds_that_are_published_were_checked() -> None:
    found = json.loads((RESULTS / "bounds.json").read_text())
    assert found["checks"] >= 10**7 and found["violations"] == 0
    text = (RESULTS / "README.md").read_text()
    assert f"**{found['checks']:,} checks, 0 violations**" in text and f"commit `{found['git_commit'][:7]}`" in text


def test_results_are_small_and_of_one_generation() -> None:
    """Tables on models that were trained here, of former defaults, stay in the history."""
    listed = subprocess.run(["git", "ls-files", "results"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in listed.stdout.splitlines()]
    assert sum(path.stat().st_size for path in files) <= 4 << 20
    assert not [path for path in files if path.suffix == ".safetensors"]
    assert len((RESULTS / "README.md").read_text().splitlines()) <= 200
