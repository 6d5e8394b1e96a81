"""Proof of Metal kernels on machines without Metal: numerics and memory accesses (shim), front-end rules (clang)."""
