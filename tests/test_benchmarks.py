"""LongBench and RULER: metrics against values derived by hand from the official definitions, loaders and bad files."""

import json
import re

import pytest

from eps_core.errors import ConfigError
from eps_core.tasks.benchmarks import (
    CHINESE_DATASETS,
    LONGBENCH_METRICS,
    classification_score,
    code_sim_score,
    count_score,
    load_longbench,
    load_ruler,
    normalize_answer,
    qa_f1_score,
    retrieval_score,
    rouge_score,
    score,
    score_longbench,
    score_ruler,
    string_match_all,
    string_match_part,
)
from eps_core.tasks.needle import Sample
from eps_core.tasks.questions import benchmark_question

LINE = {
    "input": "Who?",
    "context": "A {brace} and {input}.",
    "answers": ["Ada"],
    "length": 4,
    "dataset": "hotpotqa",
    "language": "en",
    "all_classes": None,
    "_id": "x",
}


@pytest.mark.parametrize(
    "text, normal",
    [
        ("An  Apple-pie, the!", "applepie"),  # punctuation goes before articles, without a space in its place
        ("The-end of a\tday", "theend of day"),
        ("a.n", ""),  # punctuation went first, and "an" is then an article
        ("banana", "banana"),
        ("", ""),
    ],
)
def test_answers_are_normalized_as_in_squad(text, normal):
    assert normalize_answer(text) == normal


@pytest.mark.parametrize(
    "prediction, answer, f1",
    [
        ("The cat sat.", "a cat sat down", 0.8),  # 2 of 2 and 2 of 3 words: 2 * 1 * 2/3 / (5/3)
        ("cat cat cat", "cat", 0.5),  # a word counts as often as in both: precision 1/3, recall 1
        ("CAT", "cat", 1.0),
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("the", "the", 0.0),  # nothing is left of either
    ],
)
def test_qa_f1(prediction, answer, f1):
    assert qa_f1_score(prediction, answer) == pytest.approx(f1)


@pytest.mark.parametrize(
    "prediction, answer, f",
    [
        ("the cat sat on the mat", "the cat lay on the mat", 0.8),  # 4 of 5 different words on each side
        ("a b c d", "a c d e f", 2 / 3),  # 3 of 4 and 3 of 5
        ("d c b a", "a b c d", 0.25),  # order counts: one word in common
        ("", "a", 0.0),
        (".", "a", 0.0),
    ],
)
def test_rouge_l(prediction, answer, f):
    assert rouge_score(prediction, answer) == pytest.approx(f, abs=1e-6)


def test_rouge_scores_a_text_beyond_its_recursion_as_the_official_code_does():
    long = " ".join(f"w{i}" for i in range(1200))  # its recursion is as deep as both texts are long
    assert rouge_score(long, "w1 w2") == 0.0


@pytest.mark.parametrize(
    "prediction, answer, classes, want",
    [
        ("Type: Animal", "Animal", ("Animal", "Food"), 1.0),
        ("Animal or Food", "Animal", ("Animal", "Food"), 0.5),
        ("Food", "Animal", ("Animal", "Food"), 0.0),
        ("nothing", "Animal", ("Animal", "Food"), 0.0),
        ("Food other", "Food other", ("Food", "Food other"), 1.0),  # Food is a part of the answer: not counted
        # two parts in a row: the official loop removes the first while walking and so never looks at the second
        ("big red dog", "big red dog", ("big", "red", "big red dog"), 0.5),
        ("big red dog", "big red dog", ("big", "big red dog", "red"), 1.0),
    ],
)
def test_classification(prediction, answer, classes, want):
    assert classification_score(prediction, answer, classes) == want


def test_numbers_are_shares_of_the_numbers_said():
    assert retrieval_score("Paragraph 12", "Paragraph 12") == 1.0
    assert retrieval_score("12 or 3", "Paragraph 12") == 0.5
    assert retrieval_score("Paragraph 112", "Paragraph 12") == 0.0
    assert retrieval_score("none", "Paragraph 12") == 0.0
    assert count_score("5, no, 5; 7", "5") == pytest.approx(2 / 3)
    assert count_score("05", "5") == 0.0
    assert count_score("", "5") == 0.0


