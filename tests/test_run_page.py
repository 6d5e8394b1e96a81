"""`eps-proto run --plot`: the page shows what the run's own steps read, and the run is the one without it."""

import html
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_models
from command import last, lines_of, outcome, refused
from test_html_report import Page, contrast

from eps_core.attention import layer as layer_module
from eps_core.decode import layers
from eps_core.evaluation import trace as tracing
from eps_core.evaluation.trace import Reads, Trace, texts_of
from eps_core.load import BACKENDS
from eps_core.models.tokenizer import load_tokenizer
from eps_core.report import heat, run_page
from eps_core.report.style import templates

PROMPT = 'It was <b>dark</b> & "stormy"; été\'s rain fell.</script>\n' * 6
STEPS = 7
SPARSE = ["--method", "box", "--eps-group-size", "8", "--eps-budget", "0.3", "--eps-sink-tokens", "4",
          "--eps-recent-tokens", "8"]  # fmt: skip


def line(model: Path, backend: str = "numpy", *more: object) -> list[str]:
    fixed = ["--dtype", "float32", "--kernels", "arrays", "--max-new-tokens", str(STEPS), "--no-stop"]
    flags = [*fixed, *SPARSE, *map(str, more)]
    return ["run", "--model", str(model), "--backend", backend, "--prompt", PROMPT, *flags]


def checked(page: str) -> None:
    """Assert that the page is whole and that nothing leads out of it."""
    assert Page(page).links == [] and "url(" not in page


def text_of(page: str) -> str:
    """Return the text of the prompt's pieces."""
    (inside,) = re.findall(r'<div class="text" id="text".*?>(.*?)</div>', page, re.S)
    return html.unescape("".join(re.findall(r"<i [^>]*>(.*?)</i>", inside, re.S)))


def section(page: str, key: str) -> str:
    return page.partition(f'id="{key}"')[2].partition("</section>")[0]


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Trace]:
    """The traces that pages are made of."""
    found: list[Trace] = []
    page = run_page.run_page

    def kept(trace: Trace) -> str:
        found.append(trace)
        return page(trace)

    monkeypatch.setattr(run_page, "run_page", kept)
    return found


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Any]]:
    """(layer, what was read) of every sparse layer call."""
    calls: list[tuple[int, Any]] = []
    sparse_attention = layers.sparse_attention

    def kept(backend: Any, cache: Any, layer: int, *rest: Any) -> Any:
        out, read = sparse_attention(backend, cache, layer, *rest)
        calls.append((layer, read))
        return out, read

    monkeypatch.setattr(layers, "sparse_attention", kept)
    return calls


FUSED = ("--method", "rq", "--eps-group-size", "1", "--kernels", "numba")  # one kernel scores, selects and attends


