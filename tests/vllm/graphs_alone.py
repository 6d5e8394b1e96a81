"""A process of its own for test_graphs.py: decode batches as full CUDA graphs have them, by Triton's interpreter.

A captured graph knows nothing of a batch but what lies at the addresses of the one that it was captured with. So all
batches of so many rows are computed by the first one's arrays, and everything else of theirs is withheld.
"""

import json
import sys
from dataclasses import replace
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
from vllm import SamplingParams
from vllm.config.compilation import CUDAGraphMode

from eps_cuda.integrations.vllm import graphs
from eps_cuda.integrations.vllm import runtime as runtime_module
from eps_cuda.integrations.vllm.graphs import DecodeBatch, DecodeGraphs

SETTINGS = {"method": "rq", "budget": 0.3, "kernels": "triton", "num_recent_tokens": 16}
SERVER = {"block_size": 64, "max_model_len": 256}
PADDED = {"seq_lens": 0, "block_table_tensor": 0, "slot_mapping": -1}
captured: dict[int, DecodeBatch] = {}
replays = 0
padding = 0  # rows behind a batch's own, as vLLM has where it captured larger ones
held: dict[tuple[str, int], torch.Tensor] = {}  # vLLM's arrays with padding, at fixed addresses
seen: list[Any] = []  # vLLM's metadata, as it was given
prompts: list[Any] = []  # of batches with a prompt's last token: groups that rows select, and all of theirs


def addresses(batch: DecodeBatch) -> list[int]:
    arrays = [batch.slots, batch.lengths, batch.table, batch.wanted, batch.depth.rescored[0]]
    return [one.data_ptr() for one in [*arrays, *(part for part, _ in batch.depth.cascaded)]]


def padded(array: torch.Tensor, value: int = 0) -> torch.Tensor:
    return torch.cat([array, array.new_full((padding, *array.shape[1:]), value)]) if padding else array


