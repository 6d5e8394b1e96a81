"""Generated tasks: the answer is what an independent reading of the prompt gives, and `eps-proto evaluate` measures."""

import hashlib
import json
import re
from collections import Counter
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from eps_core.cli.evaluate import evaluate_command
from eps_core.config.cache import METHODS
from eps_core.config.eps import EpsConfig
from eps_core.errors import ConfigError
from eps_core.evaluation import measure
from eps_core.evaluation.quality import Answer, table, task_result
from eps_core.tasks.corpus import corpus
from eps_core.tasks.needle import Sample, needle_document
from eps_core.tasks.questions import ANSWER_SLACK_TOKENS, Question, fit_question, generated_questions
from eps_core.tasks.ruler import DEPTHS, TASKS, make_sample

WORDS = "".join(chr(ord("a") + i % 26) for i in range(40))
# the same on every machine and every Python, with words enough for cwe
TEXT = b"".join(
    f"line {i} of a text that never changes, {WORDS[i % 26 : i % 26 + 6]} {WORDS[i % 23 : i % 23 + 4 + i % 5]} "
    f"{chr(97 + i % 26) * 2}{chr(97 + i // 26 % 26) * 2}{chr(97 + i // 676 % 26)}\n".encode()
    for i in range(6000)
)
GOLDEN_TEXT = b"".join(b"line %d of a text that never changes\n" % i for i in range(2000))
PLACED = [name for name in TASKS if name not in ("cwe", "fwe")]


@pytest.mark.parametrize(
    "arguments, digest, answer",
    [
        ((4000, 1, 0.5, 3), "1965623bdb59dfec", "23842"),
        ((700, 7, 0.0, 0), "804d049eda8a25ca", "68578"),
        ((2000, 3_000_004, 0.9, 2), "34f3f87c3cad8ed9", "06935"),
    ],
)
def test_needle_documents_stay_what_the_demo_model_was_trained_on(arguments, digest, answer):
    doc = needle_document(GOLDEN_TEXT, *arguments)
    assert (hashlib.sha256(doc.prompt.encode()).hexdigest()[:16], doc.answer) == (digest, answer)


@pytest.mark.parametrize("num_bytes", [1500, 20000])
@pytest.mark.parametrize("task", TASKS)
def test_a_sample_fills_its_bytes_and_follows_from_its_seed(task, num_bytes):
    sample = make_sample(task, TEXT, num_bytes, 3, 0.3)
    assert sample.task == task and 0.9 * num_bytes <= len(sample.prompt.encode()) <= num_bytes
    assert sample == make_sample(task, TEXT, num_bytes, 3, 0.3) != make_sample(task, TEXT, num_bytes, 4, 0.3)
    assert len(set(sample.answers)) == len(sample.answers)
    assert all(answer in sample.prompt for answer in sample.answers)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("task", PLACED)
def test_what_is_asked_for_stands_at_its_depth(task, depth):
    sample = make_sample(task, TEXT, 20000, 5, depth)
    assert sample.prompt.index(sample.answers[0]) / len(sample.prompt) == pytest.approx(depth, abs=0.04)


def test_needles_in_the_demo_format_have_the_distractors_of_their_name():
    for task, count in (("niah_single", 1), ("niah_multikey", 4)):
        sample = make_sample(task, TEXT, 4000, 9, 0.5)
        lines = dict(re.findall(r"# The code for (\S+) is (\d{5})\.", sample.prompt))
        (asked,) = re.findall(r"What is the code for (\S+)\? The code for \S+ is $", sample.prompt)
        assert len(lines) == count and sample.answers == (lines[asked],)


@pytest.mark.parametrize(
    "task, num_answers, num_keys, digits",
    [("niah_digits", 1, 1, 10), ("niah_multivalue", 4, 1, 7), ("niah_multiquery", 4, 4, 7)],
)
def test_hidden_numbers_are_all_those_of_the_keys_asked_for(task, num_answers, num_keys, digits):
    sample = make_sample(task, TEXT, 6000, 2, 0.7)
    asked = re.search(r"secret numbers? of (.*)\?\nAnswer:", sample.prompt)[1]
    keys = re.split(r", | and ", asked)
    said = re.findall(r"A secret number of (\S+) is (\d+)\.", sample.prompt)
    assert len(keys) == num_keys and set(sample.answers) == {value for key, value in said if key in keys}
    assert len(sample.answers) == num_answers and all(len(answer) == digits for answer in sample.answers)


