"""Eviction policies keep what kvpress keeps, of tensors that a real model made: SmolLM2-135M-Instruct, 1,500 tokens.

kvpress needs another transformers than EPS: scripts/setup_kvpress.sh makes its environment, tests/kvpress/kept.py runs
there. Where either cannot be fetched the test fails in CI, elsewhere it is skipped. Settings are matched: the same
window, pooling, pinned rows and budget; the first tokens are pinned where kvpress does so.
"""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_real_model import fetched

from eps_core.config.eps import EpsConfig
from eps_core.decode.observe import Observed
from eps_core.decode.session import Session
from eps_core.eviction import snapkv
from eps_core.eviction.base import Kept, Rule
from eps_core.eviction.table import policy
from eps_core.tasks.corpus import corpus

ROOT = Path(__file__).parent.parent
TOKENS = 1500
RATIOS = (0.1, 0.5, 0.75)  # of the rows go
# name in kept.py: policy, first and last tokens pinned (None: half of the budget), its constants
MATCHED = {
    "streaming": ("streaming", 4, 1, {}),
    "h2o": ("h2o", 0, None, {}),
    "tova": ("tova", 0, 1, {}),
    "snapkv": ("snapkv", 0, 32, {}),
    "keydiff": ("keydiff", 0, 0, {}),
    # the two budget rules agree at either end
    "adakv-0": ("adakv", 0, 32, {"SAFE_SHARE": 0.0, "NORMALISED": False, "scores": snapkv.scores}),
    "adakv-1": ("adakv", 0, 32, {"SAFE_SHARE": 1.0, "scores": snapkv.scores}),
    "pyramidkv-20": ("pyramidkv", 0, 64, {}),
    "pyramidkv-5": ("pyramidkv", 0, 64, {"STEEPNESS": 5}),
}


def environment() -> Path:
    """Return the folder that setup_kvpress.sh prints; where it fails, fail in CI and skip elsewhere."""
    variables = {"PYTHON": sys.executable, **os.environ, "PYTHONPATH": str(ROOT)}
    command = [ROOT / "scripts" / "setup_kvpress.sh"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=variables)
    if done.returncode:
        reason = f"kvpress cannot be fetched: {(done.stderr.strip() or 'no word').splitlines()[-1]}"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    return Path(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def session() -> Session:
    return Session.open(fetched("smollm2"), "cuda", "cpu", "float32", "float32")


@pytest.fixture(scope="module")
def kept(session: Session, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Return the arrays that kept.py wrote, once for all workers."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with (folder / "kvpress.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "kept.npz").exists():
            venv = environment()
            np.save(folder / "tokens.npy", session.encode(corpus().decode()[40_000:60_000])[:TOKENS])
            command = [venv / "bin" / "python", ROOT / "tests" / "kvpress" / "kept.py", session.path]
            command += [folder / "tokens.npy", folder / "kept.part.npz"]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-2000:]
            (folder / "kept.part.npz").rename(folder / "kept.npz")
    with np.load(folder / "kept.npz") as file:
        return dict(file)


def ours(session: Session, kept: dict[str, np.ndarray], name: str, ratio: float, patch: pytest.MonkeyPatch) -> Kept:
    """Return what a policy keeps by what `Observed` gathers of the same queries and keys."""
    eps, spec, (which, first, last, constants) = session.backend, session.spec, MATCHED[name]
    policy_spec, budget = policy(which).SPEC, int(TOKENS * (1 - ratio))
    cache, _ = session.cache(EpsConfig().cache_config, 1)
    observed, rows, layers = Observed(eps, spec, policy_spec), np.arange(TOKENS), []
    for layer in range(spec.num_layers):
        q, k = (
            eps.from_numpy(np.ascontiguousarray(kept[f"{x}.{layer}"].swapaxes(0, 1)), "float32", "cpu") for x in "qk"
        )
        observed.prompt(cache, layer, q, k, TOKENS)
        heads = range(spec.num_kv_heads)
        layers.append([observed.head(cache, layer, h, k[:, h : h + 1], rows, TOKENS) for h in heads])
    for constant, value in constants.items():
        patch.setattr(policy(which), constant, value)
    found: Kept = policy(which).keep(layers, budget, Rule(first, budget // 2 if last is None else last))
    return found


@pytest.mark.parametrize("name", MATCHED)
def test_kept_sets_are_those_of_kvpress(
    name: str, kept: dict[str, np.ndarray], session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    for ratio in RATIOS:
        found = ours(session, kept, name, ratio, monkeypatch)
        theirs = [[np.flatnonzero(head) for head in kept[f"{name}.{ratio}.{layer}"]] for layer in range(len(found))]
        pairs = [
            pair for of_layer, others in zip(found, theirs, strict=True) for pair in zip(of_layer, others, strict=True)
        ]
        assert len(pairs) == 90
        differ = [i for i, (mine, other) in enumerate(pairs) if not np.array_equal(mine, other)]
        assert not differ, f"{name}, {ratio} of the rows gone: {len(differ)} of 90 heads differ: {differ[:5]}"


def test_the_sets_tell_settings_apart(kept: dict[str, np.ndarray]) -> None:
    """A comparison that any policy would pass would say nothing."""
    for ratio in RATIOS:
        sets = {name: np.stack([kept[f"{name}.{ratio}.{layer}"] for layer in range(30)]) for name in MATCHED}
        total = {int(one.sum()) for one in sets.values()}
        assert total == {90 * int(TOKENS * (1 - ratio))}
        distinct = {one.tobytes() for one in sets.values()}
        # snapkv is what adakv is with even budgets alone, and pyramidkv has its even fallback where little is kept
        assert len(distinct) >= len(sets) - 2
