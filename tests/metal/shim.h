// Metal's words for a kernel text compiled with g++: see shim.py. Every access to memory reports itself through the hooks
// that -fsanitize=thread inserts; shim.cpp implements those, and everything declared here as extern "C".
#pragma once
#include "place.h"

typedef unsigned short ushort;
typedef _Float16 half, float16_t;

#define device
#define constant
#define thread
#define INFINITY __builtin_inff()
#define SHIM_RAW __attribute__((no_sanitize("thread"))) inline

struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  bfloat16_t(float value) {
    const uint32_t wide = __builtin_bit_cast(uint32_t, value);
    bits = value != value ? 0x7fc0 : uint16_t((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
  }
  operator float() const { return __builtin_bit_cast(float, uint32_t(bits) << 16); }
};

#define SHIM_ENTRY extern "C" __attribute__((no_sanitize("thread"))) void shim_entry
#define SHIM_SHARE(name) shim_share((void*)&name, sizeof(name))

namespace metal {
template <class To, class From>
SHIM_RAW To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, from);
}
template <class T>
SHIM_RAW uint64_t shim_pack(T value) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof value);
  return bits;
}
template <class T>
SHIM_RAW T shim_unpack(uint64_t bits) {
  T value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}
// operations: the line of the call, so that lanes that meet at different calls are told apart
#define SHIM_REDUCE(name, step)                                                   \
  template <class T>                                                              \
  SHIM_RAW T name(T mine, int line = __builtin_LINE()) {                          \
    ShimLanes* lanes = shim_exchange(shim_pack(mine), line);                      \
    if (!*lanes->ready) {                                                         \
      T values[32];                                                               \
      for (uint i = 0; i < lanes->count; i++) values[i] = shim_unpack<T>(lanes->value[i]); \
      for (uint half_of = 16; half_of; half_of /= 2)                              \
        for (uint i = 0; i < half_of && i + half_of < lanes->count; i++) {        \
          const T a = values[i], b = values[i + half_of];                         \
          values[i] = step;                                                       \
        }                                                                         \
      lanes->result[0] = shim_pack(values[0]);                                    \
      *lanes->ready = true;                                                       \
    }                                                                             \
    return shim_unpack<T>(lanes->result[0]);                                      \
  }
SHIM_REDUCE(simd_sum, a + b)
SHIM_REDUCE(simd_max, (b > a || a != a ? b : a))

#define SHIM_MOVE(name, argument, source)                                         \
  template <class T>                                                              \
  SHIM_RAW T name(T mine, ushort argument, int line = __builtin_LINE()) {         \
    ShimLanes* lanes = shim_exchange(shim_pack(mine), line);                      \
    const uint lane = lanes->lane;                                                \
    (void)lane;                                                                   \
    const uint from = source;                                                     \
    return from < lanes->count ? shim_unpack<T>(lanes->value[from]) : mine;       \
  }
SHIM_MOVE(simd_shuffle, index, index)
SHIM_MOVE(simd_shuffle_xor, mask, lane ^ mask)

template <class T>
SHIM_RAW T simd_prefix_exclusive_sum(T mine, int line = __builtin_LINE()) {
  ShimLanes* lanes = shim_exchange(shim_pack(mine), line);
  T sum = T(0);
  for (uint i = 0; i < lanes->lane; i++) sum = sum + shim_unpack<T>(lanes->value[i]);
  return sum;
}

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
SHIM_RAW mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
SHIM_RAW void threadgroup_barrier(mem_flags flags, int line = __builtin_LINE()) { shim_barrier(int(flags), line); }
SHIM_RAW void simdgroup_barrier(mem_flags, int line = __builtin_LINE()) { shim_simdgroup_barrier(line); }

// one type on both sides, as in MSL
#define SHIM_PAIR(type)                                                            \
  SHIM_RAW type max(type a, type b) { return a < b || a != a ? b : a; }            \
  SHIM_RAW type min(type a, type b) { return b < a || a != a ? b : a; }
SHIM_PAIR(float)
SHIM_PAIR(int)
SHIM_PAIR(uint)
#define SHIM_MATH(name) \
  SHIM_RAW float name(float x) { return __builtin_##name##f(x); }
SHIM_MATH(exp)
SHIM_MATH(exp2)
SHIM_MATH(log)
SHIM_MATH(log2)
SHIM_MATH(rint)
SHIM_MATH(fabs)
SHIM_RAW bool isfinite(float x) { return __builtin_isfinite(x); }

enum memory_order { memory_order_relaxed };
template <class T>
struct atomic { T value; };
typedef atomic<uint> atomic_uint;
#define SHIM_ATOMIC(name, step)                                                    \
  template <class T, class V>                                                      \
  SHIM_RAW T name(atomic<T>* place, V b, memory_order) {                           \
    shim_atomic(place, sizeof(T));                                                 \
    const T a = place->value;                                                      \
    place->value = T(step);                                                        \
    return a;                                                                      \
  }
SHIM_ATOMIC(atomic_fetch_add_explicit, a + b)
SHIM_ATOMIC(atomic_store_explicit, b)
template <class T>
SHIM_RAW T atomic_load_explicit(const atomic<T>* place, memory_order) {
  shim_atomic((void*)place, sizeof(T));
  return place->value;
}
}  // namespace metal
using namespace metal;

template <class T, int N>
struct alignas(N * sizeof(T)) Piece {
  T v[N];
};
// launch.METAL_HEADER's; reported as one access, of whose elements the compiler may leave none out
template <int N, class T>
SHIM_RAW Piece<T, N> load_piece(const T* p) {
  shim_read(p, sizeof(Piece<T, N>));
  return *reinterpret_cast<const Piece<T, N>*>(p);
}