@pytest.mark.parametrize(
    "task, line, question",
    [
        ("niah_uuid", r"^The secret UUID of (\S+) is (\S+)\.$", r"What is the secret UUID of (\S+)\?"),
        ("associative_recall", r"^(\S+-\S+-\d\d): (\d{5})$", r"does the list give for (\S+)\?"),
    ],
)
def test_lists_hold_the_pair_that_is_asked_for_among_many(task, line, question):
    sample = make_sample(task, TEXT, 12000, 2, 0.5)
    pairs = re.findall(line, sample.prompt, re.MULTILINE)
    assert len(pairs) > 90 and len(dict(pairs)) == len(pairs)
    assert sample.answers == (dict(pairs)[re.search(question, sample.prompt)[1]],)


@pytest.mark.parametrize("task, line", [("code_function", "def {}():\n    return "), ("code_constant", "{} = ")])
def test_code_is_looked_up_between_the_definitions_of_a_module(task: str, line: str) -> None:
    between = 0
    for seed in range(10):
        sample = make_sample(task, corpus(), 20000, seed, 0.5)
        name = re.search(r"    assert (\w+)(\(\))? == $", sample.prompt)[1]
        before, after = sample.prompt.split("\n\n" + line.format(name))
        assert after.startswith(sample.answers[0] + "\n") and abs(len(before) / len(sample.prompt) - 0.5) < 0.11
        between += before.endswith("\n") and re.match(r"\d+\n\n\n(def|class|@)", after) is not None
        assert sample.lead == sample.prompt[sample.prompt.rindex("    assert ") :]
    assert between >= 3  # else the nearest definition is too far from the depth asked for


def test_variables_are_those_that_hold_the_value_when_the_text_is_run_from_the_top():
    for seed in range(10):
        sample = make_sample("vt", TEXT, 6000, seed, 0.5)
        held: dict[str, str] = {}
        for name, right in re.findall(r"^VAR (\w+) = (.+)$", sample.prompt, re.MULTILINE):
            held[name] = held[right[4:]] if right.startswith("VAR ") else right  # a KeyError: used before it is set
        asked = re.search(r"hold the value (\d+)\?", sample.prompt)[1]
        assert set(sample.answers) == {name for name, value in held.items() if value == asked}
        assert len(sample.answers) == 5 and len(held) == 10


def test_common_and_frequent_words_are_those_that_a_count_finds():
    for num_bytes, common, others in ((4000, 6, 1), (20000, 30, 3)):
        sample = make_sample("cwe", TEXT, num_bytes, 1)
        counts = Counter(re.findall(r"\d+\. (\w+)", sample.prompt))
        assert {word for word, count in counts.items() if count == common} == set(sample.answers)
        assert len(sample.answers) == 10 and set(counts.values()) == {common, others}
    sample = make_sample("fwe", TEXT, 4000, 1)
    body = sample.prompt.split("\n")[1]
    ranked = Counter(word for word in body.split() if word != "...").most_common(4)
    assert tuple(word for word, _ in ranked[:3]) == sample.answers
    assert len({count for _, count in ranked}) == 4  # no ties: the answer is decided


@pytest.mark.parametrize("task", TASKS)
def test_what_does_not_fit_is_refused_in_one_line(task):
    with pytest.raises(ConfigError) as error:
        make_sample(task, TEXT, 60, 0)
    assert "60 bytes" in str(error.value) and "\n" not in str(error.value)


def test_unknown_tasks_and_short_texts_are_named():
    with pytest.raises(ConfigError, match="task 'niah_tripple' is unknown: choose among niah_single, niah_multikey"):
        make_sample("niah_tripple", TEXT, 4000, 0)
    with pytest.raises(ConfigError, match=r"and the text has [\d,]+: give a longer --text or lower --context"):
        make_sample("vt", TEXT[:1000], 4000, 0)
    with pytest.raises(ConfigError, match="different words of this text"):
        make_sample("cwe", GOLDEN_TEXT, 4000, 0)


def test_a_text_of_long_characters_stays_within_its_bytes():
    text = "Größe und Maß — das ist die Frage.\n".encode() * 400
    for task in ("niah_single", "vt", "niah_digits"):
        sample = make_sample(task, text, 3000, 1, 0.5)
        assert len(sample.prompt.encode()) <= 3000 and "\ufffd" not in sample.prompt


