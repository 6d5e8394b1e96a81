// What the kernel's side (shim.h) and the fibres' side (shim.cpp) share.
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef unsigned int uint;
struct uint3 { uint x, y, z; };
struct ShimPlace {
  uint3 thread_position_in_grid, threadgroup_position_in_grid;
  uint thread_index_in_threadgroup, simdgroup_index_in_threadgroup, thread_index_in_simdgroup;
};
struct ShimLanes {
  uint64_t value[32], result[32];
  uint count;    // lanes of this simdgroup: the last one of a threadgroup may have fewer than 32
  uint lane;     // that asks
  bool* ready;   // whether a lane has computed the results
};

extern "C" {
ShimLanes* shim_exchange(uint64_t value, int operation);
void shim_share(void* array, size_t bytes);
void shim_barrier(int flags, int line);
void shim_simdgroup_barrier(int line);
void shim_read(const void* place, size_t bytes);
void shim_atomic(void* place, size_t bytes);
}
