"""A page that holds every section whatever the results lack."""

import json
import re
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from command import last, outcome, refused

from eps_core.errors import ConfigError
from eps_core.report import cells, figures
from eps_core.report.cells import variant_name
from eps_core.report.kinds import clean
from eps_core.report.load import Results, load_results
from eps_core.report.page import page
from eps_core.report.style import PAGE_DARK, PAGE_LIGHT, PALETTE

ROOT = Path(__file__).parent.parent
SECTIONS = ("quality", "tasks", "visited", "time", "certificate", "heads", "runs", "skipped", "inputs")
VOID = {"meta", "input", "br"}


def cell(**values: Any) -> dict[str, Any]:
    """A cell with every field of a grid's."""
    return {
        "type": "cell", "context_tokens": 32768, "method": "rq", "group_size": 2, "bits": 1, "dim": None,
        "policy": "topk", "batch": 1, "bytes_ratio": 0.12, "kl_mean": 0.002, "top1_agreement": 0.99,
        "num_needles": 1000, "needles_answered": 998, "needles_dense": 1000, "selected_ratio": 0.1,
        "always_selected_ratio": 0.02, "decode_ms_p50": 8.0, "decode_ms_p95": 9.0, "dense_decode_ms_p50": 10.0,
        "dense_decode_ms_p95": 12.0, "device": "cuda", "strict": False, **values,
    }  # fmt: skip


def test_an_arm_is_named_by_what_sets_it_apart() -> None:
    usual = {"rescore": 0.0, "sink_recent": [4, 8], "bound_bits": 0, "scope": "kv-head"}
    assert variant_name(cell(**usual)) == "rq 1 bit S=2"
    other = {"rescore": 0.125, "sink_recent": [16, 128], "bound_bits": 8, "scope": "union"}
    assert variant_name(cell(**other)) == "rq 1 bit S=2 +1 bit sink and recent tokens 16+128 8 bit bounds union"
    assert variant_name(cell(**usual, mean_tokens=32, cascade=[0.25])) == "rq 1 bit S=2 about 32"
    assert variant_name(cell(**usual, mean_tokens=64, cascade=None)) == "rq 1 bit S=2 about 64, whole"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"policy": "topk"}, "topk budget 0.1"),
        ({"policy": "topk", "budget_floor": 1024, "strict": True}, "topk budget 0.1 budget-floor 1024 epsilon 0.05"),
        ({"policy": "threshold"}, "threshold budget 0.1 alpha 1.1"),
    ],
)
def test_a_policy_is_named_by_what_means_something_to_it(settings: dict[str, Any], said: str) -> None:
    config = {"budget": 0.1, "budget_floor": 0, "alpha": 1.1, "epsilon": 0.05, "strict": False, **settings}
    assert cells.policy(config) == said == cells.policy({"policy": config["policy"], "setting": config})


def test_a_batch_is_drawn_at_its_longest_prompt(tmp_path: Path) -> None:
    run = whole_results()["run.jsonl"]
    run[1]["lengths"], run[2]["lengths"], run[3]["prompt_tokens"] = [300, 777, 500], [301, 778, 501], 1577
    html = checked_section(page(load_results(write(tmp_path, {"run.jsonl": run}))), "visited")
    assert "<td>777</td>" in html and "1,577" not in html


def test_a_kl_of_0_was_measured(tmp_path: Path) -> None:
    for kl, said in (
        (0.0, "KL to dense, nats is 0 everywhere, which a log"),
        (None, "KL to dense, nats was not measured"),
    ):
        (path,) = write(tmp_path, {"grid.jsonl": [cell(kl_mean=kl)]})
        assert f"No data: {said}" in checked_section(page(load_results([path])), "quality")


# --- the page ---------------------------------------------------------------------------------------------------------


