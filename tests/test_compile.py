"""Compiled kernels are kept in a folder of EPS's own; what is wrong with it costs a compilation and never a run."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from eps_core.cpu.beside import HOLDS
from eps_core.cpu.usable import why_not
from eps_core.errors import ConfigError
from eps_core.io import caches
from eps_core.load import load_backend, resolve_kernels

# compiles one small kernel and says how often numba compiled it
PROGRAM = """
import numpy as np
from eps_core.cpu import compile, units
found = []
real = compile._Kept.load_overload
compile._Kept.load_overload = lambda *at: found.append(real(*at)) or found[-1]
units.place_spans(*[np.ones(1, np.int32)] * 2, 1, 1, 1, 1, np.zeros(1, np.uint8), np.zeros(1, np.int64))
print(found.count(None))
"""


# a kernel that another calls by name, and a third that takes the code of the second in
KERNELS = """
import numpy as np
from eps_core.cpu.compile import call_by_name, kernel
@kernel()
def inner(out):
    if out[0] < 0:
        raise ValueError("below")
    out[0] += 1
@kernel()
def outer(out):
    call_by_name(inner, (out,))
    call_by_name(inner, (out,))
@kernel()
def around(out):
    for _ in range(1000):
        outer(out)
        call_by_name(inner, (np.zeros(100, np.int64),))
@kernel()
def gives(out):
    return out[0]
@kernel()
def takes(out):
    call_by_name(gives, (out,))
"""
CALLS = """
import sys
import numpy as np
from eps_core.cpu import compile
found = []
real = compile._Kept.load_overload
compile._Kept.load_overload = lambda *at: found.append(real(*at)) or found[-1]
sys.path.insert(0, {folder!r})
import some_kernels
out = np.zeros(1, np.int64)
some_kernels.around(out)
assert out[0] == 2000
assert sys.getrefcount(out) == 2
try:
    some_kernels.around(out - 5000)
    assert False
except ValueError as fault:
    assert str(fault) == "below"
print(found.count(None))
"""


# a check that calls one kernel of two: where another process may help, it compiles the other, too
CHECK = """
import sys
import time
import numpy as np
from eps_core.cpu import beside, threads
from eps_core.io import caches
beside.num_cores = lambda: int(sys.argv[1])
import some_kernels
def calls():
    for kernel in (some_kernels.shared, some_kernels.beside):
        threads.run(kernel, 1, np.ones(1))
    raise ValueError("what was not computed")
def is_kept(name):
    return any(caches.folder().rglob(f"some_kernels.{name}-*"))
out = np.ones(1)
with beside.preparing(calls):
    threads.run(some_kernels.shared, 1, out, alone=True)
    until = time.monotonic() + 100
    while sys.argv[1] == "2" and not is_kept("beside") and time.monotonic() < until:
        time.sleep(0.01)
    child = beside._state.child
assert (child is not None) == (sys.argv[1] == "2")
assert out[0] == 2 and beside._state.child is None and (child is None or child.returncode is not None)
print(int(is_kept("beside")))
"""
SHARED = """
from eps_core.cpu.compile import kernel
@kernel()
def shared(progress, out):
    out[0] += 1
@kernel()
def beside(progress, out):
    out[0] += 1
"""
# says when it holds a function, waits for a line, and compiles it or ends
HOLDER = """
import sys
import numpy as np
from eps_core.cpu import beside, units
real = beside.hold
def hold(path):
    held = real(path)
    print("holds", flush=True)
    if sys.stdin.readline() == "end\\n":
        sys.exit()
    return held
