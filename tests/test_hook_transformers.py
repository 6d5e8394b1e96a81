"""EPS inside transformers: bit-equal where nothing is left out, the oracle's attention where something is."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_models import DEVICES, FAMILIES, RQ, SMALL, SPARSE, Attending, Reference, feed, prompts, stock, tiny
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from eps_core import LLM
from eps_core.config.eps import EpsConfig
from eps_core.decode.sampling import Sampling
from eps_core.decode.session import Session
from eps_core.errors import ConfigError
from eps_core.evaluation.compare import demo_document
from eps_core.integrations.settings import Settings
from eps_core.load import load_backend
from eps_core.models.config import DEMO_MODEL
from eps_cuda.integrations.transformers import EpsCache, eps, open_engine

DTYPES = (torch.float32, torch.bfloat16)
ROWS = {"single": [330], "padded": [300, 330, 290]}
SPARSE_CASES = [
    (device, kernels, name, rows)
    for device in DEVICES for kernels in load_backend("cuda").usable_kernels(device) for name in FAMILIES
    for rows in ROWS
    # Triton's interpreter is slow, and arrays are nobody's default
    if device != "cpu" or kernels == "numba" or (name, rows) == ("gemma3", "single")
]  # fmt: skip
# forwards of a conversation: prompt chunks, single tokens, tokens taken back, tokens to verify, single tokens
CHUNKS = ((0, 40), (40, 41), (41, 64), (64, 65), (65, 66))


def conversation(model: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """Logits of the real tokens of each forward."""
    said = []

    def forward(start: int, end: int) -> None:
        logits = feed(model, cache, ids, mask, start, end)
        said.append(logits[mask[:, start:end].bool()])

    cache.activate_past_recording()
    with torch.no_grad():
        for start, end in CHUNKS:
            forward(start, end)
        cache.crop(-3)
        forward(63, 68)
        cache.crop(-2)
        for start in range(66, 72):
            forward(start, start + 1)
    return said


@pytest.mark.parametrize("lengths", [[72], [72, 60, 41, 31]], ids=["single", "padded"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("device", DEVICES)
def test_off_and_everything_visited_are_sdpa_bit_for_bit(
    device: str, name: str, dtype: torch.dtype, lengths: list[int]
) -> None:
    model, (ids, mask) = tiny(name, dtype, device=device), prompts(lengths, device=device)
    expected = conversation(model, stock(model), ids, mask)
    whole = EpsCache(model, method="rq", budget=1.0)
    off = EpsCache(model, method="rq", budget=0.1)
    off.sparse.on = False
    with Attending(model):
        for cache in (stock(model), whole, off):
            for one, other in zip(conversation(model, cache, ids, mask), expected, strict=True):
                assert torch.equal(one, other)
    stats = whole.sparse.stats()
    # of the last row's first 41 tokens, of which the second forward is one, all are padding
    odd = {"mask": len(lengths) * len(SPARSE[name])} if len(lengths) > 1 else {}
    assert stats["fallbacks"] == odd and stats["bytes_ratio"] == 1 and stats["steps"] == 9
    assert off.sparse.stats()["steps"] == 0
    assert [i for i, layer in enumerate(whole.layers) if type(layer).__name__ == "EpsLayer"] == list(SPARSE[name])


@pytest.mark.parametrize(("device", "kernels", "name", "rows"), SPARSE_CASES)
def test_sparse_rows_are_the_oracles(device: str, kernels: str, name: str, rows: str) -> None:
    model, (ids, mask) = tiny(name, device=device), prompts(ROWS[rows], seed=1, device=device)
    # rq rounds queries, and a last bit of another forward's can round one the other way
    config = EpsConfig.of("meanstd", budget=0.2, **SMALL)
    cache = EpsCache(model, config, kernels=kernels)
    cache.sparse.keep_lists = True
    reference, end = Reference(config), ids.shape[1]
    steps = 2 if (device, kernels) == ("cpu", "triton") else 6
    found: dict[str, list[torch.Tensor]] = {}
    for attending, one in (("eps", cache), (reference.NAME, stock(model)), ("sdpa", stock(model))):
        with Attending(model, attending), torch.no_grad():
            feed(model, one, ids, mask, 0, end - steps)
            found[attending] = [feed(model, one, ids, mask, at, at + 1) for at in range(end - steps, end)]
    for ours, theirs, dense in zip(*found.values(), strict=True):
        assert (ours - theirs).abs().max() < 2e-4 < 100 * (dense - theirs).abs().max()
    cache.sparse.settle()
    listed = [step[layer] for step in cache.sparse.lists for layer in range(len(SPARSE[name]))]
    assert len(listed) == len(reference.lists) == steps * len(SPARSE[name])
    for mine, judged in zip(listed, reference.lists, strict=True):
        for row, its in zip(mine, judged, strict=True):
            for head, heads in zip(row, its, strict=True):
                np.testing.assert_array_equal(head, heads)


def test_head_modes_are_the_models_layers() -> None:
    """Of four layers every other one is sparse, and of those the first alone reads less."""
    model, (ids, mask) = tiny("gemma3"), prompts([300])
    modes = (("window", "window"), ("sparse", "sparse"), ("window", "window"), ("dense", "dense"))
    cache = EpsCache(model, method="rq", budget=0.2, head_modes=modes, **SMALL)
    cache.sparse.keep_lists = True
    with Attending(model), torch.no_grad():
        feed(model, cache, ids, mask, 0, 299)
        feed(model, cache, ids, mask, 299, 300)
    cache.sparse.settle()
    (step,) = cache.sparse.lists
    assert step[0] is not None and step[1] is None
    few = EpsCache(model, method="rq", head_modes=(("sparse",),) * 4)
    with Attending(model), torch.no_grad(), pytest.raises(ConfigError, match="head modes of 1 kv heads"):
        feed(model, few, ids, mask, 0, 10)


# ---- the demo model, beside our own decoder ----


@pytest.fixture(scope="module")
def demo() -> Any:
    return AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32, attn_implementation="sdpa").eval()


def test_the_demo_needle_is_answered_dense_and_sparse_with_our_bytes() -> None:
    made = demo_document()
    settings = Settings.of({"method": "rq", "budget": 0.05})
    llm = LLM(backend="cuda", device="cpu", dtype="float32", config=settings.config)
    session = llm.session
    prompt = session.encode(made.prompt)
    assert len(prompt) == 4096
    engine = open_engine(DEMO_MODEL, settings, "cpu")
    try:
        given = {
            sparse: [step.tokens[0] for step in engine.generate([prompt], 8, Sampling(), sparse)]
            for sparse in (False, True)
        }
        assert given[True] == given[False] and session.decode(given[True]).startswith(made.answer)
        assert engine.prefill_ms is not None and engine.prefill_ms > 0
        assert engine.describe()["engine"] == "transformers" and engine.describe()["dtype"] == "float32"
        records = engine.sparse.take_records()
    finally:
        engine.close()
    ours = llm.generate(made.prompt, max_new_tokens=8, ignore_eos=True)
    assert ours.tokens == given[True]
    assert [record.lengths for record in records] == [[4096 + step] for step in range(8)]
    assert ours.kv_bytes_read < 0.07 * ours.kv_bytes_dense
    assert sum(r.bytes_kv_read_est + r.bytes_summary_read for r in records) == ours.kv_bytes_read
    assert sum(r.bytes_kv_dense for r in records) == ours.kv_bytes_dense
    assert sum(r.pages_visited for r in records) == ours.groups_read


def test_an_engine_draws_from_its_seed_and_may_be_left(tmp_path: Path) -> None:
    ids, mask = prompts([70, 55, 61], seed=3)
    rows = [row[m.bool()].tolist() for row, m in zip(ids, mask, strict=True)]
    tiny("llama").save_pretrained(tmp_path)
    engine = open_engine(tmp_path, Settings.of({"method": "rq", "budget": 0.3, **SMALL}), "cpu")
    try:
        drawn = [
            [s.tokens[0] for s in engine.generate([rows[0]], 12, Sampling(1.5, 0.9, seed), True)] for seed in (1, 1, 2)
        ]
        assert drawn[0] == drawn[1] != drawn[2]
        first = next(steps_of := engine.generate(rows, 200, Sampling(), True))
        steps_of.close()
        assert first.sequences == [0, 1, 2]
    finally:
        engine.close()


def test_one_line_turns_it_on_for_whatever_makes_its_own_cache(demo: Any) -> None:
    session = Session.open(backend="cuda", device="cpu", dtype="float32")
    made = demo_document()
    ids = torch.tensor([session.encode(made.prompt)])
    with eps(demo, method="rq", budget=0.05) as sparse:
        said = demo.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    assert session.decode(said.tolist()).startswith(made.answer)
    # the first token comes from the prompt's own forward
    assert sparse.stats()["steps"] == 5 and sparse.stats()["bytes_ratio"] < 0.07 and sparse.stats()["fallbacks"] == {}


class Reads(TorchFunctionMode):
    """Counts every way to bring a tensor's values to the host, which copies nothing on a CPU, and uploads that wait."""

    WAYS = "cpu item tolist nonzero is_nonzero equal allclose __array__ __bool__ __int__ __float__ __index__"

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.on_host: list[torch.Tensor] = []  # made of arrays of numpy, and not moved

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        to_cpu = func.__name__ == "to" and "cpu" in map(str, [*args[1:], *kwargs.values()])
        upload = to_cpu and any(one is args[0] for one in self.on_host)
        moved = to_cpu and not (upload and kwargs.get("non_blocking"))
        if func.__name__ in self.WAYS.split() or moved:
            self.seen.append(func.__name__)
        return func(*args, **kwargs)