def whole_results() -> dict[str, list[dict[str, Any]]]:
    """Lines of every kind, by file."""
    shared = {"selected_ratio_by_layer_and_head": [[0.1, 0.4], [0.9, 0.2]], "skipped_mass_bound_max": 0.5}
    grid: list[dict[str, Any]] = [
        {"type": "run", "kind": "grid", "device": "cuda", "model": "demo<&>"},
        {"type": "resume"},
        *(
            cell(index=i, context_tokens=context, bytes_ratio=ratio, kl_mean=0.001 / ratio, **shared)
            for i, (context, ratio) in enumerate(((8192, 0.1), (8192, 0.2), (32768, 0.1), (32768, 0.2)))
        ),
        cell(method="ball", bits=None, group_size=8, mass_pairs=[[0.5, 0.1], [0.2, 0.2], [1.0, 0.0]], **shared),
        {**cell(), "skipped": "context 65536 is past the model's <b>", "bytes_ratio": None},
        cell(context_tokens=16384, kl_mean=None, verified={"mode": "tokens", "draft": 4}),
    ]
    run = [
        {"type": "run", "backend": "cuda", "device": "cpu", "config": {"method": "box", "policy": "topk"}},
        {"type": "step", "step": 0, "skipped_mass_bound_max": 0.3, "skipped_mass_true_max": 0.1},
        {"type": "step", "step": 1, "skipped_mass_bound_max": None},
        {"type": "summary", "selected_ratio": 0.3, "prompt_tokens": 4095, "bytes_ratio": 0.2, "decode_ms_p50": 3.0,
         "dense": {"decode_ms_p50": 2.0}, **shared},
    ]  # fmt: skip
    evaluated = [
        {"type": "run", "model": "demo_model", "device": "cpu"},
        {"type": "cell", "context_tokens": 4096, "method": "oracle", "group_size": 16, "bits": None, "dim": None,
         "byte_budget": 0.1, "bytes_ratio": 0.1, "kl_mean": 0.004, "num_needles": 50, "needles_answered": 50,
         "needles_dense": 50},
    ]  # fmt: skip
    asked = [
        {"type": "run", "kind": "evaluate", "model": "demo", "config": {"method": "rq", "group_size": 2, "bits": 1}},
        *({"type": "sample", "index": index} for index in range(2)),
        {"type": "task", "task": "vt", "context_tokens": 4096, "num_samples": 2, "dense": 1.0, "eps": 0.75,
         "eps_minus_dense": -0.25, "eps_minus_dense_interval": [-0.5, 0.0], "bytes_ratio": 0.125},
        {"type": "document", "index": 0},
        {"type": "text", "context_tokens": 4096, "num_documents": 1, "text_steps": 8, "eps_kl": 0.0125,
         "eps_kl_interval": None, "bytes_ratio": 0.125},
    ]  # fmt: skip
    return {
        "grid.jsonl": grid, "run.jsonl": run, "evaluate.jsonl": evaluated, "asked.jsonl": asked,
        "replay.jsonl": [{"type": "replay"}] * 3,
        "memory.jsonl": [cell(policy="snapkv", bytes_kept_ratio=0.3, context_tokens=2048)],  # is drawn nowhere
    }  # fmt: skip


