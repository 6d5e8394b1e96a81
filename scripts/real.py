"""Measure sparse decode attention on a real pretrained model: KL against bytes, for EPS and for its peers.

    python scripts/real.py --model DIR --context 4096 --documents 8 --steps 64 -o rows.jsonl

EPS is the product itself. Its peers are computed here, in float32 over a cache rounded to bfloat16, from their sources:

- Quest (arXiv 2406.10774, evaluation/quest_attention.py): minimum and maximum of each channel by pages of 16, a list of
  pages for each query head, the last page always, the first two layers dense.
- UNIQUE (arXiv 2605.27740): q . mean + 0.5 |q| std by pages of 8 with one scalar standard deviation, a list for each
  kv head.
- 1-bit codes (RaBitQ, arXiv 2405.12497; FIER): each rotated key as signs and one float16 scale, read whole, a list for
  each kv head.
- the oracle: the exact share of the softmax of every token, for free, a list for each kv head.
- FP8: dense attention over E4M3 with one scale for each token and kv head.

All but Quest always read the first 4 and the last 8 tokens; UNIQUE its first page and its last two. A list for each
query head is charged for the tokens that any query head of a kv head reads. Bytes count K, V and whatever scoring
reads, over a dense bfloat16 read. Contexts are counted in the model's own tokens. Documents that OUTPUT holds are not
measured again.
"""

import argparse
import json
import math
import pydoc_data.topics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eps_core.config.eps import EpsConfig
from eps_core.decode.session import Session
from eps_core.errors import exit_code, require
from eps_core.evaluation.curves import bytes_at_kl
from eps_core.evaluation.runner import Document, run_document
from eps_core.evaluation.statistics import bootstrap_interval
from eps_core.tasks.corpus import corpus
from eps_core.telemetry.provenance import provenance

BUDGETS = (0.02, 0.03, 0.05, 0.08, 0.125, 0.2, 0.3)  # shares of the tokens
KINDS = ("code", "prose", "code", "chat")
Tensor = torch.Tensor
Attend = Callable[[int, Tensor, Tensor, Tensor, int], tuple[Tensor, float]]  # layer, q, K, V, tokens -> out, bytes


def text(kind: str) -> str:
    """Return the text of a kind: code of the standard library, prose and ChatML turns of the language reference."""
    if kind == "code":
        return corpus().decode("ascii")
    topics = pydoc_data.topics.topics
    if kind == "prose":
        return "\n".join(topics.values())
    turns = "<|im_start|>user\nExplain {} in Python.<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
    return "".join(turns.format(name, said.strip()[:1500]) for name, said in topics.items())


def documents(session: Session, context: int, steps: int, number: int, seed: int) -> Iterator[tuple[str, list[int]]]:
    """Yield (kind, tokens): `context` prompt tokens and the `steps` that decode is fed."""
    encoded = {kind: session.encode(text(kind), special=False) for kind in dict.fromkeys(KINDS[:number])}
    for index in range(number):
        kind, rng = KINDS[index % len(KINDS)], np.random.default_rng([seed, index])
        tokens, length = encoded[kind], context + steps
        require(len(tokens) > length, f"--context {context}: the {kind} text has {len(tokens)} tokens: lower it")
        start = int(rng.integers(0, len(tokens) - length))
        yield kind, tokens[start : start + length]


def softmax_over(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (q @ k.transpose(1, 2)).masked_fill(~keep, -torch.inf).softmax(-1) @ v


def best(score: Tensor, number: int) -> Tensor:
    """Return a mask of the `number` best entries of each row."""
    return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, score.topk(number, -1).indices, True)