@pytest.mark.parametrize(("lengths", "reads"), [([330], 0), ([330, 300], 1)], ids=["single", "padded"])
def test_a_step_reads_nothing_from_the_device_but_a_mask(
    lengths: list[int], reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond what the model does without EPS. Statistics come in one copy for many steps. Kernels are left out: their
    interpreter reads what they are given."""
    model, (ids, mask) = tiny("llama"), prompts(lengths)
    kernel = type(importlib.import_module("eps_cuda.kernels.select")._list)

    def steps(cache: Any, name: str) -> list[str]:
        with Attending(model, name), torch.no_grad(), monkeypatch.context() as patched:
            feed(model, cache, ids, mask, 0, ids.shape[1] - 4)
            patched.setattr(kernel, "__getitem__", lambda self, grid: lambda *args, **named: launched.append(self))
            with Reads() as read:
                made = torch.from_numpy
                patched.setattr(torch, "from_numpy", lambda array: read.on_host.append(made(array)) or read.on_host[-1])
                for at in range(ids.shape[1] - 4, ids.shape[1] - 1):
                    feed(model, cache, ids, mask, at, at + 1)
        return read.seen

    launched: list[Any] = []
    cache = EpsCache(model, RQ, kernels="triton")
    usual, own = steps(stock(model), "sdpa"), steps(cache, "eps")
    for held in (cache.sparse._steps, cache.sparse._held):
        held.clear()  # numbers that no kernel wrote
    assert len(own) == len(usual) + 3 * reads, (own, usual)
    assert len(launched) >= 3 * 2 * 5, "3 steps of 2 sparse layers"
