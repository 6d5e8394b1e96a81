"""Let torchvision be imported without CUDA: SGLang imports it, and its builds on the package index need CUDA's library
for these operators, which no text model calls."""

import torch

_library = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
