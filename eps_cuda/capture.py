"""A function as a CUDA graph."""

from collections.abc import Callable
from typing import TypeVar

import torch

WARM_UP_CALLS = 3
T = TypeVar("T")


def captured(function: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """Return a function as a CUDA graph, and its result, whose arrays every replay fills again. Raises RuntimeError
    where it cannot be captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_CALLS):  # compiles, and fills the allocator
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result
