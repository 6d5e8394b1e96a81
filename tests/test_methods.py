"""What a method's one file says of it: bytes, pools and facts follow from there."""

from pathlib import Path

import numpy as np
import pytest

from eps_core.config.bytes import further_bytes, summary_group_bytes
from eps_core.config.cache import CacheConfig, CacheSpec

HEAD_DIMS = (1, 20, 33, 64, 80, 128, 576)
# bytes of one group at each of these, as first published: formulas of their own, no sums of fields
BYTES = (
    ({"method": "off"}, (0, 0, 0, 0, 0, 0, 0)),
    ({"method": "jl", "dim": 1}, (4, 4, 4, 4, 4, 4, 4)),
    ({"method": "jl", "dim": 2}, (12, 12, 12, 12, 12, 12, 12)),
    ({"method": "jl", "dim": 4}, (40, 40, 40, 40, 40, 40, 40)),
    ({"method": "jl", "dim": 8}, (144, 144, 144, 144, 144, 144, 144)),
    ({"method": "jl", "dim": 16}, (544, 544, 544, 544, 544, 544, 544)),
    ({"method": "1pc"}, (9, 28, 41, 72, 88, 136, 584)),
    ({"method": "fd", "dim": 1}, (7, 26, 39, 70, 86, 134, 582)),
    ({"method": "fd", "dim": 2}, (10, 48, 74, 136, 168, 264, 1160)),
    ({"method": "fd", "dim": 4}, (16, 92, 144, 268, 332, 524, 2316)),
    ({"method": "fd", "dim": 8}, (28, 180, 284, 532, 660, 1044, 4628)),
    ({"method": "box"}, (6, 44, 70, 132, 164, 260, 1156)),
    ({"method": "meanstd"}, (6, 44, 70, 132, 164, 260, 1156)),
    ({"method": "ball"}, (9, 28, 41, 72, 88, 136, 584)),
    ({"method": "moments", "dim": 1}, (18, 56, 82, 144, 176, 272, 1168)),
    ({"method": "moments", "dim": 2}, (23, 80, 119, 212, 260, 404, 1748)),
    ({"method": "moments", "dim": 3}, (28, 104, 156, 280, 344, 536, 2328)),
    ({"method": "moments", "dim": 4}, (33, 128, 193, 348, 428, 668, 2908)),
    ({"method": "keys", "bits": 4}, (9, 18, 25, 40, 48, 72, 296)),
    ({"method": "keys", "bits": 8}, (9, 28, 41, 72, 88, 136, 584)),
    ({"method": "oracle"}, (0, 0, 0, 0, 0, 0, 0)),
)


def store_of(settings: dict) -> CacheConfig:
    sized = {"group_size": 4}
    return CacheConfig(**settings) if settings["method"] == "off" else CacheConfig(**{**sized, **settings})


@pytest.mark.parametrize("settings, expected", BYTES)
def test_bytes_of_a_group_are_the_published_ones(settings: dict, expected: tuple[int, ...]) -> None:
    cache_config = store_of(settings)
    assert tuple(summary_group_bytes(cache_config, head_dim) for head_dim in HEAD_DIMS) == expected
    assert all(further_bytes(cache_config, head_dim) == ((), 0) for head_dim in HEAD_DIMS)


# the arrays that each method keeps: dtype, and shape for a head dim of 20 (f4: float32, f2: float16, i1: int8, u1)
POOLS = (
    ({"method": "jl", "dim": 3}, {"gram": ("f4", 6)}),
    ({"method": "1pc"}, {"direction": ("i1", 20), "direction_scale": ("f4",), "lam": ("f2",), "rest": ("f2",)}),
    ({"method": "fd"}, {"rows": ("i1", 2, 20), "row_scale": ("f2", 2), "error": ("f2",), "delta": ("f2",)}),
    ({"method": "box"}, {"lo": ("i1", 20), "hi": ("i1", 20), "scale": ("f2",), "norm": ("f2",)}),
    ({"method": "meanstd"}, {"mean": ("i1", 20), "mean_scale": ("f2",), "std": ("u1", 20), "std_scale": ("f2",)}),
    (
        {"method": "ball"},
        {"mean": ("i1", 20), "mean_scale": ("f2",), "error": ("f2",), "radius": ("f2",), "norm": ("f2",)},
    ),
    (
        {"method": "moments", "dim": 2},
        {
            "mean": ("i1", 20), "mean_scale": ("f2",), "error": ("f2",), "radius": ("f2",), "rest": ("f2",),
            "rho": ("f2",), "norm": ("f2",), "direction": ("i1", 2, 20), "direction_scale": ("f2", 2),
            "gain": ("f2", 2),
        },
    ),
    (
        {"method": "keys", "bits": 4},
        {"codes": ("u1", 10), "scale": ("f2",), "error": ("f2",), "radius": ("f2",), "norm": ("f2",)},
    ),
    (
        {"method": "rq", "mean_tokens": 32, "second_bit": True, "rq_bounds": True},
        {
            "mean": ("u1", 20), "mean_scale": ("f2",), "scale": ("u1", 8), "codes": ("u1", 3, 8),
            "second": ("u1", 8, 3), "second_scale": ("u1", 8), "error": ("f2", 8), "radius": ("f2", 8),
            "norm": ("f2", 8),
        },
    ),
    ({"method": "oracle"}, {}),
)  # fmt: skip


@pytest.mark.parametrize("settings, expected", POOLS)
def test_pools_are_of_the_stated_fields_and_hold_what_is_built(target, settings, expected) -> None:
    backend, device = target
    cache_config = store_of(settings)
    spec = CacheSpec(2, 3, 20, 21)
    cache = backend.new_cache(spec, cache_config, device)
    lead = 21, 3, cache_config.spans_per_unit
    wanted = {name: (np.dtype(kind), (*lead, *shape)) for name, (kind, *shape) in expected.items()}

    def found() -> list[dict]:
        arrays = ({name: backend.to_numpy(pool) for name, pool in layer.items()} for layer in cache.summaries)
        return [{name: (array.dtype, array.shape) for name, array in layer.items()} for layer in arrays]

    assert found() == [wanted, wanted]
    # a builder that made another shape or dtype would be broadcast or rounded in silence
    rng = np.random.default_rng(0)
    k, v = (backend.from_numpy(rng.normal(size=(300, 3, 20)).astype(np.float32), "float32", device) for _ in range(2))
    cache = backend.write_kv(cache, 1, k, v, np.arange(300))
    assert found() == [wanted, wanted]
    for name, pool in cache.summaries[1].items():
        assert backend.to_numpy(pool)[: 300 // cache_config.unit_tokens].any(), name


def test_meanstd_is_not_called_by_another_methods_name() -> None:
    """UNIQUE has one scalar deviation of a page of 8 and half the query's norm; experiments/real computes it so."""
    for path in Path(__file__).parent.parent.glob("eps_*/**/meanstd.py"):
        text = path.read_text()
        assert text.count("UNIQUE") == text.count("not UNIQUE") == 1, path