@pytest.mark.parametrize(
    "prediction, answer, want",
    [
        ("\n\n# comment\nx = `1`\nx = 1\ny = 2", "x = 1", 1.0),
        ("abcd", "bcde", 0.75),  # 2 * 3 / 8
        ("abc", "abd", 0.67),  # 2 * 2 / 6 in whole percents
        # Python's documentation of difflib gives these two; a longest common subsequence would give 0.5 for both
        ("tide", "diet", 0.25),
        ("diet", "tide", 0.5),
        ("# only\n// comments", "x = 1", 0.0),
        ("# only", "", 1.0),
        ("x", "", 0.0),
    ],
)
def test_code_similarity_is_that_of_fuzzywuzzy_over_difflib(prediction, answer, want):
    assert code_sim_score(prediction, answer) == want


def test_ruler_counts_what_the_prediction_contains():
    assert string_match_all("It is ABC and 12.", ("abc", "12", "99", "x")) == 0.5
    assert string_match_part("It is ABC.", ("abc", "99")) == 1.0
    assert string_match_part("It is ABC.", ("98", "99")) == 0.0
    assert score_ruler("qa_1", "Ada", ("Ada", "Lovelace")) == 1.0
    assert score_ruler("niah_multivalue", "Ada", ("Ada", "Lovelace")) == 0.5
    assert score_ruler("niah_single_1", "12\x0734", ("1234",)) == 0.0  # control characters become line ends


def test_longbench_takes_the_best_answer_and_the_first_line_of_few_shot_tasks_alone():
    assert score_longbench("triviaqa", "\nParis\nQuestion: next", ("Lyon", "Paris")) == 1.0
    assert score_longbench("narrativeqa", "\nParis\nLyon", ("Paris",)) == pytest.approx(2 / 3)
    assert score_longbench("trec", "Animal\nFood", ("Animal",), ("Animal", "Food")) == 1.0
    assert score_longbench("samsum", "a b\nc", ("a b",)) == pytest.approx(1.0, abs=1e-6)
    assert score_longbench("gov_report", "a b\nc", ("a b",)) == pytest.approx(0.8, abs=1e-6)
    assert score(Sample("lcc", "", ("x = 1",), source="longbench"), "x = 1") == 1.0
    assert score(Sample("vt", "", ("AB", "CD")), "cd") == 0.5


def test_the_english_datasets_are_all_there():
    """21 datasets of LongBench v1, 5 of them Chinese."""
    assert len(LONGBENCH_METRICS) == 16 and not set(LONGBENCH_METRICS) & set(CHINESE_DATASETS)
    names = {name: metric.__name__ for name, metric in LONGBENCH_METRICS.items()}
    assert [name for name, metric in names.items() if metric == "rouge_score"] == [
        "gov_report", "qmsum", "multi_news", "samsum",
    ]  # fmt: skip
    assert [name for name, metric in names.items() if metric == "code_sim_score"] == ["lcc", "repobench-p"]
    assert [names[n] for n in ("trec", "passage_count", "passage_retrieval_en", "triviaqa")] == [
        "classification_score", "count_score", "retrieval_score", "qa_f1_score",
    ]  # fmt: skip


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_longbench_is_read_in_order_with_prompts_filled_once(tmp_path):
    trec = LINE | {"dataset": "trec_e", "all_classes": ["Ada", "Bob"]}
    samples = load_longbench(write(tmp_path / "a.jsonl", LINE, "", trec))
    assert [(s.task, s.answers, s.max_new_tokens, s.source) for s in samples] == [
        ("hotpotqa", ("Ada",), 32, "longbench"),
        ("trec", ("Ada",), 64, "longbench"),
    ]
    assert samples[1].all_classes == ("Ada", "Bob") and samples[1].prompt == "A {brace} and {input}.\nWho?"
    assert "A {brace} and {input}." in samples[0].prompt and samples[0].prompt.endswith("Question: Who?\nAnswer:")


