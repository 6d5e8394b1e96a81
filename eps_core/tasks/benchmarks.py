"""LongBench v1 and RULER files that a user has on disk, and the metrics that their authors score them with.

The metrics give the official numbers, quirks included, and are written from the definitions: LongBench's (Bai et al.
2023, THUDM/LongBench, metrics.py and eval.py) and RULER's (Hsieh et al. 2024, NVIDIA/RULER, eval/synthetic). All are
shares, 0 to 1, higher is better; the papers print them times 100.
"""

import re
import string
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from difflib import SequenceMatcher
from itertools import islice
from pathlib import Path
from typing import Any

from eps_core.errors import ConfigError, install, shown
from eps_core.io import inputs
from eps_core.tasks.needle import Sample

# of LongBench v1: they need a Chinese word splitter, and prompts in Chinese
CHINESE_DATASETS = ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")
# LongBench scores the first line alone of these: few-shot prompts let a model go on with a next example
FIRST_LINE_DATASETS = ("trec", "triviaqa", "samsum", "lsht")
# LongBench gives these to no model as a chat: examples to go on with, and code to complete
NO_CHAT = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
# RULER's tokens_to_generate, by the start of the task's name
_RULER_NEW_TOKENS = {
    "niah": 128, "vt": 30, "variable_tracking": 30, "cwe": 120, "common_words": 120, "fwe": 50, "freq_words": 50,
    "qa": 32,
}  # fmt: skip
_RULER_DEFAULT_NEW_TOKENS = 128


def normalize_answer(text: str) -> str:
    """SQuAD's: lower case, ASCII punctuation removed, articles replaced by a space, white space collapsed."""
    bare = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def qa_f1_score(prediction: str, answer: str) -> float:
    """F1 of the two bags of normalized words. 0 where either is empty, both included."""
    predicted, wanted = normalize_answer(prediction).split(), normalize_answer(answer).split()
    common = (Counter(predicted) & Counter(wanted)).total()
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def rouge_score(prediction: str, answer: str) -> float:
    """ROUGE-L F of the `rouge` package, which counts each different word once.

    As in LongBench a text that the package refuses (an empty one, or one too long for its recursion) scores 0.
    """
    try:
        from rouge import Rouge
    except ImportError as error:
        raise ConfigError(f"ROUGE needs the package rouge: {install('eval')}") from error
    try:
        return float(Rouge().get_scores([prediction], [answer], avg=True)["rouge-l"]["f"])
    except (ValueError, RecursionError):
        return 0.0


def classification_score(prediction: str, answer: str, all_classes: tuple[str, ...]) -> float:
    """1 / (classes named in the prediction) where the right one is among them, else 0.

    Classes whose name is a part of the right class's name do not count. The official loop takes them out of the list
    that it walks, so that the class after a removed one is not looked at; that is kept, since it changes scores.
    """
    named = [name for name in all_classes if name in prediction]
    place = 0
    while place < len(named):
        if named[place] in answer and named[place] != answer:
            named.remove(named[place])  # and step on, past the one that has moved here
        place += 1
    return 1.0 / len(named) if answer in named else 0.0


def retrieval_score(prediction: str, answer: str) -> float:
    """The share of the prediction's numbers that are N of the answer's first `Paragraph N`."""
    found = re.search(r"Paragraph (\d+)", answer)
    if found is None:
        raise ConfigError(f"the answer {answer!r} names no paragraph: write it as 'Paragraph 7'")
    return count_score(prediction, found.group(1))


def count_score(prediction: str, answer: str) -> float:
    """The share of the prediction's numbers that are the answer, compared as text: 07 is not 7."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def code_sim_score(prediction: str, answer: str) -> float:
    """Similarity of the prediction's first line without `, # or // (the empty line where there is none) and the answer.

    LongBench takes it from fuzzywuzzy without python-Levenshtein, which is difflib's ratio in whole percents. With
    python-Levenshtein, or from rapidfuzz, the figure is another one: an insert-and-delete distance, never lower.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    if not line or not answer:
        return float(line == answer)
    return round(100 * SequenceMatcher(None, line, answer).ratio()) / 100


