"""Triton kernels for GPUs: they change speed, never values beyond float rounding."""
