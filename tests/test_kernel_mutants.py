"""The tests of kernels notice a wrong one: one piece of a kernel's text replaced, the same checks must fail.

A few of each kernel, of the kinds that are easily missed: another head's data, running sums that are not scaled, ties,
ends that are one off, and what must not be read.
"""

import importlib
import importlib.util
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import test_kernel_attention as attention
import test_kernel_scores as scores
import test_rows
import test_triton_attend
import test_triton_units
from conftest import bound
from metal import shim
from test_kernel_select import TOPK, check_topk

from eps_cuda.kernels.dispatch import TritonKernels


def put_mutant(patch: pytest.MonkeyPatch, module: ModuleType, old: str, new: str, folder: Path) -> None:
    """A Triton module's functions from a source with `old` replaced. In a file, as kernels read their own source."""
    assert module.__file__ is not None
    source, file = Path(module.__file__).read_text(), folder / "mutant.py"
    assert old in source, f"{old!r} is no longer in {module.__name__}"
    file.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    changed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    for name, value in list(vars(TritonKernels).items()):
        if getattr(value, "__module__", None) == module.__name__:
            patch.setattr(TritonKernels, name, getattr(changed, value.__name__))
    for name in re.findall(r"^def (\w+)", source, re.MULTILINE):
        patch.setattr(module, name, getattr(changed, name))


def put_metal_mutant(patch: pytest.MonkeyPatch, module: ModuleType, name: str, old: str, new: str) -> None:
    """A Metal kernel, or what makes it, with `old` replaced in its text."""
    right = getattr(module, name)

    def broken(kernel):
        assert old in kernel.source, f"{old!r} is no longer in {kernel.name}"
        return replace(kernel, source=kernel.source.replace(old, new))

    patch.setattr(module, name, broken(right) if hasattr(right, "source") else lambda *made: broken(right(*made)))


ATTEND, CODES = attention.CASES[0], attention.CASES[17]
Check = Callable[[ModuleType], None]


def device(backend: ModuleType) -> str:
    return test_triton_attend.DEVICE if backend.__name__ == "eps_cuda" else "cpu"


def attend(case: attention.Case = ATTEND) -> Check:
    return lambda backend: attention.check_attend(backend, device(backend), case, "float32")


def rows(backend: ModuleType) -> None:
    test_rows.check_rows(backend, device(backend), test_rows.CASES[2], "float32")


def unseen(backend: ModuleType) -> None:
    test_rows.test_what_a_row_does_not_see_does_not_reach_it((backend, device(backend)), np.nan, "float32")


def splits(backend: ModuleType) -> None:
    test_triton_attend.test_splits_change_rounding_alone((16, 16))


def queries(backend: ModuleType) -> None:
    test_triton_units.test_queries_are_rounded_as_everywhere()


def topk(name: str) -> Check:
    return lambda backend: check_topk(backend, device(backend), **TOPK[name])


def score(name: str, factor: float = 1.0) -> Check:
    return lambda backend: scores.check(backend, device(backend), scores.Filled(scores.CASES[name], factor))


TRITON: dict[str, tuple[str, str, str, Check]] = {
    "reads one token past the end": ("attend", "position < length)", "position <= length)", attend()),
    "turns query heads round": (
        "attend", "head = pair.to(tl.int64) * R + r", "head = pair.to(tl.int64) * R + R - 1 - r", attend()),
    "takes K's scale for V's": (
        "attend", "load_values(v, row, value_scale,", "load_values(v, row, key_scale,", attend(CODES)),
    "keeps old sums unscaled": ("attend", "acc = acc * shrink[:, None]", "acc = acc * 1.0", splits),
    "drops a split": ("attend", "split < num_splits,", "split < num_splits - 1,", splits),
    "sees the next row": ("rows", "length - num_rows + row + 1", "length - num_rows + row + 2", rows),
    "leaves NaN in unseen values": ("rows", "value = tl.where(finite, value, 0.0)",
                                    "value = tl.where(finite, value, value)", unseen),
    "takes a tie more": ("thresholds", "enough = ties >= need", "enough = ties > need", topk("ties")),
    "runs before forgotten": ("select", "earlier += tl.load(", "earlier += 0 * tl.load(",
                              topk("longer than a batch of loads")),
    "candidates of runs before forgotten": ("select", "earlier += ((group < run_start)",
                                            "earlier += 0 * ((group < run_start)",
                                            topk("longer than a batch of loads")),
    "rescoring bits about the signs' middle": ("units", "1.0 if second is None else 1.5", "1.0", score("read at once")),
    "last tokens one group late": ("thresholds", "length - num_recent_tokens, 0) // S",
                                   "length - num_recent_tokens, 0) // S + 1", topk("usual")),
    "halves rounded up": ("units", "(tl.div_rn(t, tl.where(usable, step, 1.0)) + TO_INTEGER) - TO_INTEGER",
                          "tl.floor(tl.div_rn(t, tl.where(usable, step, 1.0)) + 0.5)", queries),
    "rest asks the first dimensions": ("units", "integers_row + D + MORE", "integers_row + D",
                                       score("three parts of equal groups")),
    "lists of the pass before named": ("units", "listed if named is None else named", "listed",
                                       score("three parts of equal groups")),
    "anchors of the first sequence": ("units", "anchors + row * R + r", "anchors + (row % kv_heads) * R + r",
                                      score("summed")),
}  # fmt: skip
# module, kernel of it, text, replacement
METAL: dict[str, tuple[str, str, str, str, Check]] = {
    "whole last group": ("attend", "decode", "min(group_size, length - last * group_size)", "group_size", attend()),
    "wrong kv head": ("attend", "decode", "row % kv_heads) *", "(row + 1) % kv_heads) *", attend()),
    "no rescale of splits": ("attend", "merge", "D + d] * exp2(part_mass[at * 2] - top)", "D + d]",
                             attend(attention.CASES[10])),
    "swaps the codes of a byte": ("attend", "reading", "int((from + i) % 2)", "int((from + i + 1) % 2)", attend(CODES)),
    "rows see the next row": ("rows", "rows", "length - rows + row + 1", "length - rows + row + 2", rows),
    "stale mask": ("select", "_topk", "for (int g = limit + tid", "for (int g = limit + 1 + tid",
                   topk("groups past the end")),
    "rounded to zero": (
        "turn_units", "_turn_units", "rint(mine / largest[0])", "float(int(mine / largest[0]))", score("usual"),
    ),
    "masses past float32": ("units", "_score_units", "[r] - best);", "[r]);", score("summed at once", 1e6)),
    "lists of lists as lists": ("units", "_read_on", "PICKED ? groups[", "false ? groups[", score("usual")),
}  # fmt: skip


@pytest.mark.parametrize("name", TRITON)
def test_wrong_triton_kernels_are_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, old, new, check = TRITON[name]
    put_mutant(monkeypatch, importlib.import_module(f"eps_cuda.kernels.{module}"), old, new, tmp_path)
    with pytest.raises(AssertionError) as error:
        check(bound("cuda", "triton"))
    assert "no longer" not in str(error.value)


@pytest.mark.parametrize("name", METAL)
def test_wrong_metal_kernels_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, kernel, old, new, check = METAL[name]
    put_metal_mutant(monkeypatch, importlib.import_module(f"eps_mlx.kernels.{module}"), kernel, old, new)
    with shim.installed(shim.SCHEDULES), pytest.raises(AssertionError) as error:
        check(bound("mlx", "metal"))
    assert not re.search(r"no longer|kernel\.cpp", str(error.value)), "it does not compile"