def string_match_all(prediction: str, answers: tuple[str, ...]) -> float:
    """RULER's: the share of the answers that the prediction contains, whatever the case."""
    return sum(answer.lower() in prediction.lower() for answer in answers) / len(answers)


def string_match_part(prediction: str, answers: tuple[str, ...]) -> float:
    """RULER's for qa: 1 where the prediction contains any of the answers, whatever the case."""
    return float(any(answer.lower() in prediction.lower() for answer in answers))


# LongBench v1, English and code: metric, tokens to generate, our prompt
_QA = "Text:\n{context}\n\nAnswer in a few words, from the text above alone.\nQuestion: {input}\nAnswer:"
_SUMMARY = "{context}\n\nA summary of the text above:\n"
_EXAMPLES = "{context}\n{input}"
_CODE = "{context}{input}"
_DATASETS: dict[str, tuple[Callable[..., float], int, str]] = {
    "narrativeqa": (qa_f1_score, 128, _QA),
    "qasper": (qa_f1_score, 128, _QA),
    "multifieldqa_en": (qa_f1_score, 64, _QA),
    "hotpotqa": (qa_f1_score, 32, _QA),
    "2wikimqa": (qa_f1_score, 32, _QA),
    "musique": (qa_f1_score, 32, _QA),
    "gov_report": (rouge_score, 512, _SUMMARY),
    "qmsum": (rouge_score, 512, "{context}\n\nOn the meeting above.\nQuery: {input}\nAnswer:"),
    "multi_news": (rouge_score, 512, _SUMMARY),
    "trec": (classification_score, 64, _EXAMPLES),
    "triviaqa": (qa_f1_score, 32, _EXAMPLES),
    "samsum": (rouge_score, 128, _EXAMPLES),
    "passage_count": (count_score, 32, "{context}\n\nThe number of different paragraphs above is: "),
    "passage_retrieval_en": (
        retrieval_score, 32,
        "{context}\n\nAbstract: {input}\nThe paragraph that it is the abstract of, as in \"Paragraph 1\", is: ",
    ),
    "lcc": (code_sim_score, 64, _CODE),
    "repobench-p": (code_sim_score, 64, _CODE),
}  # fmt: skip
LONGBENCH_METRICS = {name: metric for name, (metric, _, _) in _DATASETS.items()}


def score_longbench(
    dataset: str, prediction: str, answers: tuple[str, ...], all_classes: tuple[str, ...] = ()
) -> float:
    """The best of the answers by the dataset's metric, on the first line alone where LongBench takes that."""
    metric = LONGBENCH_METRICS[dataset]
    if dataset in FIRST_LINE_DATASETS:
        prediction = prediction.lstrip("\n").split("\n")[0]
    more = (all_classes,) if metric is classification_score else ()
    return max((metric(prediction, answer, *more) for answer in answers), default=0.0)


def score_ruler(task: str, prediction: str, answers: tuple[str, ...]) -> float:
    """RULER's score of one prediction; the metric follows from the task's name. Control characters end no match: as
    in RULER they become line ends first."""
    prediction = re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip()
    return (string_match_part if task.startswith("qa") else string_match_all)(prediction, answers)


def score(sample: Sample, prediction: str) -> float:
    """A prediction's score, 0 to 1, by the sample's own benchmark; generated tasks are scored as RULER's."""
    if sample.source == "longbench":
        return score_longbench(sample.task, prediction, sample.answers, sample.all_classes)
    return score_ruler(sample.task, prediction, sample.answers)