beside.hold = hold
units.place_spans(*[np.ones(1, np.int32)] * 2, 1, 1, 1, 1, np.zeros(1, np.uint8), np.zeros(1, np.int64))
sys.stdin.readline()
"""


def compilations(cache: Path | None, program: str = PROGRAM, **environment: str) -> tuple[int, str]:
    """(kernels that were compiled, stderr) of a process of its own."""
    given = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    given |= environment | ({} if cache is None else {caches.VARIABLE: str(cache)})
    done = subprocess.run([sys.executable, "-c", program], env=given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "compiling CPU kernels" not in line]
    assert len(said) + (int(done.stdout) > 0) == len(done.stderr.splitlines()), "compiling is announced, once"
    return int(done.stdout), "\n".join(said)


def kept(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file() and file.name != HOLDS]


@pytest.mark.parametrize("cores", ["1", "2"])
def test_a_check_has_a_second_process_compile_what_it_will_call(cores: str, tmp_path: Path) -> None:
    """That process alone compiles what this one never calls. Calls that are noted run nothing, up to what fails."""
    (tmp_path / "some_kernels.py").write_text(SHARED)
    given = os.environ | {caches.VARIABLE: str(tmp_path), "PYTHONPATH": str(tmp_path)}
    program = [sys.executable, "-c", CHECK, cores]
    done = subprocess.run(program, env=given, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, f"{int(cores) - 1}\n"), done.stderr


@pytest.mark.parametrize("says", ["go on", "end"])
def test_a_process_waits_for_what_another_compiles_unless_that_ends(says: str, tmp_path: Path) -> None:
    given = os.environ | {caches.VARIABLE: str(tmp_path)}
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER], env=given, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdin is not None and holder.stdout is not None
    assert holder.stdout.readline() == "holds\n"
    other = subprocess.Popen([sys.executable, "-c", PROGRAM], env=given, stdout=subprocess.PIPE, text=True)
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(3)
    assert kept(tmp_path) == []
    holder.stdin.write(f"{says}\n")
    holder.stdin.flush()
    compiled = int(other.communicate(timeout=30)[0])  # while what holds it goes on, unless it ended
    assert says == "end" or holder.poll() is None
    holder.communicate("\n" if says == "go on" else None)
    assert compiled == (1 if says == "end" else 0) and len(kept(tmp_path)) == 1


def test_what_was_compiled_is_loaded_and_what_is_damaged_is_made_again(tmp_path: Path) -> None:
    assert compilations(tmp_path) == (1, "") and compilations(tmp_path) == (0, "")
    (file,) = kept(tmp_path)
    whole = file.read_bytes()
    flipped = whole[:100] + bytes([whole[100] ^ 1]) + whole[101:]
    for damaged in (b"", whole[:20], whole[: len(whole) // 2], flipped, os.urandom(500)):
        file.write_bytes(damaged)
        assert compilations(tmp_path) == (1, "")
        assert compilations(tmp_path) == (0, "")


def test_code_that_is_called_by_name_is_loaded_first_and_its_callers_follow_its_name(tmp_path: Path) -> None:
    """A name that is not there would end the process; numba gives another one to what is compiled in another order."""
    (tmp_path / "some_kernels.py").write_text(KERNELS)
    cache, program = tmp_path / "kept", CALLS.format(folder=str(tmp_path))
    cache.mkdir()
    assert compilations(cache, program) == (3, "") and compilations(cache, program) == (0, "")
    (inner,) = cache.rglob("some_kernels.inner-*")
    inner.unlink()
    compiled, said = compilations(cache, program)
    assert 1 <= compiled <= 3 and said == ""
    assert compilations(cache, program) == (0, "")


def test_what_returns_something_is_not_called_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels_that_return.py").write_text(KERNELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    takes = importlib.import_module("kernels_that_return").takes
    with pytest.raises(AssertionError, match="gives returns something"):
        takes(np.zeros(1, np.int64))


def test_numbas_own_folder_is_left_alone(tmp_path: Path) -> None:
    """It holds other programs' code."""
    theirs = tmp_path / "numba" / "eps_core_cpu" / "other.nbi"
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(b"not ours")
    compilations(tmp_path / "ours", NUMBA_CACHE_DIR=str(tmp_path / "numba"))
    assert kept(tmp_path / "numba") == [theirs] and theirs.read_bytes() == b"not ours"


@pytest.mark.parametrize("wanted", ["/proc/nowhere", "/dev/null/x"])
def test_where_no_folder_can_be_written_a_temporary_one_serves_and_goes(wanted: str, tmp_path: Path) -> None:
    compiled, said = compilations(Path(wanted), HOME=wanted, TMPDIR=str(tmp_path))
    assert compiled == 1 and "\n" not in said and wanted in said and caches.VARIABLE in said
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_named_and_cannot_serve_is_told(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    compiled, said = compilations(Path("/dev/null/x"), HOME=str(home))
    assert compiled == 1 and said == f"EPS_CACHE_DIR /dev/null/x cannot be written: using {home}/.cache/eps"
    assert len(kept(home)) == 1


def test_a_folder_that_cannot_be_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an image that was built with its kernels."""
    compilations(tmp_path)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    monkeypatch.setenv(caches.VARIABLE, str(tmp_path))
    caches._first_writable.cache_clear()
    try:
        assert caches.folder() == tmp_path
    finally:
        caches._first_writable.cache_clear()


def test_what_killed_runs_and_old_versions_left_is_cleared(tmp_path: Path) -> None:
    old, old_code = tmp_path / ".a.partial", tmp_path / "kernels-0123"
    recent, recent_code, foreign = (tmp_path / name for name in (".b.partial", "kernels-4567", "costs.json"))
    for folder in (old_code, recent_code):
        folder.mkdir()
    for file in (old, recent, foreign):
        file.write_text("{}")
    for one in (old, old_code):
        os.utime(one, (0, 0))
    compilations(tmp_path)
    assert not old.exists() and not old_code.exists() and all(one.exists() for one in (recent, recent_code, foreign))


def test_a_full_disk_costs_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert caches.keep(tmp_path / "kernel", b"code") == "No space left on device"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [("NUMBA_DISABLE_JIT", "1", "unset it"), *(("NUMBA_NUM_THREADS", odd, "set 1 or more") for odd in ("0", "many"))],
)
def test_kernels_that_cannot_be_compiled_mean_array_operations(
    variable: str, value: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    reason = why_not()
    assert reason is not None and variable in reason and says in reason
    for name in ("cuda", "mlx"):
        usable = load_backend(name).usable_kernels("cpu")
        assert "numba" not in usable
        with pytest.raises(ConfigError, match=variable):
            resolve_kernels("numba", usable, "cpu")
