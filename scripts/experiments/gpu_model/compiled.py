"""Print what compilers make of the kernels of a captured step: registers a thread, bytes spilled, shared memory.

    python scripts/experiments/gpu_model/compiled.py

No GPU is needed. The shapes are those of the measured layer: 8 kv heads of 128 dimensions with 4 query heads each, in
bfloat16, codes of single tokens read at once. AMD GPUs have no products of bits: there codes are read by
`_score_units`.
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[3] / folder) for folder in ("scripts", "tests")]

import click  # noqa: E402
from shared import markdown_table  # noqa: E402

from eps_core.errors import exit_code  # noqa: E402

TARGETS = (*(("cuda", arch, 32) for arch in (80, 86, 89, 90)), ("hip", "gfx942", 64))


@click.command()
def main() -> None:
    import triton_interpreter  # noqa: F401  before any module that holds kernels
    from test_triton_attend import merge_job, split_job
    from test_triton_attend_best import best_job
    from test_triton_select import JOBS as SELECTION
    from test_triton_units import BITS, JOBS, WIDE, for_amd
    from test_triton_write import Case, job_of, start_job
    from triton_aot import Job, compile_ahead, job

    from eps_cuda.kernels import bits

    written = Case(128, 1, "bfloat16", rescore=1.0)
    of_bits = job(bits._score_bits, BITS, WIDE, num_warps=1)
    of_units = JOBS["whole codes and rescoring bits"]

    def jobs_for(vendor: str) -> dict[str, Job]:
        choice = {
            name: replace(one, constants=one.constants | {"HIP": vendor == "hip"})
            for name, one in SELECTION.items() if "HIP" in one.constants
        }  # fmt: skip
        scores = {"scores": of_bits if vendor == "cuda" else for_amd(of_units)}
        return {
            "`_prepare`": start_job(vendor), **{f"`{one.kernel}`": one for one in scores.values()},
            "`_count_bins`": choice["bins"], "`_find_threshold`": choice["threshold"],
            "`attend_best_kernel`": best_job(vendor, "bf16", 128, 4, 1, "bf16"),
            "`write_kernel`": job_of(written, vendor), "`_round_queries`": JOBS["queries"],
            "`_list`": choice["list"],
            "`attend_split_kernel`": split_job(vendor, "bf16", 128, 4, 1, True, "bf16"),
            "`merge_kernel`": merge_job(128),
        }  # fmt: skip

    found: dict[str, list[str]] = {}
    for number, target in enumerate(TARGETS):
        jobs = jobs_for(target[0])
        for name, (made,) in zip(jobs, compile_ahead(list(jobs.values()), (target,)), strict=True):
            cells = found.setdefault(name, ["-"] * len(TARGETS))
            cells[number] = f"{made.registers}, {made.spilled_bytes}, {made.shared_bytes / 1024:.1f}"
    names = [f"sm_{arch}" if vendor == "cuda" else str(arch) for vendor, arch, _ in TARGETS]
    print(
        markdown_table(
            ["registers, bytes spilled, KiB shared", *names], [[name, *cells] for name, cells in found.items()]
        )
    )


if __name__ == "__main__":
    sys.exit(exit_code(main))
