"""Compiles the kernels without nvcc, by NVRTC and nvFatbin: both are plain libraries in the package index, and need
neither a toolkit nor a host compiler. Used by cuda.py."""

import ctypes
from pathlib import Path

# All that the kernels include besides their own headers.
STDINT = """
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t;
typedef unsigned long uint64_t; typedef unsigned long uintptr_t;
#define UINT32_MAX 0xffffffffu
#define UINT64_MAX 0xfffffffffffffffful
"""
OPTIONS = ["--std=c++17", "--device-as-default-execution-space"]  # headers also declare what the C twins share


def strings(texts):
    return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))


class Library:
    """Functions of one library; OSError where one returns anything but 0."""

    def __init__(self, path):
        self.functions, self.path = ctypes.CDLL(str(path)), path

    def __getattr__(self, name):
        function = getattr(self.functions, name)

        def call(*args):
            status = function(*args)
            if status:
                raise OSError(f"{name}() of {self.path} returned {status}")

        return call

    def bytes_of(self, handle, size_name, name):
        size = ctypes.c_size_t()
        getattr(self, size_name)(handle, ctypes.byref(size))
        data = ctypes.create_string_buffer(size.value)
        getattr(self, name)(handle, data)
        return data.raw


class Compiler:
    def __init__(self, nvrtc, nvfatbin):
        self.nvrtc, self.nvfatbin = Library(nvrtc), Library(nvfatbin)

    @property
    def version(self):
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def compile(self, source, arch, flags):
        """The machine code (arch "sm_80") or PTX ("compute_80") of a file, and what the compiler said."""
        program, source = ctypes.c_void_p(), Path(source)
        self.nvrtc.nvrtcCreateProgram(
            ctypes.byref(program),
            source.read_bytes(),
            source.name.encode(),
            1,
            strings([STDINT]),
            strings(["stdint.h"]),
        )
        options = [f"--gpu-architecture={arch}", f"-I{source.parent}", *OPTIONS, *flags]
        try:
            self.nvrtc.nvrtcCompileProgram(program, len(options), strings(options))
        except OSError as error:
            raise OSError(f"{error} for {arch}:\n{self.log(program)}") from None
        kind = "CUBIN" if arch.startswith("sm_") else "PTX"
        code = self.nvrtc.bytes_of(program, f"nvrtcGet{kind}Size", f"nvrtcGet{kind}")
        log = self.log(program)
        self.nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
        return code, log

    def log(self, program):
        return self.nvrtc.bytes_of(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog").rstrip(b"\0\n").decode()

    def fatbin(self, source, archs, flags=()):
        """One uncompressed fatbin with the code for all of these."""
        handle, options = ctypes.c_void_p(), ["-64", "-compress=false"]
        self.nvfatbin.nvFatbinCreate(ctypes.byref(handle), strings(options), ctypes.c_size_t(len(options)))
        for arch in archs:
            kind, number = arch.split("_")
            code, log = self.compile(source, arch, flags)
            if log:
                print(log)
            common = (handle, code, ctypes.c_size_t(len(code)), number.encode(), b"kvswap")
            if kind == "sm":
                self.nvfatbin.nvFatbinAddCubin(*common)
            else:
                self.nvfatbin.nvFatbinAddPTX(*common, None)
        data = self.nvfatbin.bytes_of(handle, "nvFatbinSize", "nvFatbinGet")
        self.nvfatbin.nvFatbinDestroy(ctypes.byref(handle))
        return data