def replay() -> None:
    """From now on layers attend by what was captured."""
    attend, begin = DecodeBatch.attend, DecodeGraphs.begin

    def begun(self: DecodeGraphs, common: Any) -> DecodeBatch | None:
        seen.append(common)
        if common.max_query_len == 1 and padding:
            arrays = {name: padded(getattr(common, name), value) for name, value in PADDED.items()}
            for name, array in arrays.items():
                arrays[name] = held.setdefault((name, len(array)), array).copy_(array)
            common = replace(common, **arrays)
        batch = begin(self, common)
        if batch is not None and common.is_prefilling is not None and common.is_prefilling.any():
            lengths = common.seq_lens_cpu_upper_bound
            prompts.append(
                [batch.wanted[: len(lengths)].tolist(), (-(-lengths // self.config.cache_config.S)).tolist()]
            )
        return batch

    def attended(self: DecodeBatch, place: int, impl: Any, *arguments: torch.Tensor) -> None:
        global replays
        first = captured.setdefault(len(self.lengths), self)
        replays += first is not self
        assert addresses(first) == addresses(self) and first.graphs is self.graphs
        *read, output = map(padded, arguments)
        OnDevice.inside += 1  # the interpreter copies what it reads
        attend(first, place, impl, *read, output)
        OnDevice.inside -= 1
        arguments[-1].copy_(output[: len(arguments[-1])])

    DecodeBatch.attend, DecodeGraphs.begin = attended, begun  # type: ignore[method-assign]


def say(llm: Any, asked: Any) -> Any:
    return [found for found, _ in engines.say(llm, asked, 4, logprobs=None)]


def joined(llm: Any, asked: Any) -> Any:
    """Return the tokens of two prompts, of which the second is added while the first decodes."""
    drawn, said, steps = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False), {}, 0
    llm.llm_engine.add_request("0", {"prompt_token_ids": asked[0]}, drawn)
    while llm.llm_engine.has_unfinished_requests():
        said |= {one.request_id: list(one.outputs[0].token_ids) for one in llm.llm_engine.step()}
        steps += 1
        if steps == 4:
            llm.llm_engine.add_request("1", {"prompt_token_ids": asked[1]}, drawn)
    return [said[name] for name in sorted(said)]


def summarised(cache: Any) -> int:
    """Groups with a summary, which host and device count alike."""
    numbers = [(int(valid.sum()), int((state.fill == state.group_size).sum())) for valid, state in
               zip(cache.valid, cache.state, strict=True)]  # fmt: skip
    assert all(device == host for device, host in numbers)
    return sum(host for _, host in numbers)


def main() -> None:
    global padding, replays
    runtime_module.checked_kernels = lambda backend, kernels, *shapes: kernels  # a minute here, and tested elsewhere
    engines.FAMILIES["short"] = "Qwen2Config", {"tie_word_embeddings": True, "num_hidden_layers": 2}
    model = engines.save("short", Path(sys.argv[1]))
    found: dict[str, Any] = {}
    asked = engines.prompts(188, 126)  # decoding fills a unit of the second
    with engines.engine(model, SETTINGS, **SERVER) as llm:
        engines.runtime(llm).sparse.keep_records = True
        found["eager"], found["eager stats"] = say(llm, asked), engines.stats(llm)
        found["eager masses"] = [one.skipped_mass_mean for one in engines.runtime(llm).sparse.take_records()]
        llm.reset_prefix_cache()
        found["joined"] = [joined(llm, asked)]
        found["dense"] = [tokens for tokens, _ in engines.say_dense(llm, asked, 4)]
    runtime_module.uncaptured = lambda *arguments: None
    replay()
    with engines.engine(model, SETTINGS, **SERVER) as llm:
        own = engines.runtime(llm)
        own.vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
        own.reset()
        own.sparse.keep_records = True
        found["graphs"], found["graphs stats"] = say(llm, asked), engines.stats(llm)
        found["graphs masses"] = [one.skipped_mass_mean for one in own.sparse.take_records()]
        own.sparse.keep_records = False
        found["replays"], found["summarised"] = replays, summarised(own.cache)
        # a batch that is made to be captured counts nowhere
        (builder,) = llm.llm_engine.model_executor.driver_worker.worker.model_runner.attn_groups[0][0].metadata_builders
        builder.build_for_cudagraph_capture(seen[-1])
        made_up = {"seq_lens_cpu_upper_bound": torch.ones_like(seen[-1].seq_lens), "is_prefilling": None}
        builder.build(0, replace(seen[-1], **made_up))  # in piecewise graphs, or of replicas with nothing to do
        found["captured stats"] = engines.stats(llm)
        llm.reset_prefix_cache()
        # the second time all but the last token is there: a batch of one token a row that belongs to a prompt
        found["cached"] = [say(llm, [asked[0][:129]]) for _ in range(2)]
        found["prompts"] = prompts
        found["cached stats"] = engines.stats(llm)
        llm.reset_prefix_cache()
        with pytest.MonkeyPatch.context() as patch:
            device.__wrapped__(patch)(ON_HOST_TOO + ON_DEVICE_ALONE)
            found["on a device"] = say(llm, asked)
            found["waits"] = OnDevice.waits, list(OnDevice.reads)
            found["device stats"] = engines.stats(llm)
        llm.reset_prefix_cache()
        found["joined"].append(joined(llm, asked))
        found["joined stats"] = engines.stats(llm)
        llm.reset_prefix_cache()
        padding, graphs.HELD = 2, 2
        found["padded"], found["waiting"] = say(llm, asked), len(own.graphs._slots)
        found["padded stats"] = engines.stats(llm)
        found["padded summarised"] = summarised(own.cache)
        padding, graphs.HELD = 0, 32
        llm.reset_prefix_cache()
        for flat in (
            {"budget": 0.9, "budget_floor": 256},
            {"num_recent_tokens": 8},
            {"budget": 0.3, "budget_floor": 0},
        ):
            try:
                llm.collective_rpc("eps_set", kwargs=flat)
            except Exception as error:
                found["refused"] = str(error)
                found["all"], found["all stats"] = say(llm, asked), engines.stats(llm)
        say(llm, asked)  # whose writes the host does not know yet
        llm.collective_rpc("eps_set", kwargs={"on": False})
        found["switched off stats"], found["switched off"] = engines.stats(llm), summarised(own.cache)
        llm.reset_prefix_cache()
        found["off"], found["off stats"] = say(llm, asked), engines.stats(llm)
        found["off summarised"] = summarised(own.cache)
        llm.collective_rpc("eps_set", kwargs={"on": True})
        found["forgotten"] = summarised(own.cache)
        # the second comes when what the first needs is summarised already
        found["on"], found["on stats"] = say(llm, asked[:1]) + say(llm, asked[1:]), engines.stats(llm)
        llm.reset_prefix_cache()
        own.vllm_config.compilation_config.max_cudagraph_capture_size, replays = 1, 0
        found["many"], found["many replays"] = say(llm, asked), replays
        type(builder)(builder.kv_cache_spec, builder.layer_names, own.vllm_config, builder.device)
        found["held"] = own.cache is not None
        captured.clear()  # as vLLM does
        llm.reset_prefix_cache()
        found["made again"] = say(llm, asked)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    for _ in stand_in.__wrapped__():
        main()
