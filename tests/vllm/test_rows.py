"""Test the rows of a forward without an engine: padding is left out, slots are read once, and a model that writes K and
V itself stays dense."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.forward_context import override_forward_context

from eps_cuda.integrations.vllm import rows
from eps_cuda.integrations.vllm.backends import EpsImpl


def test_slots_are_read_once_a_forward_and_padding_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    monkeypatch.setattr(rows, "on_host", lambda slots: reads.append(len(slots)) or slots.numpy())
    route, key = rows.Route(None), torch.arange(12.0).reshape(6, 2)
    first, second = torch.tensor([7, -1, 9, -1, 11]), torch.tensor([1, 2, 3, 4, 5])

    def found(slot_mapping: torch.Tensor) -> tuple[Any, ...]:
        k, v, slots = route.real_rows(key, -key, slot_mapping)
        assert torch.equal(v, -k)
        return k[:, 0].tolist(), slots.tolist()

    with override_forward_context(SimpleNamespace(attn_metadata=None)):
        assert found(second[:3]) == ([0, 2, 4], [1, 2, 3])
        for _ in range(2):  # of two layers
            assert found(first) == ([0, 4, 8], [7, 9, 11]), "another number of slots"
    assert reads == [3, 5]
    with override_forward_context(SimpleNamespace(attn_metadata=None)):
        assert found(second) == ([0, 2, 4, 6, 8], [1, 2, 3, 4, 5]), "another forward, and keys beyond its slots"
        route.forget()
        assert found(first) == ([0, 4, 8], [7, 9, 11])
    assert reads == [3, 5, 5, 5]


@pytest.mark.parametrize("past", [True, False])
def test_a_layer_whose_keys_the_model_writes_itself_is_stock_and_says_so(past: bool) -> None:
    class Stock:
        def forward(self, layer: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append("stock")
            return query

    impl = object.__new__(type("Impl", (EpsImpl, Stock), {}))
    calls, said = list[str](), list[Exception]()
    impl.eps_runtime = SimpleNamespace(
        place=lambda layer: 0, serve=lambda layer, kv: True, sparse=SimpleNamespace(tell=said.append),
        route=SimpleNamespace(forward=lambda *args: calls.append("route")),
    )  # fmt: skip
    key, query, metadata = (None if past else torch.zeros(1)), torch.zeros(1), SimpleNamespace(eps_decode=None)
    assert impl.forward(None, query, key, key, query, metadata, query) is query
    assert calls == ["stock" if past else "route"]
    assert [str(one).partition(":")[0] for one in said] == ["this model writes K and V itself"] * past
