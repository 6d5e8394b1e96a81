"""Trains a demo model from nothing: a byte-level Llama that answers "what is the code for X?" from a long text.

Text: Python's own standard library source (nine tenths of its files; the rest is held out for evaluation).
Stages lengthen the context once answers are right. Writes a Hugging Face directory; `model_card.py` writes its card.

    python scripts/experiments/training/run.py -o eps_core/demo_model     (an hour on 2 cores; --resume)

Preload jemalloc (LD_PRELOAD=libjemalloc.so.2): without it this script spends most of its time in the allocator.
"""

import argparse
import json
import math
import platform
import sys
import sysconfig
import time
import zlib
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
import torch.nn.functional as F
from random_models import LLAMA_1B
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from eps_core.cli.numbers import SEED, TOKENS, Real, argument
from eps_core.errors import ConfigError, exit_code
from eps_core.io import outputs
from eps_core.models.config import read_spec
from eps_core.models.rope import inverse_frequencies
from eps_core.tasks.corpus import corpus
from eps_core.tasks.needle import needle_document
from experiments.training.rows import BOS, batch_of

EOS, VOCAB = 257, 258
CONFIG: dict[str, Any] = {
    **LLAMA_1B, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 16384, "rope_theta": 100000.0,
    "bos_token_id": BOS, "eos_token_id": EOS,
}  # fmt: skip
# (context, most steps, tokens a step, stop early once this share of answer digits is right over the last 20 steps)
STAGES = (
    (256, 2400, 16384, 0.985),
    (512, 300, 16384, 0.985),
    (1024, 250, 16384, 0.985),
    (2048, 220, 16384, 0.985),
    (4096, 180, 16384, 2.0),
    (8192, 160, 16384, 2.0),
)
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


@cache
def frequencies() -> Tensor:
    """Radians per position [D/2] as every reader of this config.json takes them."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        return torch.from_numpy(inverse_frequencies(read_spec(Path(folder))))


def rope(length: int) -> tuple[Tensor, Tensor]:
    angle = torch.outer(torch.arange(length, dtype=torch.float64), frequencies()).repeat(1, 2)
    return angle.cos().float(), angle.sin().float()


def held_out(name: str) -> bool:
    """Return whether a file of the standard library, by its path there, is of the shipped corpus, which no model may be
    trained on: the CRC32 of its name is divisible by 10."""
    return zlib.crc32(name.encode()) % 10 == 0


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
    """Return, of held-out documents with depths spread evenly and 0 to 3 distractors, whether the five digits are each
    the most likely one, given the true ones before."""
    right = []
    for index in range(count):
        doc = needle_document(text, length, seed + index, depth=(index + 0.5) / count, num_distractors=index % 4)
        tokens = torch.tensor([BOS, *doc.prompt.encode(), *doc.answer.encode()])
        got = predicted(model, tokens)[-len(doc.answer) :].argmax(-1)
        right.append(bool((got == tokens[-len(doc.answer) :]).all()))
    return right


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
    """Return the weights that `export` wrote to `out`, as this script's Model names it, in float32."""
    try:
        weights = load_file(out / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{out}/model.safetensors cannot be read ({error}): train it with this script") from error
    return {
        name.removeprefix("model.").replace("self_attn.", "").replace("mlp.", ""): tensor.float()
        for name, tensor in weights.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", "--out", dest="out", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, default=Path("demo_checkpoint.pt"))
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--seed", type=argument(SEED), default=0)
    parser.add_argument("--lr", type=argument(Real(0, above=True)), default=1.5e-3)
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

    torch.manual_seed(args.seed)
    train_text, held_text = training_text(), corpus()
    model = Model()
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

    for stage in range(done["stage"], len(STAGES)):
        length, most_steps, step_tokens, enough = STAGES[stage]
        cos, sin = rope(length)
        recent: list[tuple[float, float]] = []
        first = done["step"] if stage == done["stage"] else 0
        for step in range(first, most_steps):
            started = time.perf_counter()
            rng = np.random.default_rng([args.seed, stage, step])
            rows = batch_of(train_text, length, max(1, step_tokens // length), rng)
            tokens, answer = map(torch.from_numpy, rows)
            # warm up once; decay to a twentieth over the last stage
            rate = min(1.0, (done["total"] + 1) / WARMUP_STEPS)
            if stage == len(STAGES) - 1:
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
            if done["total"] % 100 == 0:
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
        right = np.mean(needle_answers(model, held_text, length, 40, 10**6))
        print(f"stage {length} done; held-out needles {right:.3f}", flush=True)

    record = {
        "seed": args.seed, "torch": torch.__version__,
        "python": platform.python_version(), "lr": args.lr, "parameters": sum(p.numel() for p in model.parameters()),
        "tokens_seen": done["tokens"], "hours": done["seconds"] / 3600, "stages": done["stages"],
    }  # fmt: skip
    write(args.out / "training.json", (json.dumps(record, indent=2) + "\n").encode())


if __name__ == "__main__":
    sys.exit(exit_code(main))