@pytest.mark.parametrize("bytes_per_token", [1, 4])
@pytest.mark.parametrize("task", TASKS)
def test_questions_fill_a_context_of_tokens_and_leave_room_for_the_answer(task, bytes_per_token):
    def encode(text, special=True):
        return [0] * special + [1] * -(-len(text.encode()) // bytes_per_token)

    questions = generated_questions(task, 2048, 5, 0, TEXT, encode)
    assert [q.sample.depth for q in questions] == (list(DEPTHS) if task in PLACED else [None] * 5)
    for question in questions:
        answer = ", ".join(question.sample.answers)
        assert question.max_new_tokens == len(encode(answer, special=False)) + ANSWER_SLACK_TOKENS
        assert 0.93 * 2048 <= len(question.tokens) + question.max_new_tokens <= 2048


def test_a_context_that_no_prompt_meets_is_refused():
    with pytest.raises(ConfigError, match="context of 10 tokens cannot be met"):
        fit_question(lambda num_bytes: Sample("x", "y" * 50, ("z",)), lambda text, special=True: list(text), 10, 1.0)


def evaluate(*args: object) -> dict:
    line = ["--backend", "numpy", *map(str, args)]
    result = CliRunner().invoke(evaluate_command, line, standalone_mode=False, catch_exceptions=False)
    return json.loads(result.stdout.splitlines()[-1])


# box: numpy builds it fastest
SMALL = ("--context", 384, "--samples", 2, "--text-steps", 2, "--eps-method", "box", "--eps-policy", "topk")


def test_reading_everything_is_dense_and_reading_the_ends_alone_is_not(tmp_path: Path):
    out = tmp_path / "all.jsonl"
    text = tmp_path / "text.txt"
    text.write_bytes(TEXT)
    whole = evaluate(*SMALL, "--text", text, "--tasks", "niah_single", "--eps-budget", 1, "-o", out)
    (single,) = whole["tasks"]
    assert (single["dense"], single["eps"], single["oracle"], single["eps_minus_dense"]) == (1, 1, 1, 0)
    assert single["num_changed"] == 0 and not single["says_nothing"]
    assert single["bytes_ratio"] == 1  # all of K and V, and no summary: nothing needs a score
    assert whole["text"][0]["eps_kl"] < 1e-6 and whole["text"][0]["eps_top1_agreement"] == 1

    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["type"] for line in lines] == ["run", *["sample"] * 2, "task", *["document"] * 2, "text"]
    assert lines[1]["dense"]["text"].startswith(lines[1]["answers"][0]) and lines[1]["prompt_tokens"] <= 384
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.jsonl", "text.txt"]

    narrow = ("--eps-top-pages", 1, "--eps-sink-tokens", 0, "--eps-recent-tokens", 32)
    little = evaluate(*SMALL, "--text", text, "--tasks", "niah_single", *narrow, "--no-oracle")
    (single,) = little["tasks"]
    assert (single["dense"], single["eps"], single["oracle"], single["eps_minus_dense"]) == (1, 0, None, -1)
    assert single["bytes_ratio"] < 0.3 and little["text"][0]["eps_kl"] > 0.01
    assert little["text"][0]["oracle_kl"] is None


@pytest.mark.parametrize("method", METHODS[1:])
def test_the_oracle_reads_as_much_as_eps(method: str):
    for settings in ({}, {"budget": 0.1}, {"budget_floor": 300}, {"top_pages": 7}):
        variants = measure.MeasureRequest(EpsConfig.of(method=method, **settings)).variants()
        for length in (500, 2048, 4096, 32768):
            groups = {one.budget_groups(length) for one in variants.values()}
            assert len(groups) == 1, (settings, length, groups)


def test_answers_of_another_oracle_are_not_continued(tmp_path: Path):
    out = tmp_path / "all.jsonl"
    few = ("--context", 384, "--samples", 1, "--text-steps", 1, "--eps-method", "box", "--tasks", "none", "-o", out)
    evaluate(*few)
    run, *rest = map(json.loads, out.read_text().splitlines())
    assert run["oracle_config"]["method"] == "oracle"
    for other in ({}, {"oracle_config": {**run["oracle_config"], "budget_floor": 1}}):
        run.pop("oracle_config", None)
        out.write_text("".join(json.dumps(line) + "\n" for line in ({**run, **other}, *rest)))
        with pytest.raises(ConfigError, match="another run's results: its oracle_config"):
            evaluate(*few)


