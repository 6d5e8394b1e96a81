"""Compiled kernels over numpy arrays, the threads they run on, facts of the host."""
