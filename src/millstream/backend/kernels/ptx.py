"""The PTX instructions that several kernels use, as CUDA functions: what stands in their headers."""

from __future__ import annotations

COPIES = """
__device__ __forceinline__ void mill_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void mill_wait() {
  asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
}
"""
"""Copies to shared memory that run on their own, in groups: each kernel has its own way to begin one."""

_MMA = """
__device__ __forceinline__ void mill_mma(
    float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.KIND.KIND.f32 "
    "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
"""


def mma(half: bool) -> str:
    """Sixteen rows times eight columns, over sixteen numbers: of float16, or of bfloat16."""
    return _MMA.replace("KIND", "f16" if half else "bf16")
