"""Writes what kvpress keeps of a prompt, and the queries and keys that it chose from. Runs in the environment of
scripts/setup_kvpress.sh, which has kvpress and its transformers but not EPS.

    python tests/kvpress/kept.py MODEL TOKENS.npy OUT.npz

The presses see the tensors of a real prefill. In place of values they get positions, so that what they return says what
they keep.
"""

import sys

import numpy as np
import torch
from kvpress import (
    AdaKVPress,
    KeyDiffPress,
    ObservedAttentionPress,
    PyramidKVPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)
from kvpress.utils import extract_keys_and_values, get_prerope_query_states
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv


class H2O(ObservedAttentionPress):
    """kvpress has the mean attention of the queries that see a row; H2O has the sum, and keeps half newest."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        mean = super().score(module, hidden_states, keys, values, attentions, kwargs)
        total = mean * torch.arange(mean.shape[-1], 0, -1)
        total[..., -(int(mean.shape[-1] * (1 - self.compression_ratio)) // 2) :] = torch.inf
        return total


def presses(ratio: float) -> dict[str, object]:
    return {
        "streaming": StreamingLLMPress(ratio, n_sink=4),
        "h2o": H2O(ratio),
        "tova": TOVAPress(ratio),
        "snapkv": SnapKVPress(ratio, window_size=32, kernel_size=5),
        "keydiff": KeyDiffPress(ratio),
        "adakv-0": AdaKVPress(SnapKVPress(ratio, window_size=32, kernel_size=5), alpha_safeguard=0.0),
        "adakv-1": AdaKVPress(SnapKVPress(ratio, window_size=32, kernel_size=5), alpha_safeguard=1.0),
        "pyramidkv-20": PyramidKVPress(ratio, window_size=64, kernel_size=5, beta=20),
        "pyramidkv-5": PyramidKVPress(ratio, window_size=64, kernel_size=5, beta=5),
    }


def main(model_folder: str, tokens_file: str, out: str) -> None:
    tokens = torch.from_numpy(np.load(tokens_file))[None]
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="sdpa")
    found: dict[str, np.ndarray] = {}

    def hook(module, args, kwargs, output):
        layer, hidden, cache = module.layer_idx, kwargs["hidden_states"], kwargs["past_key_values"]
        keys, _ = extract_keys_and_values(cache, layer)
        length, dim = keys.shape[2:]
        queries, _ = apply_rotary_pos_emb(
            get_prerope_query_states(module, hidden), keys, *kwargs["position_embeddings"]
        )
        found[f"q.{layer}"], found[f"k.{layer}"] = queries[0].numpy().copy(), keys[0].numpy().copy()
        logits = queries @ repeat_kv(keys, queries.shape[1] // keys.shape[1]).transpose(2, 3) / dim**0.5
        attentions = logits.masked_fill(torch.ones(length, length, dtype=bool).triu(1), -torch.inf).softmax(-1)
        positions = torch.arange(length, dtype=torch.float32)[None, None, :, None].expand_as(keys)
        for ratio in (0.1, 0.5, 0.75):
            for name, press in presses(ratio).items():
                given = attentions if name == "h2o" else None
                _, kept = press.compress(module, hidden, keys.clone(), positions, given, kwargs)
                mask = torch.zeros(keys.shape[1], length, dtype=bool)
                if name.startswith("adakv"):
                    _, heads, gone = module.masked_key_indices
                    mask[:] = True
                    mask[heads, gone] = False
                    module.masked_key_indices = None
                else:
                    mask.scatter_(1, kept[0, :, :, 0].long(), True)
                found[f"{name}.{ratio}.{layer}"] = mask.numpy()

    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(hook, with_kwargs=True)
    with torch.inference_mode():
        model(tokens, use_cache=True, logits_to_keep=1)
    np.savez(out, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
