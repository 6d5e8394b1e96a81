"""Huge pages for what is read in scattered tiles: a tile of 512 bytes costs a walk through the page tables of the same
length as its own read, and 2 MiB pages hold a whole pool in the walker's cache."""

import ctypes
import mmap

HUGE_BYTES = 2**21  # less holds no huge page


def advise_huge_pages(address: int, num_bytes: int) -> None:
    """Asks the kernel to back these bytes of the host, not written so far, with huge pages. Speed only: without effect
    where the system has none (macOS, or `never` in /sys/kernel/mm/transparent_hugepage/enabled)."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or num_bytes < HUGE_BYTES:
        return
    first, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > first:
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), ctypes.c_int(advice))
