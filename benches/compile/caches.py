#!/usr/bin/env python3
"""How long NVRTC and the driver take for kernels of CUDA source, cold, from their cache and on several threads, and what
a program that launches and allocates meanwhile waits for. Run in the root of the repository, with an empty
CUDA_CACHE_PATH; needs libnvrtc, libcuda and a device of sm_90.

    CUDA_CACHE_PATH=$(mktemp -d) python3 benches/compile/caches.py
"""

import ctypes
import os
import re
import threading
import time

SOURCES = "cubecl-kernels/src/"
# As CubeCL calls NVRTC, but for folders of headers, of which the sources include none.
OPTIONS = ["--gpu-architecture=sm_90a", "-lineinfo"]
THREADS = 12


def read(path):
    with open(SOURCES + path, encoding="utf-8") as file:
        return file.read()


def numbers(path, name):
    """The structure that the macro `numbers!` declares in CUDA source."""
    body = re.search(r"struct %s \{(.*?)\n    \}" % name, read(path), re.S).group(1)
    fields = ""
    for field, kind in re.findall(r"^\s+(\w+): (u64|\[u32; 2\]),", body, re.M):
        fields += f"    unsigned long long {field};\n" if kind == "u64" else f"    unsigned int {field}[2];\n"
    return "struct Numbers {\n" + fields + "};\n"


def define(**knobs):
    return "".join(f"#define {name} {value}\n" for name, value in knobs.items())


def kernels(salt):
    """Sources of products and of attention with their entry points, which the salt makes new to all caches."""
    hopper, common = read("cuda/hopper.cu"), read("gemm/hopper/common.cu")
    of_float = numbers("gemm/hopper/float.rs", "FloatNumbers") + hopper + common
    of_float += read("gemm/hopper/accumulate.cu") + read("gemm/hopper/gemm_float.cu")
    of_int8 = numbers("gemm/hopper.rs", "GemmNumbers") + hopper + common
    of_int8 += read("gemm/hopper/chunks.cu") + read("gemm/hopper/gemm.cu")
    attention = numbers("attention/hopper.rs", "AttentionNumbers") + hopper + read("attention/hopper/common.cu")
    found = []
    for along in ((0, 1), (0, 0), (1, 1)):
        for width, stages in ((128, 6), (256, 4)):
            knobs = define(TILE_N=width, STAGES=stages, IN='"bf16"', A_ALONG_MN=along[0], B_ALONG_MN=along[1], BIAS=0,
                           OUT_BF16="")
            found.append(("gemm_float_hopper", knobs + of_float))
    for fallback in (0, 1):
        knobs = define(TILE_N=256, STAGES=4, BLOCK=128, FALLBACK=fallback, BIAS=0, OUT_BF16="")
        found.append(("gemm_hopper", knobs + of_int8))
    for name in ("forward", "gradients"):
        knobs = define(TILE_N=64, STAGED_ROWS=128, STAGES=2, IN='"bf16"', OUT_BF16="", MASKED=0, SPLIT=0)
        found.append((f"attention_{name}_hopper", knobs + attention + read(f"attention/hopper/{name}.cu")))
    return [(f"#define {entry} {entry}_{salt}\n{source}", f"{entry}_{salt}") for entry, source in found]


