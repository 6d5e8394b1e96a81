"""Kernels for Apple GPUs, written once as bodies that MLX compiles for Metal and, behind macros, for CUDA."""
