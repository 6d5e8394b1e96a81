"""Sixteen configurations of a decode whose logits, selections and bytes are kept in golden/decode.json, as the float64
reference computes them. `measure` runs one of them on any backend and kernels, `differences` says where two differ.

Weights and tokens are numpy's draws, and every token is given, so that no choice of a token changes what follows it.
Arithmetic that rounds may swap groups whose scores are close: the file names these near ties.
"""

import copy
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import tiny_models
import torch
from verified_runs import Model, eps

from eps_core import reference
from eps_core.attention.layer import sparse_attention
from eps_core.config.eps import EpsConfig
from eps_core.config.speculative import SpeculativeConfig
from eps_core.decode import layers
from eps_core.decode.sampling import Sampling

FILE = Path(__file__).parent / "golden" / "decode.json"
LENGTHS, STEPS = (250, 131), 3  # tokens of the two prompts; decode steps after them
VERIFIED_LENGTHS, VERIFIED_TOKENS = (90, 41), 7  # the same of verified runs, which take long in interpreters
PLACES = 8  # of the vocabulary, whose logits are kept
NEAR_NATS, DRAWS = 0.02, 48  # near ties differ by less; draws of such noise that find them
# standard deviations of the kept logits by which others may differ: the float64 reference itself, float32, and where
# what attention reads is stored in fewer bits, so that a number may round to the next one
TOLERANCE = {"reference": 2e-6, "float32": 1e-4, "rounded": 0.02}
TIE_TOLERANCE = 0.3  # where near ties were decided otherwise
_ROOT = TemporaryDirectory(prefix="eps-golden-")


@dataclass(frozen=True)
class Golden:
    """One configuration: what the cache keeps, what a step reads of it, and the tiny model."""

    config: EpsConfig
    model: str = "mistral"  # 4 query heads of 32 over 2 kv heads; llama2: 4 of 16 over 4
    kv_dtype: str = "float32"
    kv_bits: Any = (16, 16)
    verify: SpeculativeConfig | None = None

    @property
    def rounded(self) -> bool:
        """K or V are stored in fewer than 32 bits."""
        return self.kv_dtype != "float32" or self.kv_bits != (16, 16)


CONFIGS = {
    "off": Golden(eps("off")),
    "rq": Golden(eps("rq")),
    "rq-one-stage-g8": Golden(eps("rq", group_size=8, cascade=(), rescore=0.0)),
    "rq-two-stages-refine": Golden(eps("rq", cascade=(0.5, 0.3), rescore=0.25, budget=0.1)),
    "rq-sum": Golden(eps("rq", combine="sum", budget=0.1)),
    "rq-every-head": Golden(eps("rq", mean_tokens=32), model="llama2"),
    "rq-strict": Golden(eps("rq", bound_bits=8, strict=True, epsilon=0.1, budget=0.1)),
    "rq-bfloat16": Golden(eps("rq"), kv_dtype="bfloat16"),
    "rq-k8-v4": Golden(eps("rq", group_size=1), kv_dtype="bfloat16", kv_bits=(8, 4)),
    "rq-nvfp4-fp8": Golden(eps("rq"), kv_dtype="bfloat16", kv_bits=("nvfp4", "fp8")),
    "box-union-g16": Golden(eps("box", group_size=16, scope="union")),
    "moments": Golden(eps("moments", group_size=8)),
    "jl-threshold": Golden(eps("jl", policy="threshold", top_pages=6)),
    "meanstd-every-head": Golden(eps("meanstd", group_size=2), model="llama2"),
    "norm": Golden(eps("norm")),
    "rq-verified": Golden(eps("rq", budget=0.5), verify=SpeculativeConfig("tokens", 2)),
}


@cache
def saved(name: str) -> Path:
    """Return the directory of a tiny model whose weights do not depend on the machine."""

    def draw(model: Any) -> None:
        rng = np.random.default_rng(0)
        for parameter_name, parameter in model.named_parameters():
            drawn = rng.normal(0, tiny_models.WEIGHT_STD, parameter.shape)
            parameter.copy_(torch.from_numpy(drawn + 1.0 if "norm" in parameter_name else drawn))

    return tiny_models.save_model(name, Path(_ROOT.name) / name, change=draw)


def tokens_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, tiny_models.VOCAB_SIZE, length).tolist()


