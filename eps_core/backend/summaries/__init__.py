"""The summary methods over arrays, one file a method, for all array libraries.

A file is a module with the functions of its namesake in `eps_core.summaries`, which has the sources and formulas, and
whose facts and fields it shares. Each takes the library's `Ops` first:

- `build(ops, cache_config, constants, k [.., Hkv, S, D])`: stored arrays [.., Hkv, fields] of keys, float32, exactly as
  attention will read them;
- `score(ops, cache_config, constants, summary [B, Hkv, G, ..], a [B, Hkv, R, D])`, a = scale * q: `(estimate, lower,
  upper)`, each [B, Hkv, R, G] or None, of log A_p, the natural log of the group's softmax mass (scaled logits):
  `estimate` ranks and is no bound, `lower <= log A_p <= upper` for every q. Stored scalars are rounded to their safe
  side, and `slack` pays for float32 arithmetic;
- where its spec says so: `extend` and `finalize`, which follow partial groups, `stage` and `rescore`.

`constants`: what a layer keeps apart from its groups, see `eps_core.summaries.table.constants`, and of key codes
`centre`; of methods that score by place, `groups` [G] and `length` [B, 1, 1, 1] of the sequences.
"""
