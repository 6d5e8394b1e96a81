"""Trains a demo model from nothing: a byte-level Llama that answers "what is the code for X?" from a long text.

Text: Python's own standard library source (nine tenths of its files; the rest is held out for evaluation).
Stages lengthen the context once the answers are right. Writes a Hugging Face directory and its model card.

    python scripts/train_demo.py -o eps_core/demo_model          (about an hour on 2 cores; resumes with --resume)
    python scripts/train_demo.py --shape wide -o results/wide_model     (a second shape, to check the ranking on)
    python scripts/train_demo.py --shape long -o results/long_model     (the demo model lengthened to 32,768 tokens)

Preload jemalloc (LD_PRELOAD=libjemalloc.so.2): without it this script spends most of its time in the allocator.
"""

import argparse
import json
import math
import platform
import sys
import sysconfig
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save
from torch import Tensor, nn

from eps_core.cli.numbers import SEED, TOKENS, Real, argument
from eps_core.decode.model import read_spec
from eps_core.decode.rope import inverse_frequencies
from eps_core.errors import ConfigError, exit_code
from eps_core.files import outputs
from eps_core.tasks.corpus import corpus, held_out
from eps_core.tasks.needle import filler, needle_document
from eps_core.tasks.training import BOS, RULER_TASKS, batch_of, ruler_row

