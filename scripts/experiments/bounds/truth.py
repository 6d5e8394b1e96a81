"""The truth about a filled cache, from its keys and values alone: the bound checker's judge."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from eps_core.attention.protocol import Backend
from eps_core.config.eps import EpsConfig


@dataclass
class Filled:
    """A backend's cache of one layer, full of whole groups, and what lies there in float64: k, v [P, Hkv, U, D]."""

    backend: Backend
    device: str
    config: EpsConfig
    cache: Any
    k: np.ndarray
    v: np.ndarray


# ---------------------------------------------------------------------------------------------------------------- truth


def _log_sum(x: np.ndarray) -> np.ndarray:
    """log sum exp over the last axis; -inf over nothing."""
    if not x.shape[-1]:
        return np.full(x.shape[:-1], -np.inf)
    largest = x.max(axis=-1, keepdims=True)
    base = np.where(np.isneginf(largest), 0, largest)
    with np.errstate(divide="ignore"):
        return np.log(np.exp(x - base).sum(axis=-1)) + base[..., 0]


def _true_logits(filled: Filled, q: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(logits in float64, |a||k|), each [B, Hkv, R, T]."""
    batch, _, head_dim = q.shape
    kv_heads = filled.k.shape[1]
    a = q.reshape(batch, kv_heads, -1, head_dim).astype(np.float64) / math.sqrt(head_dim)
    keys = filled.k[table].swapaxes(1, 2).reshape(batch, kv_heads, -1, head_dim)
    logits = a @ keys.swapaxes(2, 3)
    return logits, np.linalg.norm(a, axis=3)[..., None] * np.linalg.norm(keys, axis=3)[:, :, None]


def true_masses(filled: Filled, q: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(log A_p of full groups, |a| max|k| of their logits, what float64 may have log A_p off by), each
    [B, Hkv, R, G]."""
    logits, size = _true_logits(filled, q, table)
    by_group = (*logits.shape[:3], -1, filled.config.cache_config.S)
    masses, size = _log_sum(logits.reshape(by_group)), size.reshape(by_group).max(axis=-1)
    return masses, size, (q.shape[2] + 8) * 2.0**-52 * size + 2.0**-50 * (1 + np.abs(masses))


@dataclass
class Truth:
    """The loss of what some visited groups really left out: `share` [B, Hkv, R] of the softmax, `error` [B, Hkv, R] of
    exact attention over them (L2), each known to a factor exp(+-`doubt`)."""

    share: np.ndarray
    error: np.ndarray
    doubt: np.ndarray


def selection_mask(groups: np.ndarray, counts: np.ndarray, num_groups: int) -> np.ndarray:
    """[B, Hkv, G]: True where a group is among the first counts [B, Hkv] of groups [B, Hkv, W]."""
    selected_mask = np.zeros((*counts.shape, num_groups), bool)
    for b, head in np.ndindex(*counts.shape):
        selected_mask[b, head, groups[b, head, : counts[b, head]]] = True
    return selected_mask


def true_loss(
    filled: Filled, q: np.ndarray, table: np.ndarray, lengths: np.ndarray, selected_mask: np.ndarray
) -> Truth:
    """Return the loss of groups visit [B, Hkv, G] of sequences of `lengths` tokens. The error is share * |unread - read
    output|, which equals |dense - read| and does not cancel."""
    logits, size = _true_logits(filled, q, table)
    batch, kv_heads, _, num_tokens = logits.shape
    inside = np.arange(num_tokens) < np.asarray(lengths)[:, None]
    logits = np.where(inside[:, None, None], logits, -np.inf)
    read = np.repeat(selected_mask, filled.config.cache_config.S, axis=2)[:, :, None, :num_tokens]
    values = filled.v[table].swapaxes(1, 2).reshape(batch, kv_heads, num_tokens, -1)
    parts = []
    for mask in (read, ~read):
        part = np.where(mask, logits, -np.inf)
        mass = _log_sum(part)
        weights = np.exp(part - np.where(np.isneginf(mass), 0, mass)[..., None])
        parts.append((mass, weights @ values))
    (mass_read, out_read), (mass_unread, out_unread) = parts
    with np.errstate(over="ignore"):
        share = np.where(np.isneginf(mass_unread), 0, 1 / (1 + np.exp(mass_read - mass_unread)))
    error = share * np.linalg.norm(out_unread - out_read, axis=3)
    reach = np.where(inside[:, None, None], size, 0).max(axis=3)
    return Truth(share, error, (q.shape[2] + 8) * 2.0**-51 * reach + 2.0**-40)
