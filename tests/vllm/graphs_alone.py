"""A process of its own for test_graphs.py: decode batches as full CUDA graphs have them, by Triton's interpreter.

A captured graph knows nothing of a batch but what lies at the addresses of the one that it was captured with. So all
batches of so many rows are computed by the first one's arrays, and everything else of theirs is withheld.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import triton_interpreter  # noqa: F401  before any kernel

# isort: split
import engines
import pytest
import torch
from test_device_reads import ON_DEVICE_ALONE, ON_HOST_TOO, OnDevice, device
from test_gpu_routes import stand_in
from vllm.config.compilation import CUDAGraphMode

from eps_cuda.integrations.vllm import runtime as runtime_module
from eps_cuda.integrations.vllm.graphs import DecodeBatch

SETTINGS = {"method": "rq", "budget": 0.3, "kernels": "triton", "num_recent_tokens": 16}
SERVER = {"block_size": 64, "max_model_len": 256}
captured: dict[int, DecodeBatch] = {}
replays = 0


def addresses(batch: DecodeBatch) -> list[int]:
    arrays = [batch.slots, batch.lengths, batch.table, batch.wanted, batch.depth.rescored[0]]
    return [one.data_ptr() for one in [*arrays, *(part for part, _ in batch.depth.cascaded)]]


def replay() -> None:
    """From now on layers attend by what was captured."""
    attend = DecodeBatch.attend

    def attended(self: DecodeBatch, place: int, impl: Any, *arguments: Any) -> None:
        global replays
        first = captured.setdefault(len(self.lengths), self)
        replays += first is not self
        assert addresses(first) == addresses(self) and first.graphs is self.graphs
        query, key, value, _, output, _ = arguments
        OnDevice.inside += 1  # the interpreter copies what it reads
        attend(first, place, impl, query, key, value, None, output, None)
        OnDevice.inside -= 1

    DecodeBatch.attend = attended  # type: ignore[method-assign]


def say(llm: Any, asked: Any) -> Any:
    return [found for found, _ in engines.say(llm, asked, 4, logprobs=None)]


def main() -> None:
    runtime_module.checked_kernels = lambda backend, kernels, *shapes: kernels  # a minute here, and tested elsewhere
    engines.FAMILIES["short"] = "Qwen2Config", {"tie_word_embeddings": True, "num_hidden_layers": 2}
    model = engines.save("short", Path(sys.argv[1]))
    found: dict[str, Any] = {}
    asked = engines.prompts(188, 100)
    with engines.engine(model, SETTINGS, **SERVER) as llm:
        found["eager"], found["eager stats"] = say(llm, asked), engines.stats(llm)
        found["dense"] = [tokens for tokens, _ in engines.say_dense(llm, asked, 4)]
    runtime_module.uncaptured = lambda *arguments: None
    replay()
    with engines.engine(model, SETTINGS, **SERVER) as llm:
        own = engines.runtime(llm)
        own.vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
        own.reset()
        found["graphs"], found["graphs stats"] = say(llm, asked), engines.stats(llm)
        found["replays"] = replays
        found["states alike"] = all(
            torch.equal(valid.bool(), torch.from_numpy(state.fill == state.group_size))
            for valid, state in zip(own.cache.valid, own.cache.state, strict=True)
        )
        llm.reset_prefix_cache()
        # the second time all but the last token is there: a batch of one token a row that belongs to a prompt
        found["cached"] = [say(llm, [asked[0][:129]]) for _ in range(2)]
        found["cached stats"] = engines.stats(llm)
        llm.reset_prefix_cache()
        with pytest.MonkeyPatch.context() as patch:
            device.__wrapped__(patch)(ON_HOST_TOO + ON_DEVICE_ALONE)
            found["on a device"] = say(llm, asked)
            found["waits"] = OnDevice.waits, OnDevice.reads
            found["device stats"] = engines.stats(llm)
            found["reads at the end"] = OnDevice.reads
        for flat in ({"budget": 0.9}, {"budget": 0.3}, {"num_recent_tokens": 8}):
            try:
                llm.collective_rpc("eps_set", kwargs=flat)
                found[str(flat)] = "set"
            except Exception as error:
                found[str(flat)] = str(error)
        llm.collective_rpc("eps_set", kwargs={"on": False})
        llm.reset_prefix_cache()
        found["off"], found["off stats"] = say(llm, asked), engines.stats(llm)
        llm.collective_rpc("eps_set", kwargs={"on": True})
        found["on"], found["on stats"] = say(llm, asked), engines.stats(llm)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    for _ in stand_in.__wrapped__():
        main()
