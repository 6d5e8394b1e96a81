"""LongBench and RULER: metrics against values derived by hand from the official definitions, loaders and bad files."""

import json

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


def rouge(f):
    return pytest.approx(f, abs=1e-6)


LONG = " ".join(f"w{i}" for i in range(1200))  # the recursion of ROUGE is as deep as both texts are long


@pytest.mark.parametrize(
    "metric, texts, want",
    [
        # as in SQuAD: punctuation goes before articles, without a space in its place
        (normalize_answer, ("An  Apple-pie, the!",), "applepie"),
        (normalize_answer, ("The-end of a\tday",), "theend of day"),
        (normalize_answer, ("a.n",), ""),  # punctuation went first, and "an" is then an article
        (normalize_answer, ("banana",), "banana"),
        (normalize_answer, ("",), ""),
        (qa_f1_score, ("The cat sat.", "a cat sat down"), pytest.approx(0.8)),  # 2 of 2, 2 of 3: 2 * 1 * 2/3 / (5/3)
        (qa_f1_score, ("cat cat cat", "cat"), pytest.approx(0.5)),  # counted as often as in both: precision 1/3
        (qa_f1_score, ("CAT", "cat"), 1.0),
        (qa_f1_score, ("dog", "cat"), 0.0),
        (qa_f1_score, ("", "cat"), 0.0),
        (qa_f1_score, ("the", "the"), 0.0),  # nothing is left of either
        (rouge_score, ("the cat sat on the mat", "the cat lay on the mat"), rouge(0.8)),  # 4 of 5 different words each
        (rouge_score, ("a b c d", "a c d e f"), rouge(2 / 3)),  # 3 of 4 and 3 of 5
        (rouge_score, ("d c b a", "a b c d"), rouge(0.25)),  # order counts: one word in common
        (rouge_score, ("", "a"), rouge(0.0)),
        (rouge_score, (".", "a"), rouge(0.0)),
        (rouge_score, (LONG, "w1 w2"), 0.0),  # as in the official code
        (classification_score, ("Type: Animal", "Animal", ("Animal", "Food")), 1.0),
        (classification_score, ("Animal or Food", "Animal", ("Animal", "Food")), 0.5),
        (classification_score, ("Food", "Animal", ("Animal", "Food")), 0.0),
        (classification_score, ("nothing", "Animal", ("Animal", "Food")), 0.0),
        (classification_score, ("Food other", "Food other", ("Food", "Food other")), 1.0),  # a part of the answer
        # two parts in a row: the official loop removes the first while walking and so never looks at the second
        (classification_score, ("big red dog", "big red dog", ("big", "red", "big red dog")), 0.5),
        (classification_score, ("big red dog", "big red dog", ("big", "big red dog", "red")), 1.0),
        (retrieval_score, ("Paragraph 12", "Paragraph 12"), 1.0),
        (retrieval_score, ("12 or 3", "Paragraph 12"), 0.5),
        (retrieval_score, ("Paragraph 112", "Paragraph 12"), 0.0),
        (retrieval_score, ("none", "Paragraph 12"), 0.0),
        (count_score, ("5, no, 5; 7", "5"), pytest.approx(2 / 3)),
        (count_score, ("05", "5"), 0.0),
        (count_score, ("", "5"), 0.0),
        # fuzzywuzzy over difflib
        (code_sim_score, ("\n\n# comment\nx = `1`\nx = 1\ny = 2", "x = 1"), 1.0),
        (code_sim_score, ("abcd", "bcde"), 0.75),  # 2 * 3 / 8
        (code_sim_score, ("abc", "abd"), 0.67),  # 2 * 2 / 6 in whole percents
        # Python's documentation of difflib gives these two; a longest common subsequence would give 0.5 for both
        (code_sim_score, ("tide", "diet"), 0.25),
        (code_sim_score, ("diet", "tide"), 0.5),
        (code_sim_score, ("# only\n// comments", "x = 1"), 0.0),
        (code_sim_score, ("# only", ""), 1.0),
        (code_sim_score, ("x", ""), 0.0),
        (string_match_all, ("It is ABC and 12.", ("abc", "12", "99", "x")), 0.5),
        (string_match_part, ("It is ABC.", ("abc", "99")), 1.0),
        (string_match_part, ("It is ABC.", ("98", "99")), 0.0),
        (score_ruler, ("qa_1", "Ada", ("Ada", "Lovelace")), 1.0),
        (score_ruler, ("niah_multivalue", "Ada", ("Ada", "Lovelace")), 0.5),
        (score_ruler, ("niah_single_1", "12\x0734", ("1234",)), 0.0),  # control characters become line ends
        # the best answer, and of few-shot tasks the first line alone
        (score_longbench, ("triviaqa", "\nParis\nQuestion: next", ("Lyon", "Paris")), 1.0),
        (score_longbench, ("narrativeqa", "\nParis\nLyon", ("Paris",)), pytest.approx(2 / 3)),
        (score_longbench, ("trec", "Animal\nFood", ("Animal",), ("Animal", "Food")), 1.0),
        (score_longbench, ("samsum", "a b\nc", ("a b",)), rouge(1.0)),
        (score_longbench, ("gov_report", "a b\nc", ("a b",)), rouge(0.8)),
        (score, (Sample("lcc", "", ("x = 1",), source="longbench"), "x = 1"), 1.0),
        (score, (Sample("vt", "", ("AB", "CD")), "cd"), 0.5),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_metrics_give_the_official_numbers(metric, texts, want):
    assert metric(*texts) == want


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
    "load, line, words",
    [
        *(
            (load_longbench, line, words)
            for line, words in (
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
                *((LINE | {"dataset": name}, f"{name} is Chinese") for name in CHINESE_DATASETS),
            )
        ),
        (load_ruler, {"outputs": ["1"]}, "input is missing"),
        (load_ruler, {"input": "x", "outputs": [1]}, "outputs is no list"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, load, line, words):
    good = LINE if load is load_longbench else {"input": "x", "outputs": ["1"]}
    path = write(tmp_path / "bad.jsonl", good, "", line)
    with pytest.raises(ConfigError) as error:
        load(path)
    assert f"{path}, line 3: " in str(error.value) and words in str(error.value) and "\n" not in str(error.value)


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
