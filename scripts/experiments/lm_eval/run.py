"""lm-evaluation-harness on the demo model, dense and with EPS: needle questions, answered freely and by choice.

    pip install 'lm_eval[hf]'
    python scripts/experiments/lm_eval/run.py [--model DIR] [--documents 24] [--budgets 0.05,0.1] results/lm_eval.json

Writes a task of each kind to a folder of its own, runs the harness's command once with --model hf, and with
--model eps-hf at each budget, and keeps what it said (8 minutes on 2 cores). The choice is of log-likelihoods, which
are one dense forward each: EPS must change nothing there.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from tokenizers import Tokenizer

from eps_core.errors import ConfigError, exit_code, require
from eps_core.io.outputs import replacing
from eps_core.metrics.provenance import provenance
from eps_core.models.config import DEMO_MODEL
from eps_core.models.tokenizer import load_tokenizer
from eps_core.tasks.corpus import corpus
from eps_core.tasks.needle import NeedleDocument, draw_value, needle_document
from eps_core.tasks.sizing import bytes_per_token, fit

CHOICES = 4
COMMON = {"dataset_path": "json", "test_split": "test", "doc_to_text": "prompt", "target_delimiter": ""}
TASKS: dict[str, dict[str, Any]] = {
    "needle_said": {
        "output_type": "generate_until", "doc_to_target": "answer",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
    "needle_chosen": {
        "output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "place",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
}  # fmt: skip


def write_tasks(
    folder: Path, num_documents: int, num_tokens: int, tokenizer: Tokenizer, tasks: dict[str, dict[str, Any]] = TASKS
) -> None:
    """Write all tasks over the same documents of at most `num_tokens` tokens, as the harness reads them."""

    def encode(text: str, special: bool = True) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=special).ids)

    rng, text, lines = np.random.default_rng(0), corpus(), []
    for seed in range(num_documents):

        def make(num_bytes: int, seed: int = seed) -> NeedleDocument:
            return needle_document(text, num_bytes, seed, depth=(seed + 0.5) / num_documents, num_distractors=3)

        # lengths differ, so that a batch has rows of several lengths
        asked = num_tokens - 24 * (seed % 8)
        made = fit(
            make,
            lambda one, asked=asked: (len(encode(one.prompt)), asked),  # type: ignore[misc]
            int(asked * bytes_per_token(text, encode)),
            asked // 50,
        )
        require(made is not None, f"--tokens {num_tokens}: no document has so few: ask for more")
        assert made is not None
        values = {made.answer}
        while len(values) < CHOICES:
            values.add(draw_value(rng))
        choices = sorted(values)
        lines.append(
            {"prompt": made.prompt, "answer": made.answer, "choices": choices, "place": choices.index(made.answer)}
        )
    data = folder / "needles.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, task in tasks.items():
        whole = {"task": name, **COMMON, "dataset_kwargs": {"data_files": {"test": str(data)}}, **task}
        (folder / f"{name}.yaml").write_text(json.dumps(whole))  # JSON is YAML


def demo_tokenizer(folder: Path) -> Path:
    """The demo model's tokenizer with the names of its special tokens, which the harness asks for."""
    folder.mkdir()
    shutil.copy(DEMO_MODEL / "tokenizer.json", folder)
    names = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|eos|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))
    return folder


def run(
    module: str, model: str, model_args: str, tasks: Path, out: Path, *flags: str, python: str = sys.executable
) -> dict[str, Any]:
    """Return the harness's record of one run of every task in a folder."""
    command = [
        python, "-m", module, "run", "--model", model, "--model_args", model_args, "--include_path", str(tasks),
        "--tasks", *sorted(one.stem for one in tasks.glob("*.yaml")), "--output_path", str(out), *flags,
    ]  # fmt: skip
    done = subprocess.run(command, stdin=subprocess.DEVNULL)
    require(done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}: see what it said above")
    (written,) = out.rglob("results_*.json")
    report: dict[str, Any] = json.loads(written.read_text())
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="JSON file to write")
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="Hugging Face directory")
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=4095, help="of the longest prompt, in the model's own tokenizer")
    parser.add_argument("--batch", type=int, default=4, help="rows at once; shorter ones are padded on the left")
    parser.add_argument("--budgets", default="0.05,0.1", help="separated by commas")
    given = parser.parse_args()
    if find_spec("lm_eval") is None:
        raise ConfigError("lm-evaluation-harness is not installed: pip install 'lm_eval[hf]'")
    packages = ("lm_eval", "transformers", "torch")
    outcomes: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = f"pretrained={given.model},dtype=float32,max_length={given.tokens + 64}"
        if given.model == DEMO_MODEL:
            base += f",tokenizer={demo_tokenizer(folder / 'tokenizer')}"
        (folder / "tasks").mkdir()
        write_tasks(folder / "tasks", given.documents, given.tokens, load_tokenizer(given.model))
        for budget in (None, *map(float, given.budgets.split(","))):
            module, model, arguments = "lm_eval", "hf", base
            if budget is not None:
                module, model = "eps_cuda.integrations.lm_eval", "eps-hf"
                arguments += f",eps_method=rq,eps_budget={budget}"
            out, flags = folder / f"{model}-{budget}", ("--device", "cpu", "--batch_size", str(given.batch))
            report = run(module, model, arguments, folder / "tasks", out, *flags)
            outcomes.append({
                "model": model, "budget": budget,
                "needle_said": report["results"]["needle_said"]["exact_match,none"],
                "needle_chosen": report["results"]["needle_chosen"]["acc,none"],
                "seconds": round(float(report["total_evaluation_time_seconds"]), 1),
                "eps": report["config"].get("eps"),
            })  # fmt: skip
            require(
                outcomes[-1]["needle_chosen"] == outcomes[0]["needle_chosen"],
                f"choices went from {outcomes[0]['needle_chosen']} to {outcomes[-1]['needle_chosen']} right, where EPS "
                "does nothing: this is a fault of its own",
            )
    found = {
        "model": "demo" if given.model == DEMO_MODEL else str(given.model), "documents": given.documents,
        "prompt_tokens": given.tokens, "batch": given.batch,
        **provenance({name: version(name) for name in packages}), "sides": outcomes,
    }  # fmt: skip
    with replacing(given.output) as file:
        file.write(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    sys.exit(exit_code(main))