def write(root: Path, files: dict[str, list[dict[str, Any]]]) -> list[Path]:
    for name, lines in files.items():
        (root / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [root / name for name in files]


class Page(HTMLParser):
    """Asserts that elements nest, that ids are single and that nothing is fetched; `links` are what attributes name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.sections: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [] and len(set(self.ids)) == len(self.ids)
        # no network: what is left of http is the names of the SVG dialect
        bare = re.sub(r'xmlns(:\w+)?="http://www\.w3\.org/[^"]*"', "", text)
        assert "http" not in bare and "@import" not in bare and "<link" not in bare

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        values = dict(attrs)
        self.ids += [values["id"]] if "id" in values else []
        self.sections += [values["id"]] if tag == "section" else []
        self.links += [value for name, value in attrs if name in ("href", "xlink:href", "src", "srcset")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag in VOID or self.open.pop() == tag


def checked(html: str) -> None:
    page = Page(html)
    assert page.sections == list(SECTIONS)
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert "<script" not in html and re.search(r"\b(NaN|nan|inf|Infinity|None|null)\b", html) is None


def test_the_page_of_everything(tmp_path: Path) -> None:
    html = page(load_results(write(tmp_path, whole_results())))
    checked(html)
    # two plots for each of 3 contexts, tasks, text, visited, time, error bounds, six maps
    assert html.count("<svg") == 6 + 2 + 3 + 6
    assert "16,384" not in html  # a verified cell, whose text is the dense one
    assert html.count("<figcaption>") == html.count('role="img"') == html.count("<svg")
    assert "No data" not in html
    assert "3 of type replay" in html
    assert "demo&lt;&amp;&gt;" in html and "<b>" not in html
    assert html == page(load_results(write(tmp_path, whole_results())))


def test_a_page_of_nothing_says_so_in_every_section(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    html = page(load_results([tmp_path / "empty.jsonl"]))
    checked(html)
    assert "empty.jsonl holds no results" in html and "<svg" not in html
    assert html.count("No data") == 8  # all but the inputs


def test_a_field_that_is_missing_everywhere_leaves_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # figures are what takes time, and the next test draws odd values
    monkeypatch.setattr(figures, "_draw", lambda height, caption, plot: figures.Figure("<svg></svg>", caption))
    every = whole_results()
    for missing in sorted({key for lines in every.values() for line in lines for key in line} - {"type"}):
        files = {
            name: [{key: value for key, value in line.items() if key != missing} for line in lines]
            for name, lines in every.items()
        }
        checked(page(load_results(write(tmp_path, files))))


def test_odd_values_leave_a_page(tmp_path: Path) -> None:
    odd = [
        {"type": "cell"},
        {"type": "cell", "bytes_ratio": 0.1},
        cell(kl_mean=0.0, needles_answered=None),
        cell(context_tokens=None, method=None, policy=None, setting=None, batch=2),
        cell(selected_ratio_by_layer_and_head=[[0.1], [0.2, 0.3]], mass_pairs=[[None, 0.1]]),
        cell(selected_ratio_by_layer_and_head="no", device=None),
        {"type": "step"},
        {"type": "summary"},
        {"type": "run", "config": [1]},
        {"type": "task", "dense": "all", "eps": 1, "eps_minus_dense_interval": ["low", "x"]},
        {"type": "text", "eps_kl": [1], "bytes_ratio": None, "context_tokens": "long"},
        {"type": "failed", "index": [], "reason": None},
        {"no": "type"},
    ]
    path = write(tmp_path, {"odd.jsonl": odd})[0]
    path.write_text(path.read_text() + "[1]\nnot json\n" + '{"type": "cell", "bytes_ratio": NaN}\n{"type": "ce')
    html = page(load_results([path, path]))
    checked(html)
    for number in (14, 15, 17):
        assert f"odd.jsonl, line {number}: not a JSON object, left out" in html
    assert "1 of type (no type)" in html


@pytest.mark.parametrize("module", ["matplotlib", "jinja2"])
def test_a_library_that_is_absent_is_named_in_one_line(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"need {module} \(.*\): pip install 'eigenpage\[report\]'"):
        page(Results())


def test_an_installation_has_what_the_page_is_made_of() -> None:
    """Package data: a wheel without its templates fails at the first report."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    folder = ROOT / "eps_core" / "report"
    shipped = {path for pattern in patterns["eps_core.report"] for path in folder.glob(pattern)}
    assert shipped == set((folder / "templates").iterdir()) != set()


def test_what_evaluate_found_is_drawn(tmp_path: Path) -> None:
    asked, stopped = whole_results()["asked.jsonl"], [{"type": "run"}, {"type": "sample", "index": 0}]
    loaded = load_results(write(tmp_path, {"asked.jsonl": asked, "stopped.jsonl": stopped}))
    assert loaded.notes == ["stopped.jsonl: 1 of type sample and no task: evaluate was stopped"]
    html = checked_section(page(loaded), "tasks")
    assert html.count("<svg") == 2 and "nothing lost" in html
    for shown in ("rq 1 bit S=2", "-0.500 to +0.000", "0.750", "0.01250", "4,096"):
        assert shown in html


def test_a_failed_cell_is_listed_until_it_is_measured(tmp_path: Path) -> None:
    failed = {"type": "failed", "index": 7, "setting": {}, "reason": "out of memory"}
    (path,) = write(tmp_path, {"grid.jsonl": [cell(index=0), failed, failed]})
    html = checked_section(page(load_results([path])), "skipped")
    assert "failed, and not measured since: out of memory</td><td>1<" in html
    (path,) = write(tmp_path, {"grid.jsonl": [failed, cell(index=7)]})
    assert "out of memory" not in page(load_results([path]))


def checked_section(html: str, key: str) -> str:
    checked(html)
    return html.partition(f'<section id="{key}">')[2].partition("</section>")[0]


def test_text_in_results_stays_text(tmp_path: Path) -> None:
    evil = "<script>x</script>&\"'"
    odd = cell(method=evil, model=evil, skipped=evil, bytes_ratio=None)
    html = page(load_results(write(tmp_path, {"a.jsonl": [cell(method=evil, model=evil), odd]})))
    checked(html)
    assert "<script" not in html and html.count("&lt;script&gt;x&lt;/script&gt;&amp;") >= 4


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_colours_are_readable_on_both_pages() -> None:
    assert len(set(PALETTE)) == len(PALETTE)
    for colour in PALETTE:
        for paper in (PAGE_LIGHT, PAGE_DARK):
            assert contrast(colour, paper) >= 3, (colour, paper)


def test_report_command_writes_the_page_whole(tmp_path: Path) -> None:
    some = {"grid.jsonl": [{"type": "run"}, cell()], "replay.jsonl": [{"type": "replay"}] * 3}
    paths = write(tmp_path, some)
    result = last(outcome(["report", *map(str, paths), "-o", "r.html"], tmp_path))
    assert result["lines"]["replay.jsonl"] == {"replay": 3}
    assert (tmp_path / "r.html").read_text() == page(load_results(paths))
    assert not list(tmp_path.glob(".*"))
    for name in ("race.jsonl", "soak.jsonl", "speed-scaling.jsonl"):
        refused(["report", ROOT / "results" / name, "-o", "new.html"], tmp_path, f"{name}: nothing to draw: give JSONL")
    refused(["report", "absent.jsonl", "-o", "r.html"], tmp_path, "absent.jsonl cannot be read")
    refused(["report", paths[0], "-o", "absent/r.html"], tmp_path, "there is no directory")


def test_pages_are_made_on_demand_and_not_kept() -> None:
    """Half a megabyte that `eps-proto report` makes from measurements is no source."""
    listed = subprocess.run(["git", "ls-files", "results"], cwd=ROOT, capture_output=True, text=True)
    assert not [name for name in listed.stdout.split() if name.endswith((".html", "roofline.svg"))]


def test_a_round_tells_the_mass_of_each_depth() -> None:
    line = {"type": "round", "skipped_mass_true_max": [0.4, 0.1]}
    assert clean(line) == (line, [])
    assert len(clean(line | {"type": "step"})[1]) == 1 and len(clean(line | {"skipped_mass_true_max": 0.4})[1]) == 1


def test_a_map_whose_rows_are_not_alike_is_none() -> None:
    assert cells.map_of([[0.1], [0.1, 0.2]]) is None is cells.map_of([]) is cells.map_of([[]])
    found = cells.map_of([[0.1, 0.2]])
    assert found is not None and found.shape == (1, 2)