def test_official_prompts_take_the_place_of_ours(tmp_path):
    prompts = write(tmp_path / "prompts.json", {"hotpotqa": "<{context}|{input}|{other}>"})
    (sample,) = load_longbench(write(tmp_path / "a.jsonl", LINE), prompts)
    assert sample.prompt == "<A {brace} and {input}.|Who?|{other}>"
    with pytest.raises(ConfigError, match="no prompt for dataset lcc"):
        load_longbench(write(tmp_path / "b.jsonl", LINE | {"dataset": "lcc"}), prompts)


def test_ruler_is_read_with_its_prefix_and_named_after_file_or_folder(tmp_path):
    line = {"index": 0, "input": "text?", "outputs": ["1", "2"], "length": 9}
    (plain,) = load_ruler(write(tmp_path / "vt.jsonl", line))
    assert (plain.task, plain.prompt, plain.answers, plain.max_new_tokens) == ("vt", "text?", ("1", "2"), 30)
    folder = tmp_path / "qa_1"
    folder.mkdir()
    (prefixed,) = load_ruler(write(folder / "validation.jsonl", line | {"answer_prefix": " Answer:"}))
    assert (prefixed.task, prefixed.prompt, prefixed.max_new_tokens) == ("qa_1", "text? Answer:", 32)


def without(key):
    return {k: v for k, v in LINE.items() if k != key}


@pytest.mark.parametrize(
    "line, words",
    [
        ('{"input": ', "no JSON"),
        ("[1]", "a JSON list"),
        (without("input"), "input is missing"),
        (without("context"), "context is missing"),
        (without("answers"), "answers is missing"),
        (without("dataset"), "dataset is missing"),
        (LINE | {"answers": []}, "answers is no list"),
        (LINE | {"answers": "Ada"}, "answers is no list"),
        (LINE | {"context": 7}, "context is int"),
        (LINE | {"dataset": "imagenet"}, "'imagenet' is unknown"),
        (LINE | {"dataset": "trec"}, "all_classes is no list"),
        (LINE | {"dataset": "passage_retrieval_en"}, "names no paragraph"),
        *[(LINE | {"dataset": name}, f"{name} is Chinese") for name in CHINESE_DATASETS],
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_longbench_line_is_named_by_file_and_number(tmp_path, line, words):
    path = write(tmp_path / "bad.jsonl", LINE, "", line)
    with pytest.raises(ConfigError) as error:
        load_longbench(path)
    assert f"{path}, line 3: " in str(error.value) and words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "line, words", [({"outputs": ["1"]}, "input is missing"), ({"input": "x", "outputs": [1]}, "outputs is no list")]
)
def test_a_bad_ruler_line_is_named_by_file_and_number(tmp_path, line, words):
    path = write(tmp_path / "vt.jsonl", line)
    with pytest.raises(ConfigError, match=re.escape(f"{path}, line 1: {words}")):
        load_ruler(path)


def test_files_that_are_none_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_ruler(tmp_path / "absent.jsonl")
    with pytest.raises(ConfigError, match="is empty"):
        load_ruler(write(tmp_path / "empty.jsonl", ""))
    (tmp_path / "binary.jsonl").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match="line 1: no JSON in UTF-8"):
        load_ruler(tmp_path / "binary.jsonl")
    with pytest.raises(ConfigError, match="is not JSON"):
        load_longbench(write(tmp_path / "a.jsonl", LINE), write(tmp_path / "prompts.json", "{"))


def test_longbench_loses_its_middle_and_ruler_is_refused():
    """The official rule: the first and last int(max / 2) tokens."""
    encode = lambda text: [int(word) for word in text.split()]  # noqa: E731
    prompt = " ".join(map(str, range(100)))
    long = Sample("qasper", prompt, ("x",), None, 9, (), "longbench")
    question = benchmark_question(long, encode, 30)
    assert question.tokens == [*range(10), *range(90, 100)] and question.truncated
    whole = benchmark_question(long, encode, 109)
    assert whole.tokens == list(range(100)) and not whole.truncated
    with pytest.raises(ConfigError, match="100 tokens of vt and 9 new ones exceed the model's context of 30"):
        benchmark_question(Sample("vt", prompt, ("x",), None, 9, (), "ruler"), encode, 30)
