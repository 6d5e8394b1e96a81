// Runs one GPU kernel on one CPU thread: a fibre per GPU thread, threadgroups one after another. See shim.py.
//
// Between two barriers (or simd operations) a thread runs on alone, in one of two opposite orders. Every access of the
// kernel arrives in `access`, which counts bytes of inputs, finds what lies outside, and finds races: two threads of a
// threadgroup touch the same byte with no barrier between, and at least one writes. Simd operations order nothing.
#include <dlfcn.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "place.h"

namespace {

constexpr size_t STACK_BYTES = 256 * 1024;
constexpr size_t THREADGROUP_BYTES = 32 * 1024;
constexpr ptrdiff_t GUARD_BYTES = 256;  // around threadgroup arrays (shim.py)
constexpr uint32_t NOBODY = 0, ATOMIC = ~0u;  // threads are counted from 1

enum State { RUNNING, AT_SIMD, AT_BARRIER, DONE };
struct Fibre {
  jmp_buf here;
  ucontext_t context;
  char* stack = nullptr;
  bool started = false;
  State state;
  uint32_t parity;
  int operation, barrier_flags;
};
struct Simdgroup {
  ShimLanes lanes[2];
  bool ready[2];
  uint32_t epoch;  // simdgroup barriers so far
};
struct Touch {  // of one byte: who, and in which epoch (barriers of the threadgroup, of the simdgroup)
  uint32_t thread = NOBODY, epoch = 0, simd_epoch = 0;
};
struct Shadow {
  Touch write, read[2];  // the last reads of two threads
};
struct Shared {
  char* base;
  size_t bytes;
  std::vector<Shadow> shadow;
};
struct Buffer {
  char* base;
  size_t bytes;
  bool is_output;
  const char* name;
  std::vector<uint8_t> read;    // inputs: which bytes
  std::vector<Touch> written;   // outputs: by which thread of which threadgroup
  std::vector<uint32_t> group;  // outputs
  uint64_t loaded, stored;
};

std::vector<Fibre> fibres;
std::vector<Simdgroup> simdgroups;
std::vector<Buffer> buffers;
std::vector<Shared> shared;
jmp_buf scheduler, failed;
char message[512];
uint32_t current, num_threads, threadgroup_epoch, device_epoch, group_number;
bool backward, inside = false;
void (*kernel_entry)(void**, const ShimPlace*);
std::vector<void*> pointers;
std::vector<ShimPlace> places;

[[noreturn]] void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  inside = false;
  _longjmp(failed, 1);
}

void wait(State why) {
  Fibre& fibre = fibres[current];
  fibre.state = why;
  inside = false;
  if (!_setjmp(fibre.here)) _longjmp(scheduler, 1);
  inside = true;
}

void fibre_main() {
  for (;;) {
    inside = true;
    kernel_entry(pointers.data(), &places[current]);
    wait(DONE);
  }
}

// Runs the fibre until it waits
void resume(uint32_t thread) {
  current = thread;
  if (_setjmp(scheduler)) return;
  Fibre& fibre = fibres[thread];
  if (fibre.started) _longjmp(fibre.here, 1);
  fibre.started = true;
  getcontext(&fibre.context);
  fibre.context.uc_stack.ss_sp = fibre.stack;
  fibre.context.uc_stack.ss_size = STACK_BYTES;
  fibre.context.uc_link = nullptr;
  makecontext(&fibre.context, fibre_main, 0);
  setcontext(&fibre.context);
}

const char* where(int state) { return state == AT_SIMD ? "a simd operation" : state == DONE ? "its end" : "a barrier"; }

