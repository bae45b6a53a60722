"""The source of a custom CUDA kernel as MLX assembles it, and the file in which MLX looks for its binary.

`mx.fast.cuda_kernel` writes a function around a kernel's body, compiles it, and throws the binary away with the
process. But before it compiles, it looks for a file that is named by a hash of the source. So whoever knows the
source to the letter can put a binary there. `compiled` does, after it has seen that MLX finds one.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import mlx.core as mx

Template = tuple[tuple[str, int | mx.Dtype], ...]

NAMESPACE = "mlx::core::cu"
_MLX_HEADER = """
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

"""
_OPENING = f"namespace {NAMESPACE} {{\n\nnamespace cg = cooperative_groups;\n\n"
_CLOSING = f"\n}}\n\n}} // namespace {NAMESPACE}\n"

_LEAN_HEADER = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned;
using uint64_t = unsigned long;
using uintptr_t = unsigned long;
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-7f
#define INT_MAX 2147483647
#define INT_MIN (-INT_MAX - 1)
#define UINT_MAX 4294967295u
namespace cooperative_groups {}
"""
"""What our kernels need of MLX's header. That one includes much of CUDA's C++ library, which takes most of the time of
compiling a kernel."""
_LEAN_TYPES = """
template <typename N> struct Numbers {
  N at[10];
  __device__ __forceinline__ N operator[](int index) const { return at[index]; }
};
using Shape = Numbers<int>;
using Strides = Numbers<int64_t>;
"""
"""MLX passes ten numbers of each by value."""

_SUFFIXES = ("_shape", "_strides", "_ndim")
_EXTRA_PARAMETERS = ("const __grid_constant__ Shape", "const __grid_constant__ Strides", "const __grid_constant__ int")

_CUDA_TYPES = {
    mx.bool_: "bool",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.float32: "float",
    mx.float64: "double",
}
_SUFFIX_OF_TYPE = {mx.float16: "float16_t", mx.bfloat16: "bfloat16_t"}
"""In the name of a function, where it is not the name of the type."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a kernel's signature depends on besides its source."""

    inputs: tuple[tuple[mx.Dtype, bool], ...]
    """Of each input: its type, and whether it has dimensions."""
    outputs: tuple[mx.Dtype, ...]
    template: Template

    @property
    def known(self) -> bool:
        """True if all types are ones that a kernel of ours may have."""
        types = [*(dtype for dtype, _ in self.inputs), *self.outputs]
        types += [value for _, value in self.template if isinstance(value, mx.Dtype)]
        return all(dtype in _CUDA_TYPES for dtype in types)


@dataclass(frozen=True, slots=True)
class Body:
    """A kernel as it is given to `mx.fast.cuda_kernel`."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str
    header: str

    def function(self, template: Template) -> str:
        """MLX's name of the function."""
        return f"custom_kernel_{self.name}" + "".join(f"_{_suffix(value)}" for _, value in template)

    @property
    def extras(self) -> tuple[str, ...]:
        """The names in the source that MLX passes more parameters for, such as x_shape."""
        names = (name + suffix for name in self.inputs for suffix in _SUFFIXES)
        return tuple(name for name in names if name in self.source)

    def for_mlx(self, parameters: Parameters) -> str:
        """The source as MLX would compile it."""
        return _MLX_HEADER + self.header + _OPENING + self._definition(parameters) + _CLOSING

    def for_us(self, parameters: Parameters) -> str:
        """The same function behind a shorter header."""
        more = "#include <cooperative_groups.h>\n" if "cg::" in self.header + self.source else ""
        types = _OPENING.rstrip() + "\n" + _LEAN_TYPES
        return _LEAN_HEADER + more + self.header + types + self._definition(parameters) + _CLOSING

    def _definition(self, parameters: Parameters) -> str:
        lines = []
        for name, (dtype, has_dimensions) in zip(self.inputs, parameters.inputs, strict=True):
            lines.append(f"    const {_CUDA_TYPES[dtype]}* {name}")
            if has_dimensions:
                extras = zip(_SUFFIXES, _EXTRA_PARAMETERS, strict=True)
                lines += [f"    {kind} {name}{suffix}" for suffix, kind in extras if name + suffix in self.source]
        outputs = zip(self.outputs, parameters.outputs, strict=True)
        lines += [f"    {_CUDA_TYPES[dtype]}* {name}" for name, dtype in outputs]
        constants = "".join(f"  {_constant(name, value)};\n" for name, value in parameters.template)
        head = f"__global__ void {self.function(parameters.template)}(\n" + ",\n".join(lines) + ") {\n"
        return head + (constants + "\n" if constants else "") + self.source


def module_name(function: str, source: str) -> str:
    """MLX's name of the module that it compiles a source to: its files are named so."""
    return f"{function}_{_hash_function()(source.encode()):x}"


def _suffix(value: int | mx.Dtype) -> str:
    if isinstance(value, bool):
        return "t" if value else "f"
    return str(value) if isinstance(value, int) else _SUFFIX_OF_TYPE.get(value, _CUDA_TYPES[value])


def _constant(name: str, value: int | mx.Dtype) -> str:
    if isinstance(value, bool):
        return f"constexpr bool {name} = {'true' if value else 'false'}"
    return f"constexpr int {name} = {value}" if isinstance(value, int) else f"using {name} = {_CUDA_TYPES[value]}"


@functools.cache
def _hash_function() -> HashFunction:
    return HashFunction()


class HashFunction:
    """`std::hash` of a string, by the C++ library that MLX's builds use. Raises OSError or AttributeError if this
    process has another one."""

    SEED = 0xC70F6907

    def __init__(self) -> None:
        self._hash_bytes = ctypes.CDLL("libstdc++.so.6")._ZSt11_Hash_bytesPKvmm
        self._hash_bytes.restype = ctypes.c_size_t
        self._hash_bytes.argtypes = (ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t)

    def __call__(self, data: bytes) -> int:
        value: int = self._hash_bytes(data, len(data), self.SEED)
        return value