EOS, VOCAB = 257, 258
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": 16384,
    "rope_theta": 100000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "torch_dtype": "bfloat16",
}
# (context, most steps, tokens a step, stop early once this share of answer digits is right over the last 20 steps)
STAGES = [
    (256, 2400, 16384, 0.985),
    (512, 300, 16384, 0.985),
    (1024, 250, 16384, 0.985),
    (2048, 220, 16384, 0.985),
    (4096, 180, 16384, 2.0),
    (8192, 160, 16384, 2.0),
]
# `wide` differs in what a selector meets: heads of 128, twice the layers, twice the kv heads, one query head for each
WIDE_CONFIG = {
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
WIDE_STAGES = [
    (256, 2400, 16384, 0.97),
    (512, 124, 16384, 0.97),
    (1024, 60, 16384, 2.0),
    (2048, 60, 16384, 2.0),
    (4096, 45, 16384, 2.0),
]
# `long` starts from the demo model's weights: RULER's look-ups are learnt where rows are short, then the rows grow.
# RoPE is scaled as in Llama 3.1, which alone, without a step of training, answered 4 of 5 needles at 32,000 tokens; as
# it was, the same weights answered none there, and 40 steps at 16,384 did not mend that.
LONG_CONFIG = {
    "max_position_embeddings": 32768,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
LONG_STAGES = [
    (1024, 910, 16384, 2.0),
    (4096, 150, 16384, 2.0),
    (16384, 21, 32768, 2.0),
    (32768, 60, 32768, 2.0),
]
LONG_START, LONG_RULER_SHARE = Path("eps_core/demo_model"), 0.5
LONG_ROW = 16384  # from which on a step takes a quarter of a minute
LONGEST, DEPTH_BINS, RULER_LENGTHS = 32768, 5, (4096, 16384, 32768)
MIN_STEPS, DECAY_STEPS, WARMUP_STEPS = 60, 140, 60


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width, kv_width = CONFIG["hidden_size"], CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
        q_width = CONFIG["num_attention_heads"] * CONFIG["head_dim"]
        self.input_layernorm = nn.RMSNorm(width, eps=CONFIG["rms_norm_eps"])
        self.q_proj = nn.Linear(width, q_width, bias=False)
        self.k_proj = nn.Linear(width, kv_width, bias=False)
        self.v_proj = nn.Linear(width, kv_width, bias=False)
        self.o_proj = nn.Linear(q_width, width, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=CONFIG["rms_norm_eps"])
        self.gate_proj = nn.Linear(width, CONFIG["intermediate_size"], bias=False)
        self.up_proj = nn.Linear(width, CONFIG["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(CONFIG["intermediate_size"], width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        head_dim = CONFIG["head_dim"]

        def heads(y: Tensor) -> Tensor:
            return y.view(batch, length, -1, head_dim).transpose(1, 2)

        def rotate(y: Tensor) -> Tensor:
            first, second = y.chunk(2, dim=-1)
            return (y * cos + torch.cat((-second, first), dim=-1) * sin).to(y.dtype)

        h = self.input_layernorm(x)
        q, k, v = rotate(heads(self.q_proj(h))), rotate(heads(self.k_proj(h))), heads(self.v_proj(h))
        repeat = CONFIG["num_attention_heads"] // CONFIG["num_key_value_heads"]
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        out = F.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True)
        x = x + self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, CONFIG["hidden_size"])
        self.layers = nn.ModuleList(Block() for _ in range(CONFIG["num_hidden_layers"]))
        self.norm = nn.RMSNorm(CONFIG["hidden_size"], eps=CONFIG["rms_norm_eps"])
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                scale = 1 / math.sqrt(2 * CONFIG["num_hidden_layers"]) if "o_proj" in name or "down_proj" in name else 1
                nn.init.normal_(weight, std=0.02 * scale)

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(self.norm(x), self.embed_tokens.weight)


def frequencies() -> Tensor:
    """Radians per position [D/2] as every reader of this config.json takes them."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        return torch.from_numpy(inverse_frequencies(read_spec(Path(folder))))


def rope(length: int) -> tuple[Tensor, Tensor]:
    angle = torch.outer(torch.arange(length, dtype=torch.float64), frequencies()).repeat(1, 2)
    return angle.cos().float(), angle.sin().float()


def training_text() -> bytes:
    """The running Python's standard library in name order, without the files that the shipped corpus is of."""
    root = Path(sysconfig.get_path("stdlib"))
    names = (path.relative_to(root).as_posix() for path in sorted(root.rglob("*.py")))
    left_out = ("site-packages", "test/", "tests/", "lib2to3")
    texts = [(root / name).read_bytes() for name in names if not (held_out(name) or any(x in name for x in left_out))]
    return b"\n".join(text for text in texts if text.isascii())


@torch.no_grad()
def predicted(model: Model, tokens: Tensor) -> Tensor:
    """Logits [T - 1, V] of tokens [T], each given the true ones before it."""
    cos, sin = rope(len(tokens))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(tokens[None, :-1], cos[:-1], sin[:-1])[0].float()


def needle_answers(model: Model, text: bytes, length: int, count: int, seed: int) -> list[bool]:
    """Of held-out documents with depths spread evenly and 0 to 3 distractors: whether the five digits are each the most
    likely one, given the true ones before."""
    right = []
    for index in range(count):
        doc = needle_document(text, length, seed + index, depth=(index + 0.5) / count, num_distractors=index % 4)
        tokens = torch.tensor([BOS, *doc.prompt.encode(), *doc.answer.encode()])
        got = predicted(model, tokens)[-len(doc.answer) :].argmax(-1)
        right.append(bool((got == tokens[-len(doc.answer) :]).all()))
    return right


def needle_accuracy(model: Model, text: bytes, length: int, count: int, seed: int) -> float:
    return float(np.mean(needle_answers(model, text, length, count, seed)))


def ruler_accuracy(model: Model, text: bytes, length: int, count: int, seed: int) -> dict[str, float]:
    """Of each of RULER's tasks that rows are made of: the share of held-out questions all of whose answers are the most
    likely text, each byte given the true ones before. Answers that are generated are scored by `eps-proto evaluate`."""
    shares = {}
    for task in RULER_TASKS:
        right = []
        for index in range(count):
            row, answer = ruler_row(text, length - 1, np.random.default_rng([seed, index]), task)
            tokens, marked = torch.from_numpy(row), torch.from_numpy(answer)[1:]
            got = predicted(model, tokens).argmax(-1)
            right.append(bool((got == tokens[1:])[marked].all()))
        shares[task] = float(np.mean(right))
    return shares


def write(path: Path, data: bytes) -> None:
    with outputs.replacing(path, "wb") as file:
        file.write(data)


def export(model: Model, out: Path) -> None:
    """Writes config.json, tokenizer.json, model.safetensors (bf16) and generation settings."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    write(out / "config.json", (json.dumps(CONFIG, indent=2) + "\n").encode())
    weights = {}
    for name, tensor in model.state_dict().items():
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            name = name.replace(f".{part}", f".self_attn.{part}")
        for part in ("gate_proj", "up_proj", "down_proj"):
            name = name.replace(f".{part}", f".mlp.{part}")
        weights[f"model.{name}"] = tensor.to(torch.bfloat16).contiguous()
    write(out / "model.safetensors", save(weights, metadata={"format": "pt"}))
    # GPT-2's byte alphabet: each byte is one printable character, in byte order, so token id = byte value
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    vocab = {alphabet[byte]: byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|bos|>", special=True), AddedToken("<|eos|>", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", BOS)])
    write(out / "tokenizer.json", tokenizer.to_str(pretty=True).encode())


def exported(out: Path) -> dict[str, Tensor]:
    """What `export` wrote to `out`, as this script's Model names it, in float32."""
    names = {name: name.removeprefix("model.") for name in load_file(out / "model.safetensors")}
    short = {name: new.replace("self_attn.", "").replace("mlp.", "") for name, new in names.items()}
    return {short[name]: tensor.float() for name, tensor in load_file(out / "model.safetensors").items()}


def write_card(out: Path, record: dict) -> None:
    counts = record["needle_documents"]
    shares = record["needle_accuracy"].items()
    bits, depths = record["held_out_bits_per_byte"], record["needle_accuracy_by_depth"]
    rows = "\n".join(
        f"| {length} | {share:.3f} | {counts[length]} | {' '.join(f'{part:.2f}' for part in depths[length])} | "
        f"{f'{bits[length]:.3f}' if length in bits else '-'} |"
        for length, share in shares
    )
    ruler = ""
    if record["ruler_accuracy"]:
        lines = [
            f"| {length} | {' | '.join(f'{x:.2f}' for x in of.values())} |"
            for length, of in record["ruler_accuracy"].items()
        ]
        tasks = next(iter(record["ruler_accuracy"].values()))
        ruler = (
            "\nRULER's look-ups, share of held-out questions all of whose answers are the most likely text, each byte "
            "given the true ones before:\n\n"
            f"| context (tokens) | {' | '.join(tasks)} |\n|{'---|' * (len(tasks) + 1)}\n" + "\n".join(lines) + "\n"
        )
    stages = "\n".join(
        f"| {s['context']} | {s['steps']} | {s['loss']:.3f} | {s['answer_accuracy']:.3f} |" for s in record["stages"]
    )
    start = f" It starts from `{LONG_START}`." if record["shape"] == "long" else ""
    text = f"""# EPS {record["shape"]} model

A byte-level Llama ({record["parameters"] / 1e6:.2f} M parameters: {CONFIG["num_hidden_layers"]} layers, width
{CONFIG["hidden_size"]}, {CONFIG["num_attention_heads"]} query and {CONFIG["num_key_value_heads"]} key/value heads of
{CONFIG["head_dim"]}), trained from nothing by `scripts/train_demo.py` on Python's standard library source mixed with
needle documents. It knows how to look up `# The code for KEY is VALUE.` in a long text, and little else.
It exists to exercise EPS on real attention patterns; do not use it for anything else.

Seed {record["seed"]}, torch {record["torch"]}, Python {record["python"]}, {record["tokens_seen"] / 1e6:.0f} M tokens,
{record["hours"]:.2f} h on 2 CPU cores.{start}

| context of stage (tokens) | steps | last loss (nats, answers counted twice) | answer digits right in training |
|---|---|---|---|
{stages}

Held-out needles answered exactly (all five digits, dense attention, depths spread evenly, 0 to 3 distractors), and bits
a byte of held-out text, of the last 1,024 bytes of a window:

| context (tokens) | share answered | documents | by depth, from the start | bits a byte |
|---|---|---|---|---|
{rows}
{ruler}
{record["limit"]}

Licence: the weights are released under this repository's licence; the training text is under the PSF licence.
"""
    write(out / "README.md", text.encode())
    write(out / "training.json", (json.dumps(record, indent=2) + "\n").encode())


def held_out_bits_per_byte(model: Model, text: bytes, length: int, count: int, seed: int) -> float:
    """Of the last 1,024 bytes of held-out windows of `length`: the same bytes at any length up to 32,768."""
    rng, losses = np.random.default_rng(seed), []
    for _ in range(count):
        window = filler(text, LONGEST, rng)[-length:]
        tokens = torch.tensor([BOS, *window])
        losses.append(F.cross_entropy(predicted(model, tokens)[-1024:], tokens[-1024:]).item())
    return float(np.mean(losses)) / math.log(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", "--out", dest="out", type=Path, required=True)
    parser.add_argument("--shape", choices=["demo", "wide", "long"], default="demo")
    parser.add_argument("--checkpoint", type=Path, default=Path("demo_checkpoint.pt"))
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--seed", type=argument(SEED), default=0)
    parser.add_argument("--lr", type=argument(Real(0, above=True)), default=1.5e-3)
    parser.add_argument("--needle-documents", type=argument(TOKENS), default=100)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--max-steps", type=argument(TOKENS), help="stop after this many steps in all (for timing)")
    args = parser.parse_args()
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"-o {args.out} cannot be a folder ({error.strerror}): give another path") from error
    outputs.check({"--checkpoint": args.checkpoint}, {"-o": args.out})
    if args.resume and not args.checkpoint.is_file():
        raise ConfigError(f"there is no checkpoint {args.checkpoint} to resume: leave out --resume")

    stages = STAGES
    if args.shape == "wide":
        CONFIG.update(WIDE_CONFIG)
        stages = WIDE_STAGES
    if args.shape == "long":
        CONFIG.update(LONG_CONFIG)
        stages = LONG_STAGES
    ruler_share = LONG_RULER_SHARE if args.shape == "long" else 0.0
    torch.manual_seed(args.seed)
    train_text, held_text = training_text(), corpus()
    model = Model()
    if args.shape == "long":
        model.load_state_dict(exported(LONG_START))
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    # Muon for the matrices: at this size it needed far fewer steps than AdamW until copying appeared
    optimizers = [
        torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    done: dict = {"stage": 0, "step": 0, "total": 0, "tokens": 0, "seconds": 0.0, "stages": []}
    if args.resume:
        state = torch.load(args.checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        done = state["done"]
    forward = model if args.no_compile else torch.compile(model, dynamic=False)

    def save() -> None:
        state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "done": done}
        with outputs.replacing(args.checkpoint, "wb") as file:
            torch.save(state, file)

    for stage in range(done["stage"], len(stages)):
        length, most_steps, step_tokens, enough = stages[stage]
        cos, sin = rope(length)
        recent: list[tuple[float, float]] = []
        first = done["step"] if stage == done["stage"] else 0
        for step in range(first, most_steps):
            started = time.perf_counter()
            rng = np.random.default_rng([args.seed, stage, step])
            rows = batch_of(train_text, length, max(1, step_tokens // length), rng, ruler_share)
            tokens, answer = map(torch.from_numpy, rows)
            # warm up once; decay to a twentieth over the last stage
            rate = min(1.0, (done["total"] + 1) / WARMUP_STEPS)
            if stage == len(stages) - 1:
                rate *= max(0.05, min(1.0, (most_steps - step) / DECAY_STEPS))
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = args.lr * rate * (1.0 if length < 2048 else 0.6)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = forward(tokens[:, :-1], cos, sin)
            losses = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
            marked = answer[:, 1:].flatten()
            loss = losses.mean() + losses[marked].mean()
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
            digits = float((logits.flatten(0, 1).argmax(-1) == tokens[:, 1:].flatten())[marked].float().mean())
            recent = [*recent[-19:], (loss.item(), digits)]
            seconds = time.perf_counter() - started
            done.update(stage=stage, step=step + 1, total=done["total"] + 1, tokens=done["tokens"] + tokens.numel())
            done["seconds"] += seconds
            if done["total"] % 10 == 0:
                mean = np.mean(recent, axis=0)
                text_loss = losses[~marked].mean().item()
                print(
                    f"length {length} step {step + 1} total {done['total']} loss {mean[0]:.3f} text {text_loss:.3f} "
                    f"digits {mean[1]:.3f} {seconds:.2f} s/step {done['seconds'] / 60:.1f} min",
                    flush=True,
                )
            if done["total"] % (100 if length < LONG_ROW else 10) == 0:
                save()
            if args.max_steps and done["total"] >= args.max_steps:
                return
            if step + 1 >= MIN_STEPS and np.mean(recent, axis=0)[1] >= enough:
                break
        mean = np.mean(recent, axis=0)
        done["stages"].append(
            {"context": length, "steps": done["step"], "loss": float(mean[0]), "answer_accuracy": float(mean[1])}
        )
        done.update(stage=stage + 1, step=0)
        save()
        export(model, args.out)
        print(
            f"stage {length} done; held-out needles {needle_accuracy(model, held_text, length, 40, 10**6):.3f}",
            flush=True,
        )

    export(model, args.out)
    accuracy, documents, by_depth, ruler, bits = {}, {}, {}, {}, {}
    for length in (256, 512, 1024, 2048, 4096, 8192, 12288, 16384, 24576, 32768):
        if length > CONFIG["max_position_embeddings"]:
            break
        # a document of 16k costs as much as thirty of 1k: fewer of the longest
        documents[length] = -(-args.needle_documents // (1 if length <= 8192 else 2))
        right = needle_answers(model, held_text, length, documents[length], 2 * 10**6)
        accuracy[length] = float(np.mean(right))
        by_depth[length] = [float(np.mean(part)) for part in np.array_split(right, DEPTH_BINS)]
        if length >= 1024:
            bits[length] = held_out_bits_per_byte(model, held_text, length, 16, args.seed)
        if ruler_share and length in RULER_LENGTHS:
            count = -(-args.needle_documents // (2 if length <= 8192 else 5))
            ruler[length] = ruler_accuracy(model, held_text, length, count, args.seed)
        print(f"held-out needles at {length}: {accuracy[length]:.3f} of {documents[length]}", flush=True)
    failing = [length for length, value in accuracy.items() if value < 0.95]
    limit = (
        f"Under 95 % of needles at {', '.join(map(str, failing))} tokens."
        if failing
        else "No tested length fell under 95 %."
    )
    record = {
        "shape": args.shape,
        "seed": args.seed, "torch": torch.__version__, "python": platform.python_version(), "lr": args.lr,
        "parameters": sum(p.numel() for p in model.parameters()), "tokens_seen": done["tokens"],
        "hours": done["seconds"] / 3600, "stages": done["stages"], "needle_accuracy": accuracy,
        "needle_documents": documents, "limit": limit, "needle_accuracy_by_depth": by_depth,
        "ruler_accuracy": ruler, "held_out_bits_per_byte": bits,
    }  # fmt: skip
    write_card(args.out, record)


if __name__ == "__main__":
    sys.exit(exit_code(main))