// Runs one simdgroup as far as it gets without the others
bool run_simdgroup(uint32_t index) {
  const uint32_t low = index * 32, high = std::min(num_threads, low + 32);
  bool moved = false;
  for (;;) {
    uint32_t waiting[4] = {};
    for (uint32_t i = 0; i < high - low; i++) {
      const uint32_t thread = backward ? high - 1 - i : low + i;
      if (fibres[thread].state == RUNNING) {
        resume(thread);
        moved = true;
      }
      waiting[fibres[thread].state]++;
    }
    if (!waiting[AT_SIMD]) return moved;
    for (uint32_t thread = low; thread < high; thread++) {
      const Fibre& fibre = fibres[thread];
      if (fibre.state != AT_SIMD)
        fail("divergent simd operation: lanes of simdgroup %u are at line %d, others at %s", index,
             std::max_element(&fibres[low], &fibres[low] + (high - low), [](const Fibre& a, const Fibre& b) {
               return (a.state == AT_SIMD) < (b.state == AT_SIMD);
             })->operation, where(fibre.state));
      if (fibre.operation != fibres[low].operation)
        fail("divergent simd operation: lanes of simdgroup %u are at lines %d and %d", index, fibres[low].operation,
             fibre.operation);
    }
    for (uint32_t thread = low; thread < high; thread++) fibres[thread].state = RUNNING;
  }
}

void run_threadgroup() {
  for (uint32_t i = 0; i < num_threads; i++) fibres[i].state = RUNNING, fibres[i].parity = 0;
  for (Shared& one : shared) {
    memset(one.base, backward ? 0x7f : 0xff, one.bytes);  // NaN or huge as float, -1 or huge as integer
    std::fill(one.shadow.begin(), one.shadow.end(), Shadow{});
  }
  threadgroup_epoch = device_epoch = 0;
  for (Simdgroup& group : simdgroups) group.epoch = 0, group.ready[0] = group.ready[1] = false;
  for (;;) {
    for (uint32_t i = 0; i < simdgroups.size(); i++)
      run_simdgroup(backward ? uint32_t(simdgroups.size()) - 1 - i : i);
    uint32_t done = 0, barrier = 0;
    for (uint32_t i = 0; i < num_threads; i++) {
      done += fibres[i].state == DONE;
      barrier += fibres[i].state == AT_BARRIER;
    }
    if (done == num_threads) return;
    if (barrier < num_threads)
      fail("divergent barrier: %u of %u threads are at one, %u have ended", barrier, num_threads, done);
    const int flags = fibres[0].barrier_flags;
    for (uint32_t i = 0; i < num_threads; i++) {
      if (fibres[i].operation != fibres[0].operation)
        fail("divergent barrier: threads are at lines %d and %d", fibres[0].operation, fibres[i].operation);
      fibres[i].state = RUNNING;
    }
    if (flags & 2) threadgroup_epoch++;
    if (flags & 1) device_epoch++;
  }
}

bool ordered(const Touch& before, uint32_t thread) {
  if (before.thread == NOBODY || before.thread == thread) return true;
  if (before.epoch != threadgroup_epoch) return true;
  return before.thread != ATOMIC && thread != ATOMIC && (before.thread - 1) / 32 == (thread - 1) / 32 &&
         before.simd_epoch != simdgroups[(thread - 1) / 32].epoch;
}

void access_shared(Shared& array, size_t offset, size_t bytes, bool write, bool atomic) {
  const uint32_t thread = atomic ? ATOMIC : current + 1;
  const Touch now{thread, threadgroup_epoch, simdgroups[current / 32].epoch};
  for (size_t i = offset; i < offset + bytes; i++) {
    Shadow& shadow = array.shadow[i];
    if (!ordered(shadow.write, thread) ||
        ((write || atomic) && !(ordered(shadow.read[0], thread) && ordered(shadow.read[1], thread))))
      fail("race: thread %u %s byte %zu of a threadgroup array that another thread touched since the last barrier",
           current, write ? "writes" : "reads", i);
    if (write || atomic) {
      shadow.write = now;
    } else if (shadow.read[0].thread == thread || shadow.read[0].epoch != threadgroup_epoch) {
      shadow.read[0] = now;
    } else {
      shadow.read[1] = now;
    }
  }
}

