"""Count how often a forward waits for a device: an engine runs on a CPU, and its metadata acts as if it lay on a GPU.

`OnDevice` notes every way to bring values to the host, which copies nothing on a CPU and would go unseen.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import engines
import plain_backend
import pytest
import torch
from test_gpu_routes import stand_in  # noqa: F401  used by every test
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

from eps_cuda.integrations.vllm.backends import EpsBuilder, EpsImpl
from eps_cuda.integrations.vllm.forward import HostArrays

TO_HOST = ["cpu", "numpy", "item", "tolist", "nonzero", "is_nonzero", "equal", "allclose"]
TO_HOST += ["__array__", "__bool__", "__int__", "__float__", "__index__", "__contains__", "__repr__", "__format__"]
ON_HOST_TOO = "query_start_loc", "seq_lens"  # of vLLM's metadata
ON_DEVICE_ALONE = "block_table_tensor", "slot_mapping"


class OnDevice(torch.Tensor):
    """A tensor on a CPU that says that it is on none. A copy that does not block arrives when an event is waited for;
    every other way to its values is one of `reads`."""

    reads: list[str]
    copies: list[int]  # elements of each copy that does not block
    arriving: list[tuple[torch.Tensor, torch.Tensor]]
    waits = 0
    inside = 0  # kernels and vLLM's own builder, which would run on the device

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if cls.inside:
            return super().__torch_function__(func, types, args, kwargs)
        if func == torch.Tensor.is_cpu.__get__:  # type: ignore[attr-defined]
            return False
        name = func.__name__
        if name == "copy_" and not isinstance(args[0], cls):
            target, source = args[0], args[1].as_subclass(torch.Tensor)
            if not kwargs.get("non_blocking"):
                cls.reads.append(name)
                return target.copy_(source)
            cls.copies.append(source.numel())
            cls.arriving.append((target, source.clone()))
            return target.fill_(-7)
        if name in TO_HOST or (name in ("to", "type") and "cpu" in map(str, [*args[1:], *kwargs.values()])):
            cls.reads.append(name)
        return super().__torch_function__(func, types, args, kwargs)


def on_device(array: torch.Tensor) -> torch.Tensor:
    return array.as_subclass(OnDevice)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[str, ...]], None]:
    """Return a function that puts fields of vLLM's metadata on the device, from now on."""

    class Event:
        def record(self) -> None:
            pass

        def synchronize(self) -> None:
            OnDevice.waits += 1
            for target, source in OnDevice.arriving:
                target.copy_(source)
            OnDevice.arriving = []

    def inside(owner: type, name: str) -> None:
        real = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            OnDevice.inside += 1
            try:
                return real(*args, **kwargs)
            finally:
                OnDevice.inside -= 1

        monkeypatch.setattr(owner, name, run)

    def put(fields: tuple[str, ...]) -> None:
        build, write = EpsBuilder.build, EpsImpl.do_kv_cache_update

        def built(self: Any, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
            there = {name: on_device(getattr(common, name)) for name in fields}
            return build(self, common_prefix_len, replace(common, **there), fast_build)

        def written(self: Any, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
            slots = on_device(slot_mapping) if "slot_mapping" in fields else slot_mapping
            write(self, layer, key, value, kv_cache, slots)

        # not before an engine is there: vLLM's worker for CPUs puts an event of its own here
        monkeypatch.setattr(torch, "Event", Event)
        inside(CPUAttentionMetadataBuilder, "build")
        inside(plain_backend.PlainImpl, "forward")
        inside(plain_backend.PlainImpl, "do_kv_cache_update")
        monkeypatch.setattr(EpsBuilder, "build", built)
        monkeypatch.setattr(EpsImpl, "do_kv_cache_update", written)

    OnDevice.reads, OnDevice.copies, OnDevice.arriving, OnDevice.waits = [], [], [], 0
    return put


ROWS, STOCK = {"method": "rq"}, {"method": "meanstd", "route": "stock"}


@pytest.mark.parametrize(
    ("settings", "fields", "waits"),
    [
        (ROWS, ON_HOST_TOO, 0),
        (STOCK, ON_HOST_TOO, 0),
        (ROWS, ON_HOST_TOO + ON_DEVICE_ALONE, 1),
        (STOCK, ON_HOST_TOO + ON_DEVICE_ALONE, 1),
    ],
    ids=["rows, none", "stock, none", "rows", "stock"],
)
def test_a_forward_waits_for_the_device_once_at_most(
    settings: dict[str, Any], fields: tuple[str, ...], waits: int, device: Any
) -> None:
    asked = engines.prompts(200, 130)
    with engines.engine(engines.DEMO, {**settings, "budget": 0.3, "min_context": 0}) as llm:
        wanted = engines.say(llm, asked, 8, logprobs=None)
        llm.reset_prefix_cache()
        engines.runtime(llm).reset()
        device(fields)
        assert engines.say(llm, asked, 8, logprobs=None) == wanted
        found = engines.stats(llm)
    assert found["forwards"] > 8 and found["rows"] > 0
    assert not found["fallbacks"] and not found["failed_writes"]
    assert not OnDevice.reads, f"reads of the device in {found['forwards']} forwards: {OnDevice.reads}"
    assert len(OnDevice.copies) == OnDevice.waits == waits * found["forwards"]
    # as much of the table as is in use, which is wider
    assert not waits or max(OnDevice.copies) <= 4 * (2048 // 64) + 256 + 2 * 5


def test_what_the_metadata_did_not_have_is_read_from_the_device(device: Any) -> None:
    device(())
    table, starts = torch.arange(40, dtype=torch.int32).reshape(2, 20), torch.tensor([0, 1, 2], dtype=torch.int32)
    common = SimpleNamespace(
        is_prefilling=None, query_start_loc=on_device(starts), query_start_loc_cpu=starts + 0, max_seq_len=130,
        seq_lens=on_device(torch.tensor([130, 70])), seq_lens_cpu_upper_bound=None,
        block_table_tensor=on_device(table), slot_mapping=on_device(torch.tensor([1290, 710])),
    )  # fmt: skip
    drafts = HostArrays(common, 64, exact=False)
    assert drafts.read(common.query_start_loc).tolist() == [0, 1, 2]
    assert OnDevice.copies == [3 + 2 + 6 + 2], "vLLM's lengths on the host may be too long"
    host = HostArrays(common, 64, exact=True)
    assert host.read(common.query_start_loc).tolist() == [0, 1, 2]
    assert host.read(common.block_table_tensor).tolist() == [[0, 1, 2], [20, 21, 22]]
    assert host.read(common.slot_mapping).tolist() == [1290, 710] and host.read(common.seq_lens).tolist() == [130, 70]
    assert not OnDevice.reads and OnDevice.copies[1:] == [2 + 6 + 2] and OnDevice.waits == 2
    other = on_device(torch.tensor([5, 6]))  # of another KV cache group
    assert host.read(other).tolist() == [5, 6] and OnDevice.reads[0] == "cpu"
    host.read(common.slot_mapping[:1])
    assert OnDevice.reads.count("cpu") == 2, "the same memory, and fewer of it"