def measure(backend: Any, device: str, golden: Golden, near: bool = False) -> dict[str, Any]:
    """Run one configuration. `near`: find the near ties, too; for the reference alone.

    The result is JSON: `logits` [steps][B][V], `selections` [steps][layers][B][Hkv] lists of groups (None for a layer
    that reads all), `near` alike, `bytes` [steps][layers] [K and V, summaries]; of a verified run `tokens` [B] lists,
    and of each round `drafts` [drafted, accepted], each [B], and `bytes` [drafts' K and V, their summaries, the
    pass's K and V].
    """
    model = Model(backend, device, saved(golden.model), golden.kv_dtype, kv_bits=golden.kv_bits)
    model.decoder.tap = lambda layer, q: None  # steps go layer by layer on every device
    if golden.verify is not None:
        prompts = [tokens_of(length) for length in VERIFIED_LENGTHS]
        run = model.verified(prompts, golden.config, VERIFIED_TOKENS, Sampling(), golden.verify)
        return {
            "tokens": run.said,
            "drafts": [[one.drafted, one.accepted] for one in run.records],
            "bytes": [[one.bytes_kv_draft, one.bytes_summary_draft, one.bytes_kv_verify] for one in run.records],
        }
    texts = [tokens_of(length + STEPS) for length in LENGTHS]
    # `start` leaves the last token to the first step
    kept, pool, sequences = model.start([one[: 1 - STEPS] for one in texts], golden.config)
    reads: list[Any] = []

    def recorded(*arguments: Any, **named: Any) -> Any:
        out, read = sparse_attention(*arguments, **named)
        chosen = lists(backend, read.selection)
        reads.append((chosen, near_ties(*arguments[1:5], chosen) if near else None))
        return out, read

    found: dict[str, Any] = {"logits": [], "selections": [], "near": [], "bytes": []}
    with mock.patch.object(layers, "sparse_attention", recorded):
        for step in range(-STEPS, 0):
            news = [one[step] for one in texts]
            slots = np.concatenate([pool.append(s, [new])[0] for s, new in zip(sequences, news, strict=True)])
            reads.clear()
            kept, output = model.decoder.step(
                kept,
                np.array(news),
                slots,
                pool.table(sequences),
                pool.lengths(sequences),
                golden.config.selection_config,
            )
            found["logits"].append(output.logits.tolist())
            found["selections"].append([chosen for chosen, _ in reads])
            found["near"].append([ties for _, ties in reads])
            found["bytes"].append([[one.kv_bytes_read, one.summary_bytes_read] for one in output.layers])
    return found


def lists(backend: Any, selection: Any) -> Any:
    """Return the selected groups as [B][Hkv] lists, None where all are read."""
    if selection is None:
        return None
    groups, counts = backend.to_numpy(selection.groups), backend.to_numpy(selection.counts)
    return [[one[:n].tolist() for one, n in zip(*pair, strict=True)] for pair in zip(groups, counts, strict=True)]


def near_ties(kept: Any, layer: int, q: Any, plan: Any, chosen: Any) -> Any:
    """Return [B][Hkv] lists of the groups that noise of NEAR_NATS in the reference's scores adds or drops."""
    if chosen is None:
        return None
    rng, found = np.random.default_rng(layer), [[set[int]() for _ in heads] for heads in chosen]

    def noisy(*arguments: Any) -> Any:
        scores = reference.score(*arguments)
        scores.estimate[...] += NEAR_NATS * rng.choice([-1.0, 1.0], scores.estimate.shape)
        return scores

    other = SimpleNamespace(**vars(reference) | {"score": noisy})
    for _ in range(DRAWS):
        _, read = sparse_attention(other, copy.copy(kept), layer, q, plan)  # a copy counts what these reads read
        for one, drawn, want in zip(found, lists(reference, read.selection), chosen, strict=True):
            for head in range(len(one)):
                one[head] |= set(drawn[head]) ^ set(want[head])
    return [[sorted(one) for one in heads] for heads in found]


def to_keep(found: dict[str, Any]) -> dict[str, Any]:
    """Return what the file keeps of a run of the reference."""
    if "logits" not in found:
        return found
    logits = np.array(found["logits"])
    places = logits[:, :, :: -(-logits.shape[2] // PLACES)].round(7)
    return {"deviation": round(float(logits.std()), 7), **found, "logits": places.tolist()}


def differences(golden: Golden, found: dict[str, Any], want: dict[str, Any], ref_cache: bool = False) -> list[str]:
    """Return one line for every kind of difference between a run and the kept one; `reference`: it is the reference."""
    if golden.verify is not None:
        return [f"{name}: {found[name]}, not {want[name]}" for name in want if found[name] != want[name]]
    said, ties = [], 0
    for step, layer in np.ndindex(STEPS, len(want["selections"][0])):
        got, kept, near = (one[step][layer] for one in (found["selections"], want["selections"], want["near"]))
        if got is None or kept is None:
            if got != kept:
                said.append(f"step {step}, layer {layer}: only one of the two reads every group")
            continue
        for b, head in np.ndindex(len(kept), len(kept[0])):
            differ = set(got[b][head]) ^ set(kept[b][head])
            ties += bool(differ)
            if differ - set(near[b][head]) or (differ and ref_cache):
                said.append(f"step {step}, layer {layer}, sequence {b}, kv head {head}: groups {sorted(differ)} differ")
    if not ties and found["bytes"] != want["bytes"]:
        said.append(f"bytes by step and layer, K and V, summaries: {found['bytes']}, not {want['bytes']}")
    logits = np.array(found["logits"])
    off = np.abs(logits[:, :, :: -(-logits.shape[2] // PLACES)] - np.array(want["logits"])).max() / want["deviation"]
    limit = (
        TIE_TOLERANCE if ties else TOLERANCE["reference" if ref_cache else "rounded" if golden.rounded else "float32"]
    )
    if not off <= limit:  # NaN, too
        said.append(f"logits are off by {off:.1e} standard deviations, more than {limit:.0e}")
    return said


def read() -> dict[str, Any]:
    return json.loads(FILE.read_text())


def write() -> None:
    """Write the file again: a line for each kind of number of each configuration."""
    blocks = []
    for name, golden in CONFIGS.items():
        kept = to_keep(measure(reference, "cpu", golden, near=True))
        lines = [f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in kept.items()]
        blocks.append(f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}")
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text("{\n" + ",\n".join(blocks) + "\n}\n")


if __name__ == "__main__":
    write()
