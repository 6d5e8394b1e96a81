"""One suite over every backend: absence is loud. `EPS_TEST_BACKENDS` (comma separated) restricts what is asked for.

A test that takes `target` runs on the array operations of every backend and device; marked `kernels(name, ..)`, also
on the kernels of these names: numba, triton (interpreted where there is no GPU), metal (its text run on the CPU); with
`arrays=False` on these kernels alone; with `methods=(..)` kernels take only the parameters of these summary methods.

The suite has two tiers. `LEFT_OUT` lists, by marker, the tests that are not in the default tier; `--tier default` runs
all others, `--tier rest` runs these, and pytest without `--tier` runs both.
"""

import fnmatch
import gc
import os
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

# a shell that starts the suite in the background has it and all its children ignore Ctrl-C, which tests send to some
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import tiny_models

if find_spec("triton"):  # a Mac has none
    import triton_interpreter  # noqa: F401  fixes what the interpreter gets wrong in bfloat16

from eps_core.load import BACKENDS, load_backend

collect_ignore = ["vllm", "sglang"]  # suites of their own: scripts/test_vllm.sh, scripts/test_sglang.sh
REQUESTED = os.environ.get("EPS_TEST_BACKENDS", ",".join(BACKENDS)).split(",")

# patterns of `file::test[parameters]` that the default tier leaves out, by the marker that they get
LEFT_OUT = {
    "emulators": ("test_triton_*", "test_metal_*", "test_kernel_mutants.py*", "*-cpu-triton*", "*-cpu-metal*"),
    "engines": ("test_hook_*", "test_kvpress.py*"),
    "experiments": ("experiments/*",),
    "fuzz": (
        "test_damaged_inputs.py::test_damaged_*",
        "test_fuzz_cli.py*",
        "test_model_files.py::test_any_*",
    ),
    "slow": (
        "test_audit.py::test_audit_kl_*",
        "test_audit.py::test_methods_without_bounds_*",
        "test_bench.py::test_times_every_part_*",
        "test_bench.py::test_what_a_graph_records_*",
        "test_error_bounds.py::test_bounds_hold_for_hard_keys_and_queries*",
        "test_error_bounds.py::test_checker_finds_broken_summaries*",
        "test_error_bounds.py::test_codes_of_single_keys_certify_*",
        "test_error_bounds.py::test_everything_claimed_holds*",
        "test_cli.py::test_a_demo_whose_last_figure_fails_*",
        "test_cli.py::test_info_counts_memory_*",
        "test_cli.py::test_the_demo_answers_its_needle_*",
        "test_compile.py::test_what_was_compiled_*",
        "test_cost.py::test_run_is_sparse_from_where_it_pays*",
        "test_cpu_kernels.py::test_a_cpu_without_permutations*",
        "test_cpu_kernels.py::test_benchmarks_need_no_numba*",
        "test_cpu_rows.py::test_rows_are_as_exact_as_float32*",
        "test_cpu_threads.py::test_a_forked_child_*",
        "test_cpu_threads.py::test_kernels_run_on_the_team_*",
        "test_cpu_units.py::test_layers_share_*",
        "test_cpu_units.py::test_odd_queries*",
        "test_quantised_weights_run.py*",
        "test_evict_policies.py::test_it_keeps_what_its_formula_says*",
        "test_evicting.py::test_every_policy_decodes_*",
        "test_html_report.py*",
        "test_hub.py*",
        "test_kv_bits.py::test_a_run_counts_them*",
        "test_readme.py::test_their_commands_run_as_printed",
        "test_run_page_browser.py*",
        "test_real_engines.py*",
        "test_real_model.py*",
        "test_release.py*",
        "test_sampling.py::test_what_is_said_is_drawn_from_the_target*",
        "test_stored.py::test_a_second_run_*",
        "test_stored.py::test_a_wrong_file_*",
        "test_strided.py*",
        "test_terminal.py::test_progress_leaves_*",
        "test_terminal.py::test_the_progress_of_a_capture_*",
        "test_tiers.py::test_the_tiers_hold_every_test_once",
        "test_training.py*",
        "test_verified_drafters.py*",
        "test_verified_ends.py::test_a_stop_token_*",
        "test_verified_ends.py::test_sequences_that_end_*",
        "test_verified_text.py*",
        "test_wrong_verifiers.py*",
    ),
}
# tests that match a pattern above and are in the default tier nevertheless: a case of each engine and command
KEPT = (
    "test_hook_mlx_lm.py::test_a_directory_is_loaded_with_eps_on_and_generates",
    "test_hook_transformers.py::test_one_line_turns_it_on_*",
    "test_html_report.py::test_report_command_writes_the_page_whole",
    "test_hub.py::test_a_network_that_is_not_there_is_one_line",
)


class Target(NamedTuple):
    """What a test runs on; `kernels` of all caches that it makes without saying which."""

    backend: str
    device: str
    kernels: str