def by_pages(k: Tensor, size: int) -> Tensor:
    """Return keys [Hkv, n, D] as pages [Hkv, pages, size, D]; the last page is filled with its first key."""
    missing = -k.shape[1] % size
    fill = k[:, k.shape[1] // size * size :][:, :1].expand(-1, missing, -1) if missing else k[:, :0]
    return torch.cat([k, fill], 1).unflatten(1, (-1, size))


def dense(layer: int, q: Tensor, k: Tensor, v: Tensor, tokens: int) -> tuple[Tensor, float]:
    return (q @ k.transpose(1, 2)).softmax(-1) @ v, k.shape[0] * k.shape[1] * 4.0 * k.shape[2]


def oracle(layer: int, q: Tensor, k: Tensor, v: Tensor, tokens: int) -> tuple[Tensor, float]:
    share = (q @ k.transpose(1, 2)).softmax(-1).mean(1)
    share[:, :4] = share[:, -8:] = torch.inf
    return softmax_over(q, k, v, best(share, tokens)[:, None]), k.shape[0] * tokens * 4.0 * k.shape[2]


def quest(layer: int, q: Tensor, k: Tensor, v: Tensor, tokens: int) -> tuple[Tensor, float]:
    if layer < 2:
        return dense(layer, q, k, v, tokens)
    heads, length, dim = k.shape
    pages = by_pages(k, 16)
    low, high = pages.amin(2), pages.amax(2)
    score = q.clamp_min(0) @ high.transpose(1, 2) + q.clamp_max(0) @ low.transpose(1, 2)
    score[..., -1] = torch.inf
    keep = best(score, max(3, min(tokens // 16, score.shape[-1]))).repeat_interleave(16, -1)[..., :length]
    return softmax_over(q, k, v, keep), heads * score.shape[-1] * 4.0 * dim + float(keep.any(1).sum()) * 4 * dim


def unique(layer: int, q: Tensor, k: Tensor, v: Tensor, tokens: int) -> tuple[Tensor, float]:
    heads, length, dim = k.shape
    pages = by_pages(k, 8)
    mean = pages.mean(2)
    spread = (pages - mean[:, :, None]).square().mean((2, 3)).sqrt()
    score = (q @ mean.transpose(1, 2) + 0.5 * q.norm(dim=-1, keepdim=True) * spread[:, None]).amax(1)
    score[:, :1] = score[:, -2:] = torch.inf
    keep = best(score, max(3, min(tokens // 8, score.shape[-1]))).repeat_interleave(8, -1)[:, :length]
    read = float(keep.sum()) * 4 * dim + heads * score.shape[-1] * (2.0 * dim + 2)
    return softmax_over(q, k, v, keep[:, None]), read


def one_bit(layer: int, q: Tensor, k: Tensor, v: Tensor, tokens: int) -> tuple[Tensor, float]:
    heads, length, dim = k.shape
    turn = rotation(dim)
    x = (k - k.mean(1, keepdim=True)) @ turn  # about the mean key, which costs nothing here
    scale = (x.square().sum(-1) / x.abs().sum(-1)).half().float()
    score = (torch.where(x >= 0, 1.0, -1.0) @ (q @ turn).transpose(1, 2) * scale[..., None]).amax(-1)
    score[:, :4] = score[:, -8:] = torch.inf
    out = softmax_over(q, k, v, best(score, tokens)[:, None])
    return out, heads * (length * (dim / 8 + 2) + tokens * 4.0 * dim)


def fp8(layer: int, q: Tensor, k: Tensor, v: Tensor, tokens: int) -> tuple[Tensor, float]:
    def rounded(x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448
        return (x / scale).to(torch.float8_e4m3fn).float() * scale

    return dense(layer, q, rounded(k), rounded(v), tokens)[0], k.shape[0] * k.shape[1] * (2.0 * k.shape[2] + 4)


def rotation(dim: int, made: dict[int, Tensor] = {}) -> Tensor:  # noqa: B006  one for each head dimension
    if dim not in made:
        made[dim] = torch.linalg.qr(torch.randn(dim, dim, generator=torch.Generator().manual_seed(0)))[0]
    return made[dim]


PEERS: dict[str, Attend] = {"Quest": quest, "UNIQUE": unique, "1-bit codes": one_bit, "oracle": oracle, "FP8": fp8}


def simulate(session: Session, kv: list, tokens: list[int], steps: int, rows: list[tuple[str, float]]) -> list[dict]:
    """Return the steps of every (peer, share of the tokens) after the prompt whose K and V [n, Hkv, D] are `kv`."""
    model, spec = session.decoder.model, session.spec
    group, prompt = spec.num_heads // spec.num_kv_heads, len(tokens) - steps
    keys, values = ([pair[i].transpose(0, 1).float() for pair in kv] for i in (0, 1))
    late: Any = torch.zeros(2, spec.num_layers, 1 + len(rows), spec.num_kv_heads, steps, spec.head_dim)
    every = [("dense", 1.0), *rows]
    kl, agree, read = [[] for _ in every], [[] for _ in every], [0.0] * len(every)
    for step in range(steps):
        x = model.embed(np.full(len(every), tokens[prompt + step]))
        turn = model.rotation(np.full(len(every), prompt + step))
        for layer in range(spec.num_layers):
            q, *new = model.project(layer, x, turn)
            for which in (0, 1):
                late[which, layer, :, :, step] = new[which].bfloat16()
            q = q.float().unflatten(1, (spec.num_kv_heads, group)) / math.sqrt(spec.head_dim)
            outs = []
            for row, (name, share) in enumerate(every):
                k, v = (
                    torch.cat([old[layer], late[i, layer, row, :, : step + 1]], 1)
                    for i, old in enumerate((keys, values))
                )
                attend = dense if name == "dense" else PEERS[name]
                out, num_bytes = attend(layer, q[row], k, v, max(16, int(share * k.shape[1])))
                outs.append(out.flatten(0, 1))
                read[row] += num_bytes
            x = model.feed_forward(layer, model.add_attention(layer, x, torch.stack(outs).to(x.dtype)))
        logits = model.logits(x).log_softmax(-1)
        found = (logits[0].exp() * (logits[0] - logits)).sum(-1)
        for row in range(len(every)):
            kl[row].append(max(float(found[row]), 0.0))
            agree[row].append(bool(logits[row].argmax() == logits[0].argmax()))
    return [
        {"method": name, "budget": share, "bytes": read[row] / read[0], "kl": kl[row], "agree": agree[row]}
        for row, (name, share) in enumerate(every)
        if row
    ]


def measure(session: Session, tokens: list[int], steps: int, budgets: list[float]) -> list[dict]:
    """Return the rows of one document: EPS at each budget and at its default, then its peers."""
    configs: dict[Any, EpsConfig] = {("EPS", share): EpsConfig.of(method="rq", budget=share) for share in budgets}
    configs["EPS default", None] = EpsConfig.of(method="rq")
    found = run_document(session, Document.along(tokens, steps), configs)
    rows = []
    for name, share in configs:
        one = found[name, share]
        assert one.kl is not None and one.agree is not None
        read, full = one.bytes_read()
        kl, agree = one.kl[:, 0].tolist(), one.agree[:, 0].tolist()
        rows.append({"method": name, "budget": share, "bytes": read / full, "kl": kl, "agree": agree})
    prefix = session.prefix(tokens[: len(tokens) - steps])
    with torch.inference_mode():
        peers = [(name, share) for name in PEERS for share in (budgets if name != "FP8" else [1.0])]
        return rows + simulate(session, prefix.keys_values, tokens, steps, peers)


def table(rows: list[dict]) -> str:
    """Return a Markdown table of one cell: KL at each budget with the 95 % interval over documents, tails, bytes."""
    groups: dict[str, dict[Any, list[dict]]] = {}
    for row in rows:
        groups.setdefault(row["method"], {}).setdefault(row["budget"], []).append(row)
    lines = ["| method | bytes: KL [95 % interval], p99, top-1 | bytes at KL 0.01 |", "|---|---|---|"]
    for method, cells in groups.items():
        points, curve = [], []
        for same in cells.values():
            kl, means = np.concatenate([row["kl"] for row in same]), [float(np.mean(row["kl"])) for row in same]
            low, high = bootstrap_interval(means, 0) or (math.nan, math.nan)
            num_bytes = float(np.mean([row["bytes"] for row in same]))
            curve.append((num_bytes, float(kl.mean())))
            agree = np.mean(np.concatenate([row["agree"] for row in same]))
            points.append(
                f"{num_bytes:.3f}: {kl.mean():.4f} [{low:.4f}, {high:.4f}], {np.quantile(kl, 0.99):.3f}, {agree:.3f}"
            )
        value, known = bytes_at_kl(curve)
        at = "-" if value is None else f"{'' if known == 'measured' else known + ' '}{value:.3f}"
        lines.append(f"| {method} | {'<br>'.join(points)} | {at} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face directory (scripts/get_model.py)")
    parser.add_argument("--context", type=int, default=4096, help="prompt tokens (default 4096)")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--steps", type=int, default=64, help="decoded tokens of each document (default 64)")
    parser.add_argument("--budgets", type=float, nargs="+", default=list(BUDGETS), help="shares of the tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSONL, one row a document and variant")
    args = parser.parse_args()
    for name in ("context", "documents", "steps"):
        require(getattr(args, name) >= 1, f"--{name} {getattr(args, name)} is below 1: give a positive number")
    session = Session.open(args.model, backend="cuda", device="cpu", dtype="float32", kv_dtype="bfloat16")
    room = session.spec.max_context
    require(
        args.context + args.steps <= room,
        f"--context {args.context} and --steps {args.steps} are beyond the model's {room} tokens: lower --context",
    )
    cell = {"model": args.model.name, "context_tokens": args.context, "steps": args.steps, "seed": args.seed}
    there: list[dict] = []
    if args.output.exists():
        lines = (json.loads(line) for line in args.output.read_text("utf-8").splitlines())
        there = [row for row in lines if row.get("type") == "row" and cell.items() <= row.items()]
    done = {row["document"] for row in there}
    with args.output.open("a", encoding="utf-8") as out:
        asked = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
        out.write(json.dumps({"type": "run", **provenance(session.backend.versions()), "asked": asked}) + "\n")
        texts = documents(session, args.context, args.steps, args.documents, args.seed)
        for index, (kind, tokens) in enumerate(texts):
            if index in done:
                continue
            assert len(tokens) == args.context + args.steps
            found = measure(session, tokens, args.steps, args.budgets)
            rows = [{"type": "row", **cell, "document": index, "kind": kind, **row} for row in found]
            out.write("".join(json.dumps(row) + "\n" for row in rows))
            out.flush()
            there += rows
            print(f"document {index + 1} of {args.documents} ({kind})", file=sys.stderr)
    number = len({row["document"] for row in there})
    print(f"\n{args.model.name}, {args.context} tokens, {number} documents of {args.steps} steps\n")
    print(table(there))


if __name__ == "__main__":
    sys.exit(exit_code(main))
