"""CUDA: is a GPU visible, which architectures, and a CUDA root for CMake even where cuBLAS is missing."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

from llamamg import paths
from llamamg.native.sdist import SetupError, pip
from llamamg.native.toolchain import output_of

# Real architectures for a build without a visible GPU: Turing to Blackwell.
ALL_ARCHITECTURES = "75-real;80-real;86-real;89-real;90-real;100-real;120-real"

# The driver entry points ggml-cuda links against; the real libcuda comes with the driver.
DRIVER_STUBS = (
    "cuGetErrorString",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuMemGetAllocationGranularity",
    "cuMemCreate",
    "cuMemAddressReserve",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemRelease",
    "cuMemAddressFree",
    "cuInit",
    "cuDeviceGetCount",
    "cuDriverGetVersion",
)


def gpu_visible() -> bool:
    return Path("/dev/nvidia0").exists() or bool(output_of("nvidia-smi", "-L").strip())


def architectures() -> str:
    """CMAKE_CUDA_ARCHITECTURES of the visible GPUs, else a list that covers all supported ones."""
    found = re.findall(
        r"^(\d+)\.(\d+)$", output_of("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"), re.M
    )
    return ";".join(sorted({f"{major}{minor}-real" for major, minor in found})) or ALL_ARCHITECTURES


def nvcc() -> Path | None:
    """The nvcc to use: $CUDACXX, PATH, or the usual place."""
    for candidate in (os.environ.get("CUDACXX"), shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"):
        if candidate and Path(candidate).is_file():
            return Path(candidate)
    return None


def nvcc_version(compiler: Path) -> str:
    match = re.search(r"release (\d+\.\d+)", output_of(str(compiler), "--version"))
    return match[1] if match else "unknown"


def toolkit(compiler: Path) -> Path:
    """The toolkit folder an nvcc belongs to (it may be a wrapper script; --dryrun names the real one)."""
    result = subprocess.run(
        [str(compiler), "--dryrun", "-x", "cu", "/dev/null"], capture_output=True, text=True, check=False
    )
    top = re.search(r"^#\$ TOP=(.*)$", result.stderr, re.M)
    return Path(top[1]).resolve() if top else compiler.resolve().parent.parent


def cmake_flags(archs: str | None) -> list[str]:
    """CMake options for CUDA. Raises SetupError when nvcc is missing."""
    compiler = nvcc()
    if compiler is None:
        raise SetupError(
            "a CUDA build needs nvcc: install the CUDA toolkit (or set CUDACXX to its nvcc), or pass --no-cuda"
        )
    root = complete_root(compiler)
    return [
        "-DGGML_CUDA=ON",
        # Multi-GPU here is one process with peer copies; NCCL would be one more thing to install.
        "-DGGML_CUDA_NCCL=OFF",
        f"-DCUDAToolkit_ROOT={root}",
        f"-DCMAKE_CUDA_COMPILER={root / 'bin' / 'nvcc'}",
        f"-DCMAKE_CUDA_ARCHITECTURES={archs or architectures()}",
        f"-DLLAMAMG_RPATH={root / 'lib64'}",
    ]


def complete_root(compiler: Path) -> Path:
    """A toolkit folder with cuBLAS: the compiler's own, or one put together with PyPI's wheels (once)."""
    tree = toolkit(compiler)
    if _has_cublas(tree):
        return tree
    made = paths.home() / f"cuda-root-{nvcc_version(compiler)}"
    is_whole = (made / "include" / "cublas_v2.h").exists() and (made / "lib64" / "stubs" / "libcuda.so").exists()
    return made if is_whole else _assemble(tree, nvcc_version(compiler))


def _has_cublas(tree: Path) -> bool:
    return any((tree / folder / "libcublas.so").exists() for folder in ("lib64", "lib", "targets/x86_64-linux/lib"))


def _assemble(tree: Path, version: str) -> Path:
    """A CUDA root of links: the installed nvcc tree plus cuBLAS and CCCL from PyPI wheels plus a stub of libcuda."""
    major = version.partition(".")[0]
    suffix = "" if int(major) >= 13 else f"-cu{major}"
    wheels = paths.home() / f"cuda-wheels-{major}"
    if not list(wheels.glob("nvidia/**/libcublas.so.*")):
        print(f"cuBLAS is not in {tree}: fetching the PyPI wheels (0.4 GB) ...", flush=True)
        bound = f">={major}.0,<{int(major) + 1}" if not suffix else ""
        pip(
            "install", "--quiet", "--no-deps", "--target", str(wheels),
            f"nvidia-cublas{suffix}{bound}", f"nvidia-cuda-cccl{suffix}{bound}",
        )  # fmt: skip
    root = paths.home() / f"cuda-root-{version}"
    shutil.rmtree(root, ignore_errors=True)
    library = root / "lib64"
    (library / "stubs").mkdir(parents=True)
    for folder in ("bin", "nvvm"):
        (root / folder).symlink_to(tree / folder)
    _link_tree(tree / "include", root / "include")
    for include in wheels.glob("nvidia/**/include"):
        _link_tree(include, root / "include")
    for source in (*(tree / "lib64").glob("*"), *wheels.glob("nvidia/**/lib/lib*.so.*")):
        _link(source, library / source.name)
    for source in wheels.glob("nvidia/**/lib/lib*.so.*"):
        _link(source, library / (source.name.partition(".so.")[0] + ".so"))
    if not (library / "stubs" / "libcuda.so").exists():
        _stub_driver(library / "stubs" / "libcuda.so")
    target = root / "targets" / "x86_64-linux"
    target.mkdir(parents=True)
    (target / "lib").symlink_to(library)
    (target / "include").symlink_to(root / "include")
    return root


def _link(source: Path, link: Path) -> None:
    if not link.exists() and not link.is_symlink() and link.name != "stubs":
        link.symlink_to(source.resolve())


def _link_tree(source: Path, target: Path) -> None:
    for folder, _, files in os.walk(source, followlinks=True):
        here = target / Path(folder).relative_to(source)
        here.mkdir(parents=True, exist_ok=True)
        for name in files:
            _link(Path(folder) / name, here / name)


def _stub_driver(library: Path) -> None:
    code = "".join(f"int {name}(void) {{ return 999; }}\n" for name in DRIVER_STUBS)
    command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    command.append("-Wl,-soname,libcuda.so.1")
    if subprocess.run(command, input=code.encode(), check=False).returncode != 0:
        raise SetupError("cannot compile the libcuda stub; is the C compiler working?")


def cupy_installed() -> bool:
    return importlib.util.find_spec("cupy") is not None
