"""EPS's peers, simulated: Quest, UNIQUE, 1-bit codes, the oracle and an FP8 cache.

They are computed here, in float32 over a cache rounded to bfloat16, from their sources:

- Quest (arXiv 2406.10774): minimum and maximum of each channel by pages of 16, a list of pages for each query head, at
  least 3 pages and the first two layers dense as in its evaluation/quest_attention.py, the last page always as in its
  kernels' quest/utils/controller.py.
- UNIQUE (arXiv 2605.27740): q . mean + 0.5 |q| std by pages of 8 with one scalar standard deviation, a list for each
  kv head.
- 1-bit codes (after RaBitQ, arXiv 2405.12497): each rotated key as signs about the prompt's mean and one float16 scale,
  read whole, a list for each kv head by its query heads' largest logit. (FIER has a scale and a zero for 32 tokens of a
  channel, without a rotation, and two dense layers.)
- the oracle: the exact share of the softmax of every token, for free, a list for each kv head.
- FP8: dense attention over E4M3 with one scale for each token and kv head.

All but Quest always read the first 4 and the last 8 tokens; UNIQUE its first page and its last two. A list for each
query head is charged for the tokens that any query head of a kv head reads. Bytes count K, V and whatever scoring
reads, over a dense bfloat16 read.
"""

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch

from eps_core.decode.balance import factors
from eps_core.decode.session import Session

Tensor = torch.Tensor


def best(score: Tensor, number: int) -> Tensor:
    """Return a mask of the `number` best entries of each row."""
    return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, score.topk(number, -1).indices, True)


def exact(q: Tensor, k: Tensor, late: Tensor) -> Tensor:
    """Return logits [rows, Hkv, R, n + s] of q [rows, Hkv, R, D] over the prompt's keys and each row's later ones."""
    rows, heads, group, dim = q.shape
    prompt = q.transpose(0, 1).reshape(heads, rows * group, dim) @ k.transpose(1, 2)
    return torch.cat([prompt.view(heads, rows, group, -1).transpose(0, 1), q @ late.transpose(-1, -2)], -1)


def attend(logits: Tensor, v: Tensor, late: Tensor) -> Tensor:
    """Return the attention [rows, Hkv, R, D] of these logits over values as of `exact`."""
    rows, heads, group, _ = logits.shape
    share, length = logits.softmax(-1), v.shape[1]
    prompt = share[..., :length].transpose(0, 1).reshape(heads, rows * group, length) @ v
    return prompt.view(heads, rows, group, -1).transpose(0, 1) + share[..., length:] @ late


def by_pages(k: Tensor, size: int) -> Tensor:
    """Return keys [.., n, D] as pages [.., pages, size, D]; the last page is filled with its first key."""
    full, missing = k.shape[-2] // size * size, -k.shape[-2] % size
    fill = k[..., full:, :][..., :1, :].expand(*k.shape[:-2], missing, -1) if missing else k[..., :0, :]
    return torch.cat([k, fill], -2).unflatten(-2, (-1, size))


