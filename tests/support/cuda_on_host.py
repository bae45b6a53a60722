"""Runs the source text of a CUDA kernel on the CPU, so that its decisions can be tested without a GPU.

g++ compiles the text as it is, behind a header that gives CUDA's names a meaning. Every thread of a block is a fiber;
they take turns at each `__syncthreads` and at each shuffle, which is enough for kernels whose threads all pass the same
barriers. It says nothing about speed, races or the device's own arithmetic: `__expf` is the C library's here.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

HEADERS = ("algorithm", "cmath", "csetjmp", "cstddef", "cstdint", "cstring", "ucontext.h", "vector")
SHIM = r"""
#include "headers.h"
using std::min;
using std::max;
#define __device__
#define __forceinline__ inline
#define __shared__ static
struct Index { int x, y, z; };
static Index threadIdx, blockIdx;
#define __expf expf
#define __logf logf

constexpr int THREADS = BLOCK_SIZE, STACK = 16384 + 576;  // no power of two: stacks would share cache lines
static jmp_buf waiting[THREADS];
static ucontext_t fibers[THREADS], outside;
static bool started[THREADS];
static void (*body)();

static void enter(int thread) {
  threadIdx.x = thread;
  if (started[thread]) _longjmp(waiting[thread], 1);
  started[thread] = true;
  setcontext(&fibers[thread]);
}
__attribute__((noinline)) static void yield_to(int thread) {
  if (!_setjmp(waiting[threadIdx.x])) enter(thread);
}
static void __syncthreads() { yield_to((threadIdx.x + 1) % THREADS); }
static void __syncwarp() { yield_to(threadIdx.x / 32 * 32 + (threadIdx.x + 1) % 32); }
static void fiber() {
  body();
  if (threadIdx.x + 1 < THREADS) enter(threadIdx.x + 1);
}
template <typename V> static V __shfl_xor_sync(unsigned, V value, int lanes) {
  static V slots[2][THREADS];
  static int turns[THREADS];
  const int me = threadIdx.x, turn = turns[me] ^= 1;
  slots[turn][me] = value;
  __syncwarp();
  return slots[turn][me ^ lanes];
}
static void run_block(int block, void (*kernel)()) {
  static std::vector<char> stacks((size_t)THREADS * STACK);
  body = kernel;
  blockIdx.x = block;
  for (int i = 0; i < THREADS; i++) {
    getcontext(&fibers[i]);
    fibers[i].uc_stack.ss_sp = stacks.data() + (size_t)i * STACK;
    fibers[i].uc_stack.ss_size = STACK;
    fibers[i].uc_link = &outside;
    makecontext(&fibers[i], fiber, 0);
    started[i] = false;
  }
  threadIdx.x = 0;
  started[0] = true;
  swapcontext(&outside, &fibers[0]);
}
"""


def missing_compiler() -> str | None:
    """Why kernels cannot be run on this machine's CPU; None if they can."""
    if platform.system() != "Linux":
        return "runs a CUDA kernel's source on the CPU by fibers of glibc: needs Linux"
    return None if shutil.which("g++") else "compiles a CUDA kernel's source for the CPU: needs g++"


def compile_for_host(source: str, folder: Path, *, block_size: int) -> Any:
    """`source`, C++ with a function `run` that calls `run_block` for each block, as a library."""
    text, library = folder / "kernel.cpp", folder / "kernel.so"
    text.write_text(SHIM.replace("BLOCK_SIZE", str(block_size)) + source)
    _compile("-shared", "-I", _headers().name, "-o", str(library), str(text))
    return ctypes.CDLL(str(library))


@functools.cache
def _headers() -> tempfile.TemporaryDirectory[str]:
    """A folder with the standard headers, compiled: they would take half of the time of each kernel."""
    folder = tempfile.TemporaryDirectory()
    header = Path(folder.name, "headers.h")
    header.write_text("".join(f"#include <{name}>\n" for name in HEADERS))
    _compile("-x", "c++-header", "-o", f"{header}.gch", str(header))
    return folder


def _compile(*arguments: str) -> None:
    # Kernels run for milliseconds: more optimisation costs more time than it saves. Fibers jump between stacks, which
    # the checks of a hardened libc take for an error.
    options = ["-Og", "-std=c++17", "-fPIC", "-U_FORTIFY_SOURCE"]
    if platform.machine() == "x86_64":
        options.append("-fcf-protection=none")
    subprocess.run(["g++", *options, *arguments], check=True, capture_output=True, text=True, timeout=120)
