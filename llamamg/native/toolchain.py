"""What this machine builds with: CMake, Ninja, compilers, CPU features."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from llamamg.native.sdist import SetupError, pip

CMAKE_MINIMUM = (3, 18)

# GGML option -> flags of /proc/cpuinfo that must all be there.
X86_FEATURES: dict[str, tuple[str, ...]] = {
    "SSE42": ("sse4_2",),
    "AVX": ("avx",),
    "AVX2": ("avx2",),
    "BMI2": ("bmi2",),
    "FMA": ("fma",),
    "F16C": ("f16c",),
    "AVX512": ("avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"),
    "AVX512_VBMI": ("avx512vbmi",),
    "AVX512_VNNI": ("avx512_vnni",),
    "AVX512_BF16": ("avx512_bf16",),
    "AMX_TILE": ("amx_tile",),
    "AMX_INT8": ("amx_int8",),
}
ARM_FEATURES = {"asimddp": "dotprod", "asimdhp": "fp16", "i8mm": "i8mm", "sve": "sve", "sve2": "sve2"}


def output_of(*command: str) -> str:
    """Standard output of a command, or "" when it cannot be run or fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout if result.returncode == 0 else ""


def _tool(name: str) -> str | None:
    beside_python = Path(sys.executable).parent / name
    return str(beside_python) if beside_python.is_file() else shutil.which(name)


def cmake() -> str:
    """CMake's path; the PyPI wheel is installed into this environment when there is none or it is too old."""
    found = _tool("cmake")
    if found and _version(output_of(found, "--version")) >= CMAKE_MINIMUM:
        return found
    return _install("cmake")


def ninja() -> str:
    """Ninja's path; the PyPI wheel is installed into this environment when there is none."""
    return _tool("ninja") or _install("ninja")


def _install(name: str) -> str:
    print(f"installing {name} into {sys.prefix} ...", flush=True)
    pip("install", "--quiet", "--upgrade", name)
    found = _tool(name)
    if not found:
        raise SetupError(f"{name} is still missing after `pip install {name}`; install it with your package manager")
    return found


def _version(text: str) -> tuple[int, ...]:
    match = re.search(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0,)


def compilers() -> dict[str, str]:
    """First version line of the C and C++ compilers CMake will use. Raises SetupError when one is missing."""
    found = {}
    for variable, default in (("CC", "cc"), ("CXX", "c++")):
        command = os.environ.get(variable, default)
        version = output_of(*command.split(), "--version")
        if not version:
            raise SetupError(
                f"no working {'C' if variable == 'CC' else 'C++'} compiler ('{command}'): install gcc and g++ "
                f"(Debian, Ubuntu: apt install build-essential) or set {variable}"
            )
        found[variable] = version.splitlines()[0]
    return found


def cpu_flags(cpuinfo: str | None = None) -> list[str]:
    """CMake options for this CPU. GGML_BACKEND_DL forbids GGML_NATIVE, so they are chosen one by one."""
    if cpuinfo is None:
        file = Path("/proc/cpuinfo")
        cpuinfo = file.read_text() if file.is_file() else ""
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.M)
    present = set(line[1].split()) if line else set()
    if platform.machine() in ("aarch64", "arm64"):
        features = [name for flag, name in ARM_FEATURES.items() if flag in present]
        return [f"-DGGML_CPU_ARM_ARCH={'+'.join(['armv8.2-a' if features else 'armv8-a', *features])}"]
    enabled = {option: present.issuperset(flags) for option, flags in X86_FEATURES.items()}
    # The 256-bit form only helps a CPU that lacks the 512-bit one.
    enabled["AVX_VNNI"] = "avx_vnni" in present and not enabled["AVX512_VNNI"]
    return [f"-DGGML_{option}={'ON' if on else 'OFF'}" for option, on in enabled.items()]


def jobs() -> int:
    """Parallel compile jobs: one per usable core, but 1.5 GB of memory each (src/models is compiled in large units)."""
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    n_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(n_cores, int(n_bytes / 1.5e9)))