void access_output(Buffer& buffer, size_t offset, size_t bytes, bool write) {
  const uint32_t thread = current + 1;
  for (size_t i = offset; i < offset + bytes; i++) {
    Touch& touch = buffer.written[i];
    if (touch.thread != NOBODY && (buffer.group[i] != group_number || (touch.thread != thread && touch.epoch == device_epoch)))
      fail("race: thread %u %s byte %zu of %s, which another thread wrote", current, write ? "writes" : "reads", i,
           buffer.name);
    if (touch.thread == NOBODY && !write) fail("byte %zu of the output %s is read before it is written", i, buffer.name);
    if (write) touch = {thread, device_epoch, 0}, buffer.group[i] = group_number;
  }
  (write ? buffer.stored : buffer.loaded) += bytes;
}

void access(const void* place, size_t bytes, bool write, bool atomic = false) {
  if (!inside) return;
  const char* address = static_cast<const char*>(place);
  for (Buffer& buffer : buffers)
    if (address >= buffer.base && address + bytes <= buffer.base + buffer.bytes) {
      const size_t offset = address - buffer.base;
      if (buffer.is_output) return access_output(buffer, offset, bytes, write);
      if (write) fail("the input %s is written at byte %zu", buffer.name, offset);
      if (offset % (bytes & -bytes)) fail("a misaligned read of %zu bytes at byte %zu of %s", bytes, offset, buffer.name);
      memset(&buffer.read[offset], 1, bytes);
      buffer.loaded += bytes;
      return;
    }
  for (Shared& array : shared)
    if (address >= array.base && address + bytes <= array.base + array.bytes)
      return access_shared(array, address - array.base, bytes, write, atomic);
  for (Shared& array : shared)
    if (address + GUARD_BYTES > array.base && address < array.base + array.bytes + GUARD_BYTES)
      fail("out of bounds: %zu bytes are %s at byte %td of a threadgroup array of %zu (thread %u)", bytes,
           write ? "written" : "read", address - array.base, array.bytes, current);
  const char* stack = fibres[current].stack;
  if (address >= stack && address + bytes <= stack + STACK_BYTES) return;
  const Buffer* nearest = &buffers[0];
  auto distance = [&](const Buffer& b) {
    return address < b.base ? b.base - address : std::max<ptrdiff_t>(address + bytes - (b.base + b.bytes), 0);
  };
  for (const Buffer& buffer : buffers)
    if (distance(buffer) < distance(*nearest)) nearest = &buffer;
  Dl_info known;
  if (distance(*nearest) > 4096 && !write && dladdr(place, &known)) return;  // a constant table of the kernel's
  fail("out of bounds: %zu bytes are %s at byte %td of %s, which has %zu (threadgroup %u, thread %u)", bytes,
       write ? "written" : "read", address - nearest->base, nearest->name, nearest->bytes, group_number, current);
}

}  // namespace

