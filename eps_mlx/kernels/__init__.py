"""Kernels for Apple GPUs, as bodies that MLX compiles for Metal."""