class Pages:
    """The whole pages of a prompt's keys, and with each row's later keys those that follow."""

    def __init__(self, k: Tensor, size: int, summarise: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        whole = k.shape[1] // size * size
        self.size, self.summarise, self.rest = size, summarise, k[:, whole:]
        self.first = summarise(by_pages(k[:, :whole], size))

    def of(self, late: Tensor) -> Iterator[Tensor]:
        """Yield each field [rows, Hkv, pages, ..] of the summaries."""
        keys = torch.cat([self.rest.expand(len(late), *self.rest.shape), late], 2)
        for first, then in zip(self.first, self.summarise(by_pages(keys, self.size)), strict=True):
            yield torch.cat([first.expand(len(late), *first.shape), then], 2)

    def chosen(self, score: Tensor, tokens: list[int], length: int) -> list[Tensor]:
        """Return of each row which tokens [.., n + s] are read where the best pages of score [rows, .., pages] are."""
        most = [max(3, min(number // self.size, score.shape[-1])) for number in tokens]
        pages = [best(row, number) for row, number in zip(score, most, strict=True)]
        return [one.repeat_interleave(self.size, -1)[..., :length] for one in pages]


class Oracle:
    sink_recent = (4, 8)

    def __init__(self, k: Tensor) -> None:
        self.dim = k.shape[-1]

    def masks(self, q: Tensor, late: Tensor, logits: Tensor, tokens: list[int]) -> list[Tensor]:
        """Return of each row which tokens [Hkv or, of each query head, Hkv, R, n + s] are read."""
        share = self.score(q, late, logits)
        share[..., : self.sink_recent[0]] = share[..., -self.sink_recent[1] :] = torch.inf
        return [best(row, number)[:, None] for row, number in zip(share, tokens, strict=True)]

    def score(self, q: Tensor, late: Tensor, logits: Tensor) -> Tensor:
        return logits.softmax(-1).mean(2)

    def summary_bytes(self, length: int) -> float:
        """Return the bytes that scoring reads of one kv head."""
        return 0.0


class OneBit(Oracle):
    def __init__(self, k: Tensor) -> None:
        super().__init__(k)
        self.turn, self.mean = rotation(self.dim), k.mean(1, keepdim=True)  # about the mean key, which costs nothing
        self.codes = self.code(k)

    def code(self, k: Tensor) -> Tensor:
        x = (k - self.mean) @ self.turn
        scale = (x.square().sum(-1) / x.abs().sum(-1)).half().float()
        return torch.where(x >= 0, 1.0, -1.0) * scale[..., None]

    def score(self, q: Tensor, late: Tensor, logits: Tensor) -> Tensor:
        return exact(q @ self.turn, self.codes, self.code(late)).amax(2)

    def summary_bytes(self, length: int) -> float:
        return length * (self.dim / 8 + 2)


class Unique(Oracle):
    def __init__(self, k: Tensor) -> None:
        super().__init__(k)
        self.pages = Pages(k, 8, self.summary)

    @staticmethod
    def summary(pages: Tensor) -> tuple[Tensor, ...]:
        mean = pages.mean(-2)
        return mean, (pages - mean[..., None, :]).square().mean((-2, -1)).sqrt()

    def masks(self, q: Tensor, late: Tensor, logits: Tensor, tokens: list[int]) -> list[Tensor]:
        mean, spread = self.pages.of(late)
        score = (q @ mean.transpose(-1, -2) + 0.5 * q.norm(dim=-1, keepdim=True) * spread[:, :, None]).amax(2)
        score[..., :1] = score[..., -2:] = torch.inf
        return [one[:, None] for one in self.pages.chosen(score, tokens, logits.shape[-1])]

    def summary_bytes(self, length: int) -> float:
        return -(-length // 8) * (2.0 * self.dim + 2)


class Quest(Oracle):
    def __init__(self, k: Tensor) -> None:
        super().__init__(k)
        self.pages = Pages(k, 16, lambda pages: (pages.amin(-2), pages.amax(-2)))

    def masks(self, q: Tensor, late: Tensor, logits: Tensor, tokens: list[int]) -> list[Tensor]:
        low, high = self.pages.of(late)
        score = q.clamp_min(0) @ high.transpose(-1, -2) + q.clamp_max(0) @ low.transpose(-1, -2)
        score[..., -1] = torch.inf
        return self.pages.chosen(score, tokens, logits.shape[-1])

    def summary_bytes(self, length: int) -> float:
        return -(-length // 16) * 4.0 * self.dim


def rounded(x: Tensor) -> Tensor:
    """Return x in E4M3 with one scale for each token and kv head."""
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


@cache
def rotation(dim: int) -> Tensor:
    return torch.linalg.qr(torch.randn(dim, dim, generator=torch.Generator().manual_seed(0)))[0]


PEERS: dict[str, type[Oracle]] = {"Quest": Quest, "UNIQUE": Unique, "1-bit codes": OneBit, "oracle": Oracle}
FP8, DENSE_LAYERS = "FP8", {"Quest": 2}


def simulate(session: Session, kv: list, tokens: list[int], steps: int, budgets: list[float]) -> list[dict]:
    """Return the steps of every (peer, share of the tokens) after the prompt whose K and V [n, Hkv, D] are `kv`."""
    model, spec = session.decoder.model, session.spec
    spec.require_full_attention("the simulation of other methods")
    group, dim, prompt = spec.num_heads // spec.num_kv_heads, spec.head_dim, len(tokens) - steps
    # as the model's own weights have them; EPS's cache holds balanced keys
    assert session.exponents is not None
    balances = torch.from_numpy(factors(session.exponents))[:, :, None]
    keys = [pair[0].transpose(0, 1).float() / one for pair, one in zip(kv, balances, strict=True)]
    values = [pair[1].transpose(0, 1).float() for pair in kv]
    peers = [{name: made(k) for name, made in PEERS.items()} for k in keys]
    codes = [(rounded(k), rounded(v)) for k, v in zip(keys, values, strict=True)]
    every = [("dense", 1.0), (FP8, 1.0), *((name, share) for name in PEERS for share in budgets)]
    late: Any = torch.zeros(2, spec.num_layers, len(every), spec.num_kv_heads, steps, dim)
    kl: list[list[float]] = [[] for _ in every]
    agree: list[list[bool]] = [[] for _ in every]
    read = [0.0] * len(every)
    for step in range(steps):
        x = model.embed(np.full(len(every), tokens[prompt + step]))
        turn = model.rotation(np.full(len(every), prompt + step))
        length = prompt + step + 1
        numbers, full = [max(16, int(share * length)) for share in budgets], spec.num_kv_heads * length * 4.0 * dim
        for layer in range(spec.num_layers):
            q, *new = model.project(layer, x, turn)
            late[0, layer, :, :, step] = new[0].bfloat16() / balances[layer, :, 0]
            late[1, layer, :, :, step] = new[1].bfloat16()
            q = q.float().unflatten(1, (spec.num_kv_heads, group)) * balances[layer] / math.sqrt(dim)
            late_k, late_v = late[:, layer, :, :, : step + 1]
            logits = exact(q, keys[layer], late_k)
            read[0], read[1] = read[0] + full, read[1] + spec.num_kv_heads * length * (2.0 * dim + 4)
            for at, (name, peer) in enumerate(peers[layer].items()):
                rows = slice(2 + at * len(budgets), 2 + (at + 1) * len(budgets))
                if layer < DENSE_LAYERS.get(name, 0):
                    read[rows] = [total + full for total in read[rows]]
                    continue
                masks = peer.masks(q[rows], late_k[rows], logits[rows], numbers)
                for row, keep in enumerate(masks, rows.start):
                    logits[row].masked_fill_(~keep, -torch.inf)
                    scoring = spec.num_kv_heads * peer.summary_bytes(length)
                    read[row] += scoring + float(keep.any(1).sum()) * 4 * dim
            out = attend(logits, values[layer], late_v)
            k8, v8 = codes[layer]
            out[1:2] = attend(exact(q[1:2], k8, rounded(late_k[1:2])), v8, rounded(late_v[1:2]))
            x = model.after_attention(layer, x, out.flatten(1, 2).to(x.dtype))
        found = model.logits(x).log_softmax(-1)
        apart = (found[0].exp() * (found[0] - found)).sum(-1)
        for row in range(len(every)):
            kl[row].append(max(float(apart[row]), 0.0))
            agree[row].append(bool(found[row].argmax() == found[0].argmax()))
    return [
        {"method": name, "budget": share, "bytes": read[row] / read[0], "kl": kl[row], "agree": agree[row]}
        for row, (name, share) in enumerate(every)
        if row
    ]