extern "C" {

ShimLanes* shim_exchange(uint64_t value, int operation) {
  Fibre& fibre = fibres[current];
  const uint32_t parity = fibre.parity ^= 1, me = current;
  Simdgroup& group = simdgroups[me / 32];
  group.lanes[parity].value[me % 32] = value;
  group.ready[parity] = false;
  fibre.operation = operation;
  wait(AT_SIMD);
  ShimLanes* lanes = &simdgroups[me / 32].lanes[parity];
  lanes->lane = me % 32;
  return lanes;
}

void shim_barrier(int flags, int line) {
  fibres[current].operation = line;
  fibres[current].barrier_flags = flags;
  wait(AT_BARRIER);
}

void shim_simdgroup_barrier(int line) {
  ShimLanes* lanes = shim_exchange(0, line);
  if (!*lanes->ready) simdgroups[current / 32].epoch++, *lanes->ready = true;
}

void shim_share(void* array, size_t bytes) {
  size_t total = bytes;
  for (const Shared& one : shared) {
    if (one.base == array) return;
    total += one.bytes;
  }
  if (total > THREADGROUP_BYTES) fail("%zu bytes of threadgroup memory: a threadgroup has %zu", total, THREADGROUP_BYTES);
  shared.push_back({static_cast<char*>(array), bytes, std::vector<Shadow>(bytes)});
  memset(array, backward ? 0x7f : 0xff, bytes);
}

void shim_read(const void* place, size_t bytes) { access(place, bytes, false); }
void shim_atomic(void* place, size_t bytes) { access(place, bytes, false, true); }

// statistics: for each buffer distinct bytes read, and bytes loaded and stored by all threads. Returns null or what went
// wrong.
const char* shim_launch(void (*entry)(void**, const ShimPlace*), int count, void** bases, const uint64_t* bytes,
                        const char** names, int num_inputs, const uint32_t* grid, const uint32_t* threadgroup,
                        int is_backward, uint64_t* statistics) {
  kernel_entry = entry;
  backward = is_backward;
  pointers.assign(bases, bases + count);
  buffers.clear();
  shared.clear();
  group_number = 0;
  for (int i = 0; i < count; i++) {
    const bool is_output = i >= num_inputs;
    buffers.push_back({static_cast<char*>(bases[i]), bytes[i], is_output, names[i],
                       std::vector<uint8_t>(is_output ? 0 : bytes[i]), std::vector<Touch>(is_output ? bytes[i] : 0),
                       std::vector<uint32_t>(is_output ? bytes[i] : 0), 0, 0});
  }
  if (_setjmp(failed)) {
    for (Fibre& fibre : fibres) fibre.started = false;
    return message;
  }
  uint32_t size[3], groups[3];
  for (int i = 0; i < 3; i++) {
    size[i] = std::min(threadgroup[i], grid[i]);
    groups[i] = (grid[i] + size[i] - 1) / size[i];
  }
  for (uint32_t z = 0; z < groups[2]; z++)
    for (uint32_t y = 0; y < groups[1]; y++)
      for (uint32_t x = 0; x < groups[0]; x++, group_number++) {
        const uint3 here{std::min(size[0], grid[0] - x * size[0]), std::min(size[1], grid[1] - y * size[1]),
                         std::min(size[2], grid[2] - z * size[2])};
        num_threads = here.x * here.y * here.z;
        if (num_threads > 1024) fail("%u threads in a threadgroup: at most 1024 fit", num_threads);
        const uint32_t num_simdgroups = (num_threads + 31) / 32;
        while (fibres.size() < num_threads) {
          fibres.emplace_back();
          fibres.back().stack = static_cast<char*>(malloc(STACK_BYTES));
        }
        simdgroups.resize(num_simdgroups);
        places.resize(num_threads);
        for (uint32_t i = 0; i < num_simdgroups; i++)
          for (int parity = 0; parity < 2; parity++) {
            simdgroups[i].lanes[parity].count = std::min(32u, num_threads - i * 32);
            simdgroups[i].lanes[parity].ready = &simdgroups[i].ready[parity];
          }
        for (uint32_t i = 0; i < num_threads; i++) {
          const uint3 at{i % here.x, i / here.x % here.y, i / (here.x * here.y)};
          places[i] = {{x * size[0] + at.x, y * size[1] + at.y, z * size[2] + at.z}, {x, y, z}, i, i / 32, i % 32};
        }
        run_threadgroup();
      }
  for (const Buffer& buffer : buffers) {
    *statistics++ = std::count(buffer.read.begin(), buffer.read.end(), 1);
    *statistics++ = buffer.loaded;
    *statistics++ = buffer.stored;
  }
  return nullptr;
}

#define HOOK(bytes)                                                                 \
  void __tsan_read##bytes(void* place) { access(place, bytes, false); }             \
  void __tsan_write##bytes(void* place) { access(place, bytes, true); }             \
  void __tsan_unaligned_read##bytes(void* place) { access(place, bytes, false); }   \
  void __tsan_unaligned_write##bytes(void* place) { access(place, bytes, true); }
HOOK(1)
HOOK(2)
HOOK(4)
HOOK(8)
HOOK(16)
void __tsan_read_range(void* place, size_t bytes) { access(place, bytes, false); }
void __tsan_write_range(void* place, size_t bytes) { access(place, bytes, true); }
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
}