def _targets() -> list[Target]:
    """Every device that is present; a backend that does not import is an error."""
    found = []
    for name in REQUESTED:
        backend = load_backend(name)
        for device in backend.devices():
            kernels = [*backend.usable_kernels(device)]
            if name == "mlx" and "metal" not in kernels:
                kernels.append("metal")
            found += [Target(name, device, one) for one in kernels]
    return found


TARGETS = _targets()


class Bound(ModuleType):
    """A backend module whose caches use given kernels."""

    def __init__(self, module: ModuleType, kernels: str) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(vars(module))

        def new_cache(spec: Any, cache_config: Any, device: str = "auto", wanted: str = "auto") -> Any:
            return module.new_cache(spec, cache_config, device, kernels if wanted == "auto" else wanted)

        self.new_cache = new_cache


@cache
def bound(name: str, kernels: str) -> ModuleType:
    module = load_backend(name)
    return module if module.usable_kernels("cpu") == ["arrays"] else Bound(module, kernels)


def matches(nodeid: str, patterns: Iterable[str]) -> bool:
    test = nodeid.removeprefix("tests/")
    return any(fnmatch.fnmatchcase(test, pattern) for pattern in patterns)


def marker_of(nodeid: str) -> str | None:
    """Return the marker of a test outside the default tier, None for a test in it."""
    if matches(nodeid, KEPT):
        return None
    return next((name for name, patterns in LEFT_OUT.items() if matches(nodeid, patterns)), None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=("default", "rest", "all"), default="all", help="part of the suite that is run")


def _left_out_on_kernels(item: pytest.Item) -> bool:
    """Return whether a test on kernels has a parameter of a method that its mark does not name (array operations score
    it, and the kernels that attend to it are those of other methods) or a case that emulators, which are slow, skip."""
    marker, called = item.get_closest_marker("kernels"), getattr(item, "callspec", None)
    target = called.params.get("target") if called else None
    if marker is None or getattr(target, "kernels", "arrays") == "arrays":  # no kernels attribute: no target is here
        return False
    emulated, methods = marker.kwargs.get("emulated"), marker.kwargs.get("methods")
    slow = emulated is not None and target.device == "cpu" and target.kernels in ("triton", "metal")
    if slow and called.params["case"] not in emulated:
        return True
    for name, value in called.params.items() if methods else ():
        config = getattr(value, "config", value) if name in ("case", "config") else None
        method = value if name == "method" else config and config.cache_config.method
        if method is not None and method not in methods:
            return True
    return False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if not _left_out_on_kernels(item)]
    tiers: dict[str, list[pytest.Item]] = {"default": [], "rest": []}
    for item in items:
        marker = marker_of(item.nodeid)
        if marker is not None:
            item.add_marker(marker)
        tiers["default" if marker is None else "rest"].append(item)
    chosen = config.getoption("tier")
    if chosen != "all":
        items[:] = tiers.pop(chosen)
        (others,) = tiers.values()
        config.hook.pytest_deselected(items=others)


def pytest_collection_finish() -> None:
    """What is there by now, libraries and thousands of tests, is no garbage: collections need not look through it."""
    gc.collect()
    gc.freeze()


def pytest_report_header() -> list[str]:
    versions = {name: load_backend(name).versions() for name in REQUESTED}
    return [f"eps backend {t.backend} on {t.device}, kernels {t.kernels}: {versions[t.backend]}" for t in TARGETS]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    own = getattr(metafunc.module, "target", None)  # a module may have a fixture of that name of its own
    if "target" in metafunc.fixturenames and own is None:
        marker = metafunc.definition.get_closest_marker("kernels")
        names = () if marker and not marker.kwargs.get("arrays", True) else ("arrays",)
        names = (*names, *(marker.args if marker else ()))
        chosen = [target for target in TARGETS if target.kernels in names]
        metafunc.parametrize("target", chosen, ids=["-".join(target) for target in chosen], indirect=True)


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of the tiny model that the module names in `MODEL`, mistral where it names none."""
    import tiny_models  # transformers with it, which most runs of a few tests do not need

    return tiny_models.save_model(getattr(request.module, "MODEL", "mistral"), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session", autouse=True)
def small_buckets() -> Iterator[None]:
    """Triton's interpreter pays for padding."""
    if torch.cuda.is_available() or not find_spec("triton"):
        yield
        return
    from eps_cuda import graph

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph, "BUCKET_TOKENS", 512)
        yield


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Any:
    """(backend module, device)."""
    name, device, kernels = request.param
    if kernels == "metal" and device == "cpu":
        from metal import shim

        with shim.installed(getattr(request.module, "SHIM_ORDERS", shim.SCHEDULES[:1])):
            yield bound(name, kernels), device
    else:
        yield bound(name, kernels), device


@pytest.fixture(scope="session")
def saved() -> Callable[[str], Path]:
    """Name of a tiny model -> its directory, written once."""
    return tiny_models.saved


@pytest.fixture
def damaged(tmp_path: Path) -> Callable[[str], Path]:
    """Name of a tiny model -> a copy of its directory to break."""
    return lambda name: Path(shutil.copytree(tiny_models.saved(name), tmp_path / name))
