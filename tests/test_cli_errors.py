"""Every mistake a user can make with eps-proto: exit code 2, one line that names it, nothing half-written."""

import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import tokenizers
from command import call, refused
from safetensors.numpy import load_file, save_file
from test_cli import PROMPT
from test_inputs import make_capture, recaptured

from eps_core.cli import main
from eps_core.decode.heads import HeadPolicy
from eps_core.evaluation.calibrate import write_policy

# every mistake: what is wrong, and words that its one line must hold
MISTAKES: dict[str, tuple[list, str]] = {
    "no-command": ([], "Missing command"),
    "unknown-command": (["walk"], "walk"),
    "unknown-flag": (["run", "--eps-magic", 1], "--eps-magic"),
    "unknown-method": (["run", "--eps-method", "svd"], "svd"),
    "unknown-scope": (["run", "--eps-scope", "layer"], "layer"),
    "unknown-backend": (["run", "--backend", "jax"], "jax"),
    "unknown-device": (["run", "--device", "tpu"], "tpu"),
    "unknown-dtype": (["run", "--dtype", "int8"], "int8"),
    "unknown-kv-dtype": (["run", "--kv-dtype", "fp8"], "fp8"),
    "evict-without-keep": (["run", "--kv-evict", "snapkv"], "must know how much to keep: add --kv-keep 0.25"),
    "keep-without-evict": (["run", "--kv-keep", "0.5"], "--kv-keep means nothing without eviction"),
    "unknown-evict": (["run", "--kv-evict", "lru", "--kv-keep", "0.5"], "'lru' is not one of 'off', 'streaming'"),
    "evict-by-the-future": (["run", "--kv-evict", "oracle", "--kv-keep", "0.5"], "'oracle' is not one of"),
    "keep-nothing": (["run", "--kv-evict", "h2o", "--kv-keep", "0"], "kv-keep 0.0 keeps nothing"),
    "keep-a-share-of-the-prompt": (["run", "--kv-evict", "rswa", "--kv-keep", "0.5"], "of which rswa keeps all: give"),
    "keep-the-prompt's-first": (
        ["run", "--kv-evict", "rswa", "--kv-keep", "64", "--kv-sink-tokens", "4"], "nothing to rswa, which keeps"),
    "evict-never": (["run", "--kv-evict", "rswa", "--kv-keep", "64", "--kv-every", 0], "0 never evicts, and rswa does"),
    "keep-a-part-of-a-row": (["run", "--kv-evict", "h2o", "--kv-keep", "1.5"], "neither a share up to 1 nor a whole"),
    "evict-and-verify": (
        ["run", "--kv-evict", "h2o", "--kv-keep", "0.5", "--eps-verify", "tokens"], "each other, as a dense pass"),
    "evict-and-audit": (
        ["run", "--kv-evict", "h2o", "--kv-keep", "0.5", "--audit-every", "2"], "exclude each other, as an audit"),
    "evict-in-an-engine": (
        ["run", "--engine", "transformers", "--kv-evict", "h2o", "--kv-keep", "0.5"], "as its engine owns the cache"),
    "evict-in-a-pool": (["run", "--kv-evict", "h2o", "--kv-keep", "0.5", "--pool-tokens", "9000"], "is made for what"),
    "evict-once-and-again": (["run", "--kv-evict", "snapkv", "--kv-keep", "0.5", "--kv-every", "9"], "at the end of"),
    "compact-never": (
        ["run", "--kv-evict", "h2o", "--kv-keep", "0.5", "--kv-every", "0", "--kv-compact", "fill"], "drop one"),
    "evict-all": (["run", "--kv-evict", "h2o", "--kv-keep", "0.5", "--kv-recent-tokens", "0"], "let a head go empty"),
    "evict-and-union": (
        ["run", "--kv-evict", "h2o", "--kv-keep", "0.5", "--eps-scope", "union"], "eps-scope union reads the same in"),
    "codes-about-no-mean": (["run", "--eps-mean-tokens", "0"], "eps-mean-tokens 0 is not 32 or 64"),
    "bits-of-codes": (["run", "--eps-bits", "2"], "No such option"),
    "unknown-verify": (["run", "--eps-verify", "bits"], "'bits' is not one of 'off', 'tokens'"),
    "unknown-kv-bits": (["run", "--kv-bits", "5"], "'5' is not one of 16, 8, fp8, 4, nvfp4"),
    "too-many-kv-bits": (["info", "--kv-bits", "8,8,4"], "nor two of them for K and V"),
    "nvfp4-of-broken-blocks": (
        ["info", "--head-dim", 40, "--kv-bits", "fp8,nvfp4"], "head dim 40 is no multiple of 16: use --kv-bits fp8"),
    "kv-bits-of-an-odd-head-dim": (["info", "--head-dim", 33, "--kv-bits", "8,4"], "head dim 33 is odd"),
    "absent-device": (["run", "--backend", "numpy", "--device", "cuda", "--prompt", "x"], "device cuda"),
    "unknown-kernels": (["run", "--kernels", "cutlass"], "cutlass"),
    "absent-kernels": (
        ["run", "--backend", "numpy", "--kernels", "metal", "--prompt", "x"],
        "kernels metal are not there for this backend on cpu: choose one of auto, arrays",
    ),
    "min-context-of-no-number": (["run", "--eps-min-context", "often"], "'often' is neither a whole number nor auto"),
    "min-context-of-evaluate": (["evaluate", "--eps-min-context", "auto"], "auto belongs to `eps-proto run`"),
    "no-new-tokens": (["run", "--max-new-tokens", 0], "--max-new-tokens"),
    "no-chunk": (["run", "--prefill-chunk", 0], "--prefill-chunk"),
    "no-pool": (["run", "--pool-tokens", 0], "--pool-tokens"),
    "nameless-cache-dir": (["run", "--cache-dir", "", "--prompt", "x"], "--cache-dir '' has no characters"),
    "negative-temperature": (["run", "--temperature", -1], "temperature -1.0"),
    "top-p-range": (["run", "--temperature", 1, "--top-p", 1.5], "top-p 1.5"),
    "top-p-greedy": (["run", "--top-p", 0.5], "--temperature"),
    "negative-seed": (["run", "--seed", -1], "'-1' is not a whole number from 0"),
    "negative-eps-seed": (["run", "--eps-seed", -1], "eps-seed -1"),
    "pool-of-no-machine": (["run", "--model", "MODEL", "--prompt", PROMPT, "--pool-tokens", 2**31 - 1], "does not fit"),
    "metrics-and-csv-alike-in-two-spellings": (["run", "--csv", "new.txt", "--metrics", "./x/../new.txt"], "new.txt"),
    "prompt-of-no-text": (["run", "--prompt", "a\udcff"], "not valid Unicode"),
    "tokenizer-of-another-model": (["run", "--model", "SMALL", "--prompt", "zzz"], "of different models"),
    "info-no-blocks": (["info", "--eps-group-blocks", 0], "eps-group-blocks 0"),
    "no-budget": (["run", "--eps-budget", 0], "eps-budget 0.0"),
    "part-of-a-token": (["run", "--eps-budget", 1.5], "eps-budget 1.5 is no share"),
    "budget-of-another-policy": (
        ["run", "--eps-policy", "threshold", "--eps-top-pages", 4, "--eps-budget", 0.2], "--eps-policy topk"),
    "two-budgets": (["run", "--eps-top-pages", 5, "--eps-budget", 0.2], "--eps-top-pages"),
    "unknown-policy": (["run", "--eps-policy", "share"], "'share' is not one of 'topk', 'threshold'"),
    "epsilon-of-nothing": (["run", "--eps-epsilon", 0.1], "belongs to --eps-strict"),
    "strict-epsilon-range": (["run", "--eps-bound-bits", 8, "--eps-strict", "--eps-epsilon", 1.5], "eps-epsilon 1.5"),
    "strict-jl": (
        ["run", "--eps-method", "jl", "--eps-strict"],
        "a random projection can miss a key entirely; add --eps-bound-bits 8",
    ),
    "strict-meanstd": (
        ["run", "--eps-method", "meanstd", "--eps-strict"],
        "mean plus deviation is below the largest logit at times; add --eps-bound-bits 8",
    ),
    "strict-rq": (
        ["run", "--eps-strict"], "method rq has none without what they need in store: add --eps-bound-bits 8"),
    "strict-with-a-cap": (
        ["run", "--eps-method", "box", "--eps-strict", "--eps-top-pages", 5], "eps-top-pages 5 forbids it: drop one"),
    "retrieval-heads-of-no-policy": (["run", "--eps-heads", "retrieval"], "--eps-head-policy"),
    "head-policy-alone": (["run", "--eps-head-policy", "POLICY"], "--eps-heads retrieval"),
    "head-policy-of-another-model": (
        ["run", "--eps-heads", "retrieval", "--eps-head-policy", "POLICY"], "another model"),
    "absent-head-policy": (["run", "--eps-heads", "retrieval", "--eps-head-policy", "absent.json"], "absent.json"),
    "audit-factor-of-no-audit": (["run", "--eps-audit-factor", 5], "--audit-every"),
    "audit-off-of-no-audit": (["run", "--eps-audit-off"], "--audit-every"),
    "audit-factor-range": (["run", "--eps-audit-every", 2, "--eps-audit-factor", 0.5], "--audit-factor': '0.5'"),
    "audit-of-off": (["run", "--eps-method", "off", "--eps-audit-every", 2], "choose a --method"),
    "audit-every-range": (["run", "--eps-audit-every", -1], "--audit-every"),
    "bound-bits-range": (["run", "--eps-bound-bits", 3], "eps-bound-bits 3 is not 4 or 8"),
    "refine-range": (["run", "--eps-rescore", 2], "eps-rescore 2.0 is outside [0, 1]"),
    "negative-refine": (["run", "--eps-rescore", -0.1], "eps-rescore -0.1 is outside [0, 1]"),
    "refine-of-another-method": (["run", "--eps-method", "box", "--eps-rescore", 0.5], "not of method box"),
    "report-of-an-empty-file": (["report", "/dev/null", "-o", "new.html"], "/dev/null"),
    "alpha-range": (["run", "--eps-policy", "threshold", "--eps-top-pages", 4, "--eps-alpha", 0.5], "eps-alpha 0.5"),
    "threshold-without-m": (["run", "--eps-policy", "threshold"], "eps-top-pages"),
    "no-top-pages": (["run", "--eps-top-pages", 0], "eps-top-pages 0"),
    "negative-guard": (["run", "--eps-recent-tokens", -1], "eps-recent-tokens -1"),
    "negative-groups": (["run", "--eps-first-n", -1], "--eps-first-n -1"),
    "guard-twice": (["run", "--eps-last-n", 1, "--eps-recent-tokens", 128], "--eps-last-n"),
    "group-twice": (["run", "--eps-group-size", 4, "--eps-group-blocks", 1], "same thing twice"),
    "odd-group": (["run", "--eps-group-size", 12], "12 tokens"),
    "huge-group": (["run", "--eps-group-blocks", 64], "1024 tokens"),
    "huge-block": (["run", "--block-size", 300], "block-size 300"),
    "dim-of-another-method": (["run", "--eps-method", "box", "--eps-dim", 2], "eps-dim 2"),
    "dim-range": (["run", "--eps-method", "jl", "--eps-dim", 100], "eps-dim 100"),
    "bounds-of-another-method": (["run", "--eps-method", "box", "--eps-rq-bounds"], "rq"),
    "negative-min-context": (["run", "--eps-min-context", -5], "eps-min-context -5"),
    "flags-while-off": (["run", "--model", "MODEL", "--prompt", "x", "--eps-budget", 0.2], "--method"),
    "kl-while-off": (["run", "--eps-method", "off", "--kl"], "--kl"),
    "kl-without-baseline": (["run", "--no-baseline", "--kl"], "--kl"),
    "nothing-to-run": (["run", "--eps-method", "off", "--no-baseline"], "--no-baseline"),
    "two-prompts": (["run", "--prompt", "x", "--prompt-file", "FILE"], "--prompt-file"),
    "no-prompt": (["run", "--model", "MODEL"], "--prompt"),
    "empty-prompt": (["run", "--prompt", ""], "prompt is empty"),
    "empty-prompt-file": (["run", "--prompt-file", "/dev/null"], "prompt file /dev/null is empty"),
    "absent-prompt-file": (["run", "--prompt-file", "absent.txt"], "absent.txt"),
    "prompt-file-is-a-directory": (["run", "--prompt-file", "."], "prompt file ."),
    "prompt-file-is-binary": (["run", "--prompt-file", "BINARY"], "UTF-8 at byte 1"),
    "absent-model": (["run", "--model", "absent", "--prompt", "x"], "absent"),
    "model-without-weights": (["run", "--model", "EMPTY", "--prompt", "x"], "no weights"),
    "model-with-corrupt-weights": (["run", "--model", "CORRUPT", "--prompt", "x"], "truncated or corrupt"),
    "model-of-another-kind": (["run", "--model", "GPT2", "--prompt", "x"], "gpt2"),
    "model-that-overflows": (["run", "--model", "NAN", "--prompt", "xyz" * 9, "--eps-method", "rq"], "NaN or Inf"),
    "calibrate-of-nan-logits": (
        ["calibrate", "-o", "p.json", "--model", "NORM", "--context", 200, "--steps", 2],
        "NaN or Inf in the logits at position 201: the weights are damaged"),
    "evaluate-of-nan-logits": (
        ["evaluate", "--model", "NORM", "--tasks", "none", "--context", 100, "--samples", 1, "--backend", "numpy"],
        "NaN or Inf in the logits at position 101: the weights are damaged"),
    "evaluate-in-no-room": (
        ["evaluate", "--context", 20, "--backend", "numpy"],
        "at 20 tokens: a prompt of 19 bytes has no room for its question and needles, 100 bytes: raise"),
    "evaluate-on-a-short-text": (
        ["evaluate", "--text", "FILE", "--tasks", "none", "--context", 100, "--backend", "numpy"],
        "164 bytes of text and 400 to choose from are wanted and the text has 1: give a longer --text or lower"),
    "evaluate-a-context-of-no-task": (
        ["evaluate", "--tasks", "none", "--text-steps", 0, "--longbench", "FILE", "--context", 99],
        "--context means nothing to benchmark files"),
    "calibrate-of-streaming-heads-alone": (
        ["calibrate", "-o", "p.json", "--context", 144],
        "context of 144 tokens lies within the 16 sink and 128 recent tokens of a streaming head, so every head would "
        "be one: raise --context above 144, with a --text as long, or lower --sink-tokens or --recent-tokens"),
    "longer-than-the-model": (["run", "--model", "MODEL", "--prompt-file", "LONG"], "context of 512 tokens"),
    "longer-than-the-pool": (
        ["run", "--model", "MODEL", "--prompt", PROMPT, "--pool-tokens", 100, "--eps-method", "jl"],
        "3 pool groups of 128 tokens, and pool-tokens 100 holds 0: raise it to 384",
    ),
    "metrics-in-no-directory": (["run", "--metrics", "absent/m.jsonl"], "absent"),
    "metrics-is-a-directory": (["run", "--metrics", "."], "is a directory"),
    "csv-in-no-directory": (["run", "--csv", "absent/m.csv"], "absent"),
    "metrics-and-csv-alike": (["run", "--csv", "new.txt", "--metrics", "new.txt"], "new.txt"),
    "info-shape-twice": (["info", "--model", "MODEL", "--layers", 4], "--layers"),
    "info-no-layers": (["info", "--layers", 0], "--layers"),
    "info-group-twice": (["info", "--eps-group-size", 4, "--eps-group-blocks", 1], "same thing twice"),
    "info-absent-model": (["info", "--model", "absent"], "absent"),
    "capture-of-a-folder": (["replay", "."], "capture . cannot be read (Is a directory)"),
    "capture-truncated": (["replay", "TRUNCATED"], "truncated"),
    "capture-no-safetensors": (["replay", "TEXT"], "TEXT"),
    "capture-absent": (["replay", "absent.safetensors"], "absent.safetensors"),
    "capture-foreign": (["replay", "FOREIGN"], "no EPS capture"),
    "capture-other-format": (["replay", "OTHER"], "format 99"),
    "capture-tensors-of-another-shape": (["replay", "RESHAPED"], "layers.0.k"),
    "capture-contradicts-itself": (["replay", "ODD"], "contradicts itself"),
    "capture-unknown-layer": (["replay", "GOOD", "--layers", "0,7"], "layer 7"),
    "capture-unknown-method": (["replay", "GOOD", "--methods", "svd@4"], "svd"),
    "capture-off": (["replay", "GOOD", "--methods", "off"], "off"),
    "capture-no-size": (["replay", "GOOD", "--methods", "rq@x"], "rq@x"),
    "capture-budgets-twice": (["replay", "GOOD", "--budgets", "0.1", "--eps-budget", 0.1], "--budgets"),
    "capture-budgets-of-another-policy": (
        ["replay", "GOOD", "--eps-policy", "threshold", "--eps-top-pages", 4, "--budgets", "0.1"], "--budgets"),
    "capture-head-policy-alone": (["replay", "GOOD", "--eps-head-policy", "POLICY"], "--eps-heads"),
    "capture-head-policy-of-another-model": (
        ["replay", "GOOD", "--eps-heads", "retrieval", "--eps-head-policy", "POLICY"], "another model"),
    "capture-bad-budget": (["replay", "GOOD", "--budgets", "0.1,0"], "eps-budget 0"),
    "capture-nothing-to-replay": (["replay"], "CAPTURE"),
    "capture-model-has-no-such-layer": (["capture", "-o", "new", "--layers", "0,9"], "layer 9"),
    "capture-longer-than-the-text": (["capture", "-o", "new", "--text", "TEXT"], "longer --text"),
    "capture-longer-than-the-model": (["capture", "-o", "new", "--context", 99999], "16384"),
    "capture-no-text": (["capture", "-o", "new", "--text", "absent.txt"], "absent.txt"),
    "capture-no-directory": (["capture", "-o", "absent/new"], "absent"),
    "capture-no-output": (["capture"], "-o"),
    "capture-flags-while-off": (["capture", "-o", "new", "--eps-budget", 0.2], "--method"),
    "capture-absent-model": (["capture", "-o", "new", "--model", "absent"], "absent"),
    "calibrate-no-output": (["calibrate"], "-o"),
    "calibrate-no-directory": (["calibrate", "-o", "absent/p.json"], "absent"),
    "calibrate-off": (["calibrate", "-o", "p.json", "--eps-method", "off"], "off"),
    "calibrate-share": (["calibrate", "-o", "p.json", "--streaming-share", 2], "--streaming-share"),
    "calibrate-fraction": (["calibrate", "-o", "p.json", "--dense-fraction", -1], "--dense-fraction"),
    "calibrate-absent-model": (["calibrate", "-o", "p.json", "--model", "absent"], "absent"),
    "calibrate-odd-group": (["calibrate", "-o", "p.json", "--eps-group-size", 12], "12 tokens"),
    "calibrate-longer-than-the-model": (["calibrate", "-o", "p.json", "--context", 99999], "16384"),
}  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the names in capitals of MISTAKES stand for."""
    root = tmp_path_factory.mktemp("places")
    model = tiny_models.save_model("llama2-bf16-sharded", root / "MODEL")
    paths = {name: shutil.copytree(model, root / name) for name in ("EMPTY", "CORRUPT", "GPT2", "NAN", "NORM", "SMALL")}
    for shard in paths["EMPTY"].glob("model*"):
        shard.unlink()
    shard = sorted(paths["CORRUPT"].glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_tokens([*(f"<{token}>" for token in range(100)), "zzz"])
    tokenizer.save(str(paths["SMALL"] / "tokenizer.json"))
    (paths["GPT2"] / "config.json").write_text('{"model_type": "gpt2"}')
    for shard in paths["NAN"].glob("*.safetensors"):
        data = shard.read_bytes()
        header = 8 + int.from_bytes(data[:8], "little")
        shard.write_bytes(data[:header] + b"\xc0\x7f" * ((len(data) - header) // 2))  # bfloat16 NaN
    for shard in paths["NORM"].glob("*.safetensors"):
        tensors = load_file(shard)
        if "model.norm.weight" in tensors:
            tensors["model.norm.weight"][0] = np.nan
            save_file(tensors, shard)
    heads = (((1.0,),) * 2,) * 4, ((0.5,) * 2,) * 4, ((0.5,) * 2,) * 4
    policy = HeadPolicy(
        1, "other", "00", 4, 2, 64, {}, (1.0,), *heads, (("retrieval",) * 2,) * 4, (), (("sparse",) * 2,) * 4
    )
    write_policy(root / "POLICY", policy)
    (root / "FILE").write_text("x")
    (root / "LONG").write_text("x" * 600)
    (root / "BINARY").write_bytes(b"a\xff\xfe")
    data = make_capture(root / "GOOD").read_bytes()
    (root / "TRUNCATED").write_bytes(data[:-100])
    (root / "TEXT").write_text("no safetensors at all")
    save_file({"x": np.zeros(3, np.float32)}, root / "FOREIGN")
    recaptured(root / "GOOD", root / "OTHER", lambda info: info | {"format_version": 99})
    recaptured(root / "GOOD", root / "ODD", lambda info: info | {"num_kv_heads": 3})
    recaptured(root / "GOOD", root / "RESHAPED", dict, {"layers.0.k": lambda keys: keys[:-1]})
    return {path.name: str(path) for path in root.iterdir()}


# by process: what Python itself makes of an error; the others in this one, where they take no time
IN_A_PROCESS = ("unknown-flag", "no-budget", "longer-than-the-pool", "prompt-of-no-text", "metrics-is-a-directory")


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(name: str, places: dict[str, str], tmp_path: Path) -> None:
    args, words = MISTAKES[name]
    command, more = args[:1], []
    if command == ["run"] and "--metrics" not in args and "--csv" not in args:
        more = ["--metrics", "m.jsonl", "--csv", "m.csv"]
    if command == ["replay"]:
        more = ["-o", "new.jsonl"]
    if command in (["run"], ["capture"], ["replay"], ["calibrate"]) and "--backend" not in args:
        more += ["--backend", "numpy"]
    line = [places.get(str(arg), arg) for arg in args] + more
    if name not in IN_A_PROCESS:
        refused(line, tmp_path, words)
        return
    done = call(*line, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == "" and not list(tmp_path.iterdir())
    assert re.fullmatch(r"error: [^\n]+\n", done.stderr) and words in done.stderr


@pytest.mark.parametrize(
    "fault", [MemoryError(), RuntimeError("DefaultCPUAllocator: not enough memory:\n you tried to allocate")], ids=str
)
def test_a_machine_without_memory_is_one_line(
    fault: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise fault

    monkeypatch.setattr("eps_core.evaluation.compare.run", full)
    monkeypatch.setattr(sys, "argv", ["eps-proto", "run"])
    with pytest.raises(SystemExit) as end:
        main.main()
    assert end.value.code == 2
    assert re.fullmatch(r"error: [^\n]*memory[^\n]*: shorten the context, [^\n]+\n", capsys.readouterr().err)
