"""Front-end rules of Metal on machines without it: generated text through libclang's "C++ for OpenCL".

It knows address spaces and names, which g++ (see shim) does not: a `device` pointer into a `constant` buffer, a pointer
without a space into threadgroup memory, `min(int, uint)`, an undeclared name. The declarations of Metal's library here
are stand-ins, so it is no Metal compiler.
"""

import re

import clang.cindex as cindex

from eps_mlx.kernels.launch import METAL_HEADER

_MATH = "exp exp2 log log2 rint fabs"
_REDUCE = "simd_sum simd_max simd_prefix_exclusive_sum"
_MOVE = "simd_shuffle simd_shuffle_xor"
_PAIR_TYPES = "float half int uint long ulong short ushort"

PRELUDE = (
    """
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private
#define atomic_uint metal_atomic_uint  // OpenCL has a type of this name
typedef unsigned char uchar; typedef unsigned short ushort; typedef unsigned int uint; typedef unsigned long ulong;
typedef signed char int8_t; typedef uchar uint8_t; typedef short int16_t; typedef ushort uint16_t;
typedef int int32_t; typedef uint uint32_t; typedef long int64_t; typedef ulong uint64_t;
typedef ulong size_t; typedef long ptrdiff_t;
typedef half float16_t;
typedef uint uint2 __attribute__((ext_vector_type(2)));
typedef uint uint3 __attribute__((ext_vector_type(3)));
typedef half bfloat16_t;  // clang has no arithmetic of its own for it there
#define INFINITY __builtin_inff()
namespace metal {
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
mem_flags operator|(mem_flags a, mem_flags b);
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
template <class To, class From> To as_type(From);
bool isfinite(float);
enum memory_order { memory_order_relaxed };
struct atomic_uint { uint value; };
"""
    + "".join(f"float {name}(float);\n" for name in _MATH.split())
    + "".join(f"template <class T> T {name}(T);\n" for name in _REDUCE.split())
    + "".join(f"template <class T> T {name}(T, ushort);\n" for name in _MOVE.split())
    + "".join(f"{one} max({one}, {one}); {one} min({one}, {one});\n" for one in _PAIR_TYPES.split())
    + "".join(
        f"uint atomic_fetch_add_explicit({space} atomic_uint*, uint, memory_order);\n"
        f"void atomic_store_explicit({space} atomic_uint*, uint, memory_order);\n"
        f"uint atomic_load_explicit({space} const atomic_uint*, memory_order);\n"
        for space in ("__local", "__global")
    )
    + "}\nusing namespace metal;\n"
)

# Metal copies plain structs between address spaces by itself, clang only through a generic one, with which it would let
# pointers without a space pass. So the helpers' own text is checked with that, and kernels with these in their place.
_HELPERS = """
template <class T, int N> struct Lanes { typedef T type __attribute__((ext_vector_type(N))); };
template <class T, int N> using Piece = typename Lanes<T, N>::type;
template <int N, class T> Piece<T, N> load_piece(const device T*);
template <int N, class T> Piece<T, N> load_piece(const constant T*);
"""

_ARGUMENTS = "-x clcpp -cl-std=CLC++2021 -target spir64 -nostdinc -cl-no-stdinc -fno-caret-diagnostics -Wno-unused"
_ARGUMENTS += " -Wno-unknown-pragmas -Xclang -cl-ext=-all,+cl_khr_fp16"
_GENERIC = ",+__opencl_c_generic_address_space"


def diagnostics(text: str) -> list[str]:
    """What clang says of a generated text (`shim.generated_text`), as "line:column: message"; empty where all is well.
    Lines are the text's own."""
    assert METAL_HEADER in text
    room = "\n" * (METAL_HEADER.count("\n") - 1)
    kernel = _parse(PRELUDE + _HELPERS, _as_opencl(text.replace(METAL_HEADER, room)).replace(".v[", "["), _ARGUMENTS)
    return kernel + _parse(PRELUDE, METAL_HEADER, _ARGUMENTS + _GENERIC)


def _parse(above: str, text: str, arguments: str) -> list[str]:
    parsed = cindex.Index.create().parse(
        "kernel.clcpp", args=arguments.split(), unsaved_files=[("kernel.clcpp", above + text)]
    )
    return [f"{d.location.line - above.count(chr(10))}:{d.location.column}: {d.spelling}" for d in parsed.diagnostics]


def _as_opencl(text: str) -> str:
    """A kernel cannot be a template there, nor take references or attributes."""
    template = re.search(r"template <([^>]*)>\n\[\[kernel\]\]", text)
    constants = ""
    if template:
        values = re.search(r"decltype\(\w+<([^>]*)>\)", text)
        assert values, "a template that is not instantiated"
        for parameter, value in zip(template.group(1).split(", "), values.group(1).split(", "), strict=True):
            kind, name = parameter.split()
            constants += f" using {name} = {value};" if kind == "typename" else f" constexpr {kind} {name} = {value};"
    text = re.sub(r"\ntemplate \[\[host_name.*?;\n?", "\n", text, flags=re.S)
    text = re.sub(r"template <[^>]*>\n(?=\[\[kernel)", "\n", text).replace("[[kernel]] void", "__kernel void")
    for found in re.finditer(r"const constant (\w+)& (\w+) \[\[", text):
        constants += f" const {found.group(1)} {found.group(2)} = *{found.group(2)}_at;"
    text = re.sub(r"const constant (\w+)& (\w+) \[\[", r"const constant \1* \2_at [[", text)
    text = re.sub(r" \[\[\w+(\(\d+\))?\]\]", "", text)
    # bool cannot be a kernel's argument there
    head, body = text.split("__kernel void", 1)
    signature, rest = body.split(") {\n", 1)
    signature = re.sub(r"\bbool\b", "uint8_t", signature)
    return f"{head}__kernel void{signature}) {{{constants}\n{rest}"