@pytest.mark.parametrize(("backend", "more"), [*((name, ()) for name in BACKENDS), ("cuda", FUSED)])
def test_the_page_shows_what_the_steps_read_and_the_run_stays_the_same(
    backend: str,
    more: tuple[str, ...],
    model: Path,
    tmp_path: Path,
    traced: list[Trace],
    attended: list[tuple[int, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fused, at_once = list[Any](), layer_module.fused_sparse_attention

    def kept(*rest: Any) -> Any:
        read = at_once(*rest)
        fused.extend([] if read is None else [read])
        return read

    monkeypatch.setattr(layer_module, "fused_sparse_attention", kept)
    plain = last(outcome(line(model, backend, "--kl", *more), tmp_path))
    attended.clear()
    fused.clear()
    done = outcome(line(model, backend, "--plot", "p.html", "--metrics", "m.jsonl", *more), tmp_path)
    result = last(done)
    for name in ("text", "tokens", "bytes_ratio", "kl_mean", "kl_max", "top1_agreement", "prompt_tokens"):
        assert result[name] == plain[name], name
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m.jsonl", "p.html"]
    assert "note    layers were called one by one for the page" in done.out + done.err
    page, (trace,) = (tmp_path / "p.html").read_text(), traced
    checked(page)

    # the reads, counted again from what the layers returned: the first steps are the run's, then come those of --kl
    reads, spec = trace.reads, trace.reads.session.spec
    again, size = np.zeros_like(reads.tokens_read), 1 if more else 8
    calls = STEPS * spec.num_layers
    # a CPU may make all calls of a step of --kl as one
    assert calls <= len(attended) <= 2 * calls if more else len(attended) == 2 * calls
    assert bool(fused) == bool(more)
    for layer, read in attended[:calls]:
        groups = np.asarray(reads.session.backend.to_numpy(read.selection.groups))[0]
        for of_head in groups.tolist():
            for group in of_head:
                for token in range(group * size, group * size + size) if group >= 0 else ():
                    if token < reads.num_tokens:
                        again[layer, token] += 1
    assert np.array_equal(reads.tokens_read, again)
    heads = spec.num_kv_heads
    assert (reads.tokens_read[:, :4] == STEPS * heads).all() and reads.tokens_read.max() == STEPS * heads
    assert reads.tokens_read.min() < STEPS * heads
    by_step = np.stack(reads.by_step)
    assert by_step.shape == (STEPS, reads.num_tokens)
    assert np.allclose(by_step.sum(), reads.tokens_read.sum() / (heads * spec.num_layers))

    # bytes and times are the records'
    steps = [one for one in lines_of(tmp_path / "m.jsonl") if one["type"] == "step"]
    assert round(reads.kv_bytes.sum()) == sum(step["bytes_kv_read_est"] for step in steps)
    assert round(reads.summary_bytes.sum()) == sum(step["bytes_summary_read"] for step in steps) > 0
    assert np.allclose(np.stack(reads.layer_ms).sum(axis=(1, 2)),
                       [step["eps_prepass_ms"] + step["attention_ms"] for step in steps])  # fmt: skip

    # the page: the sentence, the text, KL token by token
    read = sum(step["bytes_kv_read_est"] + step["bytes_summary_read"] for step in steps)
    dense = sum(step["bytes_kv_dense"] for step in steps)
    assert f"EPS read {run_page.size(read)} of its KV cache where dense attention reads {run_page.size(dense)}" in page
    assert f"{run_page.percent(1 - result['bytes_ratio'])} of the bytes were saved" in page
    assert text_of(page) == PROMPT and "<b>dark" not in page
    assert trace.kl is not None and np.mean(trace.kl) == pytest.approx(result["kl_mean"])
    assert len(re.findall(r"<i class=\"b\d", section(page, "kl").partition("legend")[0])) == STEPS == len(trace.kl)
    assert page.count('role="listitem"><b>0</b>') == 2  # bytes and times of layer 0


def test_bytes_go_to_the_heads_that_read_them(
    model: Path, tmp_path: Path, traced: list[Trace], attended: list[tuple[int, Any]]
) -> None:
    command = line(model, "numpy", "--plot", "p.html", "--eps-policy", "threshold", "--eps-top-pages", "2")
    at = command.index("--eps-budget")
    last(outcome(command[:at] + command[at + 2 :], tmp_path))
    reads = traced[0].reads
    expected, uneven = np.zeros_like(reads.kv_bytes), False
    for layer, read in attended[: STEPS * reads.session.spec.num_layers]:
        counts = np.asarray(read.stats.counts)[0]
        expected[layer] += counts * read.plan.config.cache_config.S * read.spec.kv_token_bytes
        uneven |= len(set(counts.tolist())) > 1
    assert uneven and np.allclose(reads.kv_bytes, expected)


def test_layers_with_a_window_read_their_window(
    saved: Callable[[str], Path], tmp_path: Path, traced: list[Trace]
) -> None:
    path = saved("gemma3")
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    last(outcome(line(path, "numpy", "--plot", "p.html"), tmp_path))
    reads, window = traced[0].reads, tiny_models.GEMMA3["sliding_window"]
    steps = np.arange(STEPS)
    # the step that says new token s attends to the prompt and s tokens more
    in_window = reads.num_tokens - np.arange(reads.num_tokens)[:, None] + steps <= window
    for layer in (0, 2):
        assert np.array_equal(reads.tokens_read[layer], reads.session.spec.num_kv_heads * in_window.sum(axis=1))
    assert (reads.tokens_read[1] > 0).sum() > window


def test_without_a_dense_run_the_page_says_how_to_get_the_kl(model: Path, tmp_path: Path, traced: list[Trace]) -> None:
    result = last(outcome(line(model, "numpy", "--plot", "p.html", "--no-baseline"), tmp_path))
    page = (tmp_path / "p.html").read_text()
    checked(page)
    assert "kl_mean" not in result and "dense run, which --no-baseline leaves out" in section(page, "kl")
    assert traced[0].dense_text is None and "in the same run" not in page


def test_a_budget_for_everything_is_said(model: Path, tmp_path: Path) -> None:
    last(outcome([*line(model, "numpy", "--plot", "p.html"), "--eps-budget", "1.0"], tmp_path))
    page = (tmp_path / "p.html").read_text()
    assert "Every step read every token: the budget covers the whole prompt." in page and "same text" in page


WRONG = {
    "off": (["--method", "off"], "--plot draws what sparse steps read: choose a --method"),
    "verified": (["--eps-verify", "tokens"], "--plot draws steps and --eps-verify decodes in rounds: drop one"),
    "evicting": (["--kv-evict", "snapkv", "--kv-keep", "0.5"],
                 "--plot draws all of a prompt and --kv-evict keeps a part of it: drop one"),
    "batch": (["--prompt-file", "two.jsonl"], "--plot draws one prompt (got 2): give one"),
    "engine": (["--engine", "transformers"], "--plot belongs to our own decoders"),
    "folder": (["--plot", "none/p.html"], "--plot none/p.html: there is no directory"),
    "input": (["--prompt-file", "p.html"], "--plot p.html is --prompt-file p.html, which it would destroy"),
    "twice": (["--metrics", "p.html"], "--plot p.html is --metrics p.html"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_drawn_is_one_line(name: str, model: Path, tmp_path: Path) -> None:
    flags, words = WRONG[name]
    (tmp_path / "two.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    (tmp_path / "p.html").write_text("<p>before")
    prompt = [] if "--prompt-file" in flags else ["--prompt", PROMPT]
    method = [] if "--method" in flags else ["--method", "rq"]
    refused(["run", "--model", model, *prompt, *method, "--plot", "p.html", *flags], tmp_path, words)
    assert (tmp_path / "p.html").read_text() == "<p>before"


def test_a_page_that_fails_leaves_the_file_as_it_was(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(trace: Trace) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr(run_page, "run_page", fail)
    (tmp_path / "p.html").write_text("<p>before")
    with pytest.raises(ZeroDivisionError):
        outcome(line(model, "numpy", "--plot", "p.html"), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["p.html"] and (tmp_path / "p.html").read_text() == "<p>before"


def made_up(num_tokens: int, num_layers: int = 32, num_heads: int = 8, num_steps: int = 300) -> Trace:
    """A run of a large model on random reads: cells beside each other are hardly ever alike, as no real run has it."""
    rng = np.random.default_rng(0)
    spec = SimpleNamespace(num_layers=num_layers, num_kv_heads=num_heads, num_heads=4 * num_heads, head_dim=128)
    reads = Reads(SimpleNamespace(spec=spec), num_tokens)  # type: ignore[arg-type]
    num_columns = -(-num_tokens // reads.column_tokens)
    by_column = (rng.random((num_layers, num_columns)) ** 3 * num_steps * num_heads).astype(np.int64)
    reads.tokens_read = np.repeat(by_column, reads.column_tokens, axis=1)[:, :num_tokens]
    reads.kv_bytes, reads.summary_bytes = rng.random((num_layers, num_heads)) * 1e9, rng.random(num_layers) * 1e8
    for step in range(num_steps):
        record = SimpleNamespace(step=step, timed=True, decode_ms=90.0 + step % 7, audited=False)
        reads.records.append(record)  # type: ignore[arg-type]
        reads.layer_ms.append(rng.random((num_layers, 2)))
        # as the page puts steps together, alike ones stay apart
        reads.by_step.append(np.random.default_rng(step // -(-num_steps // run_page.MAX_ROWS)).random(num_columns) ** 3)
    summary = {"bytes_kv_read_est": 3e9, "bytes_summary_read": 1e9, "bytes_ratio": 0.05, "kv_ratio": 0.04,
               "summary_ratio": 0.01, "decode_ms_p50": 93.0, "prefill_ms": 1e4, "steps": num_steps}  # fmt: skip
    text = [" word"] * num_steps
    return Trace(
        {"model": "large"}, reads, [" tok<&"] * num_tokens, text, summary, text, summary,
        (10 ** rng.uniform(-12, 0, num_steps)).tolist(), (rng.random(num_steps) < 0.9).tolist(),
    )  # fmt: skip


@pytest.mark.parametrize("num_tokens", [1, 479, 32_768, 131_072])
def test_the_page_is_bounded_and_says_what_it_puts_together(num_tokens: int) -> None:
    trace = made_up(num_tokens)
    page = run_page.run_page(trace)
    checked(page)
    assert len(page) - sum(map(len, map(html.escape, trace.prompt))) < 2**21
    columns, pieces = -(-num_tokens // tracing.MAX_COLUMNS), -(-num_tokens // run_page.MAX_PIECES)
    assert (f"A column of the maps is the mean of {columns} tokens." in page) == (columns > 1)
    assert (f"The text is coloured in pieces of {pieces} tokens." in page) == (pieces > 1)
    assert text_of(page) == "".join(trace.prompt)
    assert page == run_page.run_page(trace)


def test_steps_that_hand_over_nothing_are_left_out_and_said() -> None:
    trace = made_up(100, 2, 2, 8)
    for kept in (trace.reads.records, trace.reads.layer_ms, trace.reads.by_step):
        del kept[::2]  # type: ignore[attr-defined]
    page = run_page.run_page(trace)
    assert "The maps are of 4 of 8 steps, which ran layer by layer" in page
    assert "new token 2 \\u201c word\\u201d" in page and "new token 1 \\u201c" not in page
    for kept in (trace.reads.records, trace.reads.layer_ms, trace.reads.by_step):
        kept.clear()  # type: ignore[attr-defined]
    page = run_page.run_page(trace)
    checked(page)
    assert "No step was timed layer by layer." in page and 'id="map-' not in page


def test_the_median_step_is_shown_with_its_parts() -> None:
    trace = made_up(100, 3, 2, 9)
    trace.reads.layer_ms[3][:] = [[1, 2], [3, 4], [5, 6]]
    record: Any = trace.reads.records[3]
    assert record.decode_ms == 93
    times = run_page._times(trace)
    assert times is not None and times["said"] == "step 4 of 9, the one of median time"
    assert [name for _, name, _ in times["parts"]] == ["selection", "attention", "the rest"]
    assert [ms for *_, ms in times["parts"]] == [9, 12, 93 - 21]
    assert [bar.value.split()[0] for bar in times["layers"]] == ["3.00", "7.00", "11.0"]


def test_shares_become_levels_and_rectangles() -> None:
    shares = np.array([[0, 0.01, 0.02, 0.021], [1, 1, 0.5, 0]])
    levels = heat.levels_of(shares)
    assert levels.tolist() == [[0, 1, 1, 2], [7, 7, 6, 0]] and len(heat.LEVEL_NAMES) == 8
    assert heat.paths_of(levels) == [
        (1, "M1 0h2v1h-2z"), (2, "M3 0h1v1h-1z"), (6, "M2 1h1v1h-1z"), (7, "M0 1h2v1h-2z"),
    ]  # fmt: skip
    assert heat.profile_of(np.array([0.25, 1])) == "M0 1V0.750h1V0.000h1V1z"
    assert [(tick.percent, tick.label) for tick in heat.ticks(0, 29)][1] == (pytest.approx(100 * 5.5 / 30), "5")
    assert [tick.label for tick in heat.ticks(1, 2075)] == ["500", "1,000", "1,500", "2,000"]
    assert [tick.label for tick in heat.ticks(1, 1)] == ["1"]


@pytest.mark.parametrize(("number", "words"), [(0, "0 B"), (1023, "1,023 B"), (2048, "2.00 KiB"), (3e9, "2.79 GiB")])
def test_bytes_have_a_unit(number: float, words: str) -> None:
    assert run_page.size(number).replace("\u00a0", " ") == words


def test_every_token_has_its_text_and_a_character_of_several_its_last() -> None:
    tokenizer = load_tokenizer(tiny_models.saved("mistral"))
    tokens = tokenizer.encode("aé<s>\U0001f600b").ids
    texts = texts_of(tokenizer, tokens)
    assert texts == ["a", "", "é", "<s>", "", "", "", "\U0001f600", "b"]


def test_text_is_readable_on_every_colour_of_both_schemes() -> None:
    environment = templates()
    sheets = [environment.get_template(name).render() for name in ("style.css", "run.css")]
    schemes = []
    for number in range(2):  # light, dark
        values: dict[str, str] = {}
        for sheet in sheets:
            block = re.findall(r":root \{(.*?)\}", sheet, re.S)[number]
            values |= dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
        schemes.append(values)
    (dark_text,) = re.findall(r"((?:\.[ab]\d[, ]*)+)\{ color: var\(--high\)", sheets[1])
    for scheme in schemes:
        for level in [f"a{i}" for i in range(1, 8)] + [f"b{i}" for i in range(1, 5)]:
            ink = scheme["high" if f".{level}" in dark_text else "low"]
            assert contrast(ink, scheme[level]) >= 4.5, (level, ink, scheme[level])
        assert all(
            contrast(scheme[ink], scheme[paper]) >= 4.5 for ink in ("ink", "soft") for paper in ("page", "panel")
        )
        for bar in ("kv", "kv0", "kv1", "summary", "dense", "select", "attend", "rest"):
            assert contrast(scheme[bar], scheme["shade"]) >= 1.8, bar  # each also has its length and its number
    assert set(schemes[0]) == set(schemes[1])