class Cuda:
    """NVRTC, the driver, and the context of the program."""

    def __init__(self):
        self.nvrtc = ctypes.CDLL(os.environ.get("NVRTC", "libnvrtc.so.13"))
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.device, self.context = ctypes.c_int(), ctypes.c_void_p()
        self.check(self.driver.cuInit(0))
        self.check(self.driver.cuDeviceGet(ctypes.byref(self.device), 0))
        self.check(self.driver.cuDevicePrimaryCtxRetain(ctypes.byref(self.context), self.device))

    @staticmethod
    def check(status):
        if status:
            raise SystemExit(f"CUDA: error {status}")

    def ptx(self, source):
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        self.check(self.nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), None, 0, None, None))
        options = (ctypes.c_char_p * len(OPTIONS))(*[option.encode() for option in OPTIONS])
        self.check(self.nvrtc.nvrtcCompileProgram(program, len(OPTIONS), options))
        self.check(self.nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size)))
        ptx = ctypes.create_string_buffer(size.value)
        self.check(self.nvrtc.nvrtcGetPTX(program, ptx))
        self.nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
        return ptx.raw

    def load(self, ptx, entry):
        """Into the thread's current context."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(self.driver.cuModuleLoadData(ctypes.byref(module), ptx))
        self.check(self.driver.cuModuleGetFunction(ctypes.byref(function), module, entry.encode()))
        return module, function

    def load_into(self, context, ptx, entry):
        self.check(self.driver.cuCtxSetCurrent(context))
        module, _ = self.load(ptx, entry)
        self.driver.cuModuleUnload(module)


def on_threads(title, count, items, work, meanwhile=None):
    """Calls work(item, state) for all items, each thread with a state of its own."""
    todo, lock, times = list(items), threading.Lock(), []

    def run():
        state = {}
        while True:
            with lock:
                if not todo:
                    return
                item = todo.pop(0)
            began = time.time()
            work(item, state)
            times.append(time.time() - began)

    threads = [threading.Thread(target=run) for _ in range(count)]
    began = time.time()
    for thread in threads:
        thread.start()
    waits = meanwhile(lambda: any(thread.is_alive() for thread in threads)) if meanwhile else ""
    for thread in threads:
        thread.join()
    print(f"{title:58} {time.time() - began:6.2f} s, each {min(times):.3f} to {max(times):.3f}{waits}", flush=True)


def main():
    cuda = Cuda()
    cuda.check(cuda.driver.cuCtxSetCurrent(cuda.context))
    tiny = 'extern "C" __global__ void tiny%d(float *x) { x[0] = %d.0f; }'
    _, function = cuda.load(cuda.ptx(tiny % (0, 0)), "tiny0")
    buffer = ctypes.c_uint64()
    cuda.check(cuda.driver.cuMemAlloc_v2(ctypes.byref(buffer), ctypes.c_size_t(4096)))
    arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.pointer(buffer), ctypes.c_void_p))
    made = [0]

    def meanwhile(goes_on):
        """The longest that a launch, an allocation and a small new kernel took, while threads compiled."""
        longest = {"launch": 0.0, "allocation": 0.0, "small kernel": 0.0}
        while goes_on():
            made[0] += 1
            times = [time.time()]
            cuda.check(cuda.driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, None, arguments, None))
            times.append(time.time())
            memory = ctypes.c_uint64()
            cuda.check(cuda.driver.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1 << 20)))
            cuda.driver.cuMemFree_v2(memory)
            times.append(time.time())
            cuda.load(cuda.ptx(tiny % (made[0], made[0])), f"tiny{made[0]}")
            times.append(time.time())
            for name, begin, end in zip(longest, times, times[1:]):
                longest[name] = max(longest[name], end - begin)
            time.sleep(0.005)
        return "; meanwhile at most " + ", ".join(f"{name} {wait:.3f}" for name, wait in longest.items())

    def compiled(title, count, sources):
        found = []
        on_threads(title, count, sources, lambda it, _: found.append((cuda.ptx(it[0]), it[1])))
        return found

    def shared(item, _):
        cuda.load_into(cuda.context, *item)

    def of_its_own(item, state):
        if not state:
            state["context"] = ctypes.c_void_p()
            cuda.check(cuda.driver.cuCtxCreate_v2(ctypes.byref(state["context"]), 0, cuda.device))
        cuda.load_into(state["context"], *item)

    first = compiled("NVRTC, one thread", 1, kernels("a"))
    on_threads("driver, one thread", 1, first, shared)
    compiled("NVRTC from its cache, one thread", 1, kernels("a"))
    on_threads("driver from its cache, one thread", 1, first, shared)
    several = f"{THREADS} threads"
    second = compiled(f"NVRTC, {several}", THREADS, kernels("b"))
    on_threads(f"driver, {several}, the program's context", THREADS, second, shared, meanwhile)
    third = compiled(f"NVRTC, {several}, again", THREADS, kernels("c"))
    on_threads(f"driver, {several}, a context of each", THREADS, third, of_its_own, meanwhile)


if __name__ == "__main__":
    main()