def test_a_long_sample_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[int, int, str]] = []
    monkeypatch.setattr(measure.terminal.Progress, "__call__", lambda self, *told: said.append(told))
    evaluate(*SMALL, "--tasks", "niah_single", "--samples", 1, "--no-oracle")
    of_text = [(2, what) for what in ("", ": 384 of 384 tokens of its prompt", *[": decoding"] * 4)]
    assert [(total, what.removeprefix("text at 384 tokens")) for done, total, what in said if done == 1] == of_text
    of_task = [what for done, total, what in said if (done, total) == (0, 2)]
    assert (
        of_task[0] == "niah_single" and of_task[-1] == "niah_single: decoding" and "tokens of its prompt" in of_task[1]
    )


def answered(score: float, bytes_read: int = 3) -> Answer:
    return Answer("", score, bytes_read, 10)


def test_results_pair_the_arms_and_say_where_dense_itself_fails():
    sample = Sample("vt", "", ("x",))
    questions = [Question(sample, [1], 1, 64, truncated=index == 0) for index in range(4)]
    scores = ((1, 1, 1), (1, 0, 1), (0, 0, 1), (1, 0, 0))  # of dense, EPS and the oracle
    answers = [{"dense": answered(d, 10), "eps": answered(e), "oracle": answered(o)} for d, e, o in scores]
    result = task_result(questions, answers, seed=0)
    assert (result.dense, result.eps, result.oracle) == (0.75, 0.25, 0.75)
    assert (result.eps_minus_dense, result.oracle_minus_dense, result.eps_minus_oracle) == (-0.5, 0, -0.5)
    assert result.eps_minus_dense_interval == (-1, 0) and result.eps_minus_dense_p == 0.5  # 2 of 2: 2 * 1/4
    assert result.num_changed == 2 and result.changed_share_upper == pytest.approx(0.85, abs=0.01)
    assert (result.bytes_ratio, result.num_truncated, result.says_nothing) == (0.3, 1, False)

    failed = task_result(questions, [{"dense": answered(0, 10), "eps": answered(0)}] * 4, seed=0)
    assert failed.says_nothing and failed.oracle is None and failed.eps_minus_oracle_interval is None
    text = table([failed], [])
    assert "dense itself fails" in text and "+0.000" not in text  # no difference is claimed


def test_benchmark_files_are_scored_by_their_own_metrics(tmp_path: Path):
    doc = make_sample("niah_single", TEXT, 200, 1, 0.5)
    ruler = tmp_path / "vt.jsonl"  # the task whose answers are shortest
    ruler.write_text(json.dumps({"input": doc.prompt, "outputs": [doc.answers[0], "absent"], "length": 1}) + "\n")
    found = evaluate("--tasks", "none", "--text-steps", 0, "--ruler", ruler, "--no-oracle", "--eps-method", "box")
    (result,) = found["tasks"]
    assert (result["task"], result["source"], result["context_tokens"]) == ("vt", "ruler", None)
    assert (result["dense"], result["eps"], result["eps_minus_dense_interval"]) == (0.5, 0.5, None)
    assert found["text"] == []


@pytest.mark.parametrize(
    "args, words",
    [
        (["--tasks", "niah_single,tea"], "task 'tea' is unknown"),
        (["--tasks", "none", "--text-steps", 0], "nothing to evaluate"),
        (["--eps-method", "off"], "name another --method"),
        (["--context", 20000], "context 20000"),
        (["--context", 60], "raise --context"),
        (["--longbench", "absent.jsonl"], "absent.jsonl"),
        (["--longbench-prompts", "x.json"], "--longbench"),
        (["--text", "absent.txt"], "absent.txt"),
        (["--chat"], "no chat template"),
        (["--model", "absent", "--eps-method", "rq"], "absent"),
        (["-o", "absent/x.jsonl"], "absent"),
        (["--device", "cuda"], "device cuda"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_mistakes_are_named_before_anything_runs(args, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few = [] if "--context" in args else ["--context", 448]
    with pytest.raises((ConfigError, click.UsageError)) as error:
        evaluate("--samples", 1, *few, *args)
    assert words in str(error.value) and "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flags", [["260,300", "280,260"], ["260", "300", "280"]], ids=" ".join)
def test_contexts_are_repeated_or_lists(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[measure.MeasureRequest] = []
    monkeypatch.setattr(measure, "measure", lambda request, out: asked.append(request) or {})
    evaluate(*(part for flag in flags for part in ("--context", flag)))
    assert asked[0].contexts == (260, 300, 280)


def test_help_says_when_prompts_are_raw():
    help_text = " ".join(CliRunner().invoke(evaluate_command, ["--help"]).stdout.split())
    assert "no chat template is applied" in help_text