def load_longbench(path: Path, prompts: Path | None = None, most_samples: int | None = None) -> list[Sample]:
    """The samples of a LongBench v1 JSONL, in order; of each dataset in it the first `most_samples`.

    `prompts`: LongBench's own config/dataset2prompt.json. Without it prompts are ours, and scores are comparable
    between methods but not with published ones. Raises ConfigError naming file, line and what is wrong.
    """
    official = inputs.read_object(prompts, "prompts file", "give LongBench's dataset2prompt.json") if prompts else {}
    samples = []
    left: dict[str, int] = {}
    for place, record in _records(path):
        dataset = _text(place, record, "dataset").removesuffix("_e")  # LongBench-E is scored as LongBench
        if dataset in CHINESE_DATASETS:
            raise ConfigError(f"{place}: dataset {dataset} is Chinese and not supported: use an English one")
        if dataset not in _DATASETS:
            raise ConfigError(f"{place}: dataset {shown(dataset)} is unknown: known are {', '.join(_DATASETS)}")
        metric, max_new_tokens, prompt = _DATASETS[dataset]
        if left.setdefault(dataset, most_samples or sys.maxsize) == 0:
            continue
        left[dataset] -= 1
        if prompts is not None:
            if not isinstance(official.get(dataset), str):
                raise ConfigError(f"{prompts}: no prompt for dataset {dataset}: take LongBench's dataset2prompt.json")
            prompt = official[dataset]
        answers = _texts(place, record, "answers")
        if metric is retrieval_score and not all(re.search(r"Paragraph \d+", answer) for answer in answers):
            raise ConfigError(f"{place}: an answer names no paragraph: write it as 'Paragraph 7'")
        classes = _texts(place, record, "all_classes") if metric is classification_score else ()
        fields = {name: _text(place, record, name) for name in ("context", "input")}
        # in one pass, and not by str.format: an official prompt may hold other braces
        parts = re.split(r"\{(context|input)\}", prompt)
        parts[1::2] = [fields[name] for name in parts[1::2]]
        samples.append(Sample(dataset, "".join(parts), answers, None, max_new_tokens, classes, "longbench"))
    return samples


def load_ruler(path: Path, most_samples: int | None = None) -> list[Sample]:
    """The first `most_samples` of a RULER JSONL, all of them where it is None, in order. The task is the file's name,
    or its folder's where RULER calls the file validation or test. Raises ConfigError naming file, line and fault."""
    task = path.parent.resolve().name if path.stem in ("validation", "test") else path.stem
    limits = (tokens for start, tokens in _RULER_NEW_TOKENS.items() if task.startswith(start))
    max_new_tokens = next(limits, _RULER_DEFAULT_NEW_TOKENS)
    samples = []
    for place, record in islice(_records(path), most_samples):
        prefix = _text(place, record, "answer_prefix") if "answer_prefix" in record else ""
        prompt = _text(place, record, "input") + prefix
        answers = _texts(place, record, "outputs")
        samples.append(Sample(task, prompt, answers, None, max_new_tokens, (), "ruler", prefix.lstrip()))
    return samples


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """("file, line n", object) of every line that is not blank; at least one."""
    empty = True
    for place, record in inputs.read_jsonl(path, "benchmark file", "give a JSONL file", kept=False):
        empty = False
        yield place, record
    if empty:
        raise ConfigError(f"benchmark file {path} is empty: give one JSON object a line")


def _value(place: str, record: dict[str, Any], key: str) -> Any:
    if key not in record:
        raise ConfigError(f"{place}: {key} is missing: add it, or check that the file is of this benchmark")
    return record[key]


def _text(place: str, record: dict[str, Any], key: str) -> str:
    value = _value(place, record, key)
    if not isinstance(value, str):
        raise ConfigError(f"{place}: {key} is {type(value).__name__}, not a text: fix the line")
    return value


def _texts(place: str, record: dict[str, Any], key: str) -> tuple[str, ...]:
    value = _value(place, record, key)
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{place}: {key} is no list of at least one text: fix the line")
    return tuple(value)
