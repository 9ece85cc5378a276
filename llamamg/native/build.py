"""`llamamg build`: download, patch, configure and compile one llama.cpp tree with libllamamg beside it."""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from llamamg import paths
from llamamg.native import archive, cuda, info, ninja, sdist, series, toolchain, tree
from llamamg.native.sdist import SetupError
from llamamg.native.series import PatchError


@dataclass(frozen=True)
class Plan:
    """What to build and how; `key` changes whenever the result would."""

    flavour: paths.Flavour
    patched: bool
    all_variants: bool
    cuda: bool
    server: bool
    flags: tuple[str, ...]
    jobs: int
    key: str

    @property
    def source(self) -> Path:
        return paths.source(self.flavour)

    @property
    def build(self) -> Path:
        return paths.build(self.flavour)

    @property
    def bin(self) -> Path:
        return self.build / "bin"

    @property
    def targets(self) -> list[str]:
        # With all variants there is one target per CPU family; ggml depends on each of them.
        cpu = [] if self.all_variants else ["ggml-cpu"]
        gpu = ["ggml-cuda"] if self.cuda else []
        tools = ["llama-server", "ggml-rpc-server"] if self.server else []
        return ["ggml", "llama", "ggml-rpc", "llamamg", *cpu, *gpu, *tools]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `llamamg build`."""
    parser.add_argument("--upstream", action="store_true", help="build the same tree unpatched: the A/B baseline")
    parser.add_argument("--server", action="store_true", help="also build this tree's llama-server and ggml-rpc-server")
    gpu = parser.add_mutually_exclusive_group()
    gpu.add_argument(
        "--cuda", action="store_true", default=None, help="build the CUDA backend (default: if a GPU is visible)"
    )
    gpu.add_argument("--no-cuda", dest="cuda", action="store_false", default=None, help="CPU only")
    parser.add_argument(
        "--arch", metavar="LIST", help="CUDA architectures, e.g. 86-real;90-real (default: the visible GPUs')"
    )
    parser.add_argument("--archive", action="store_true", help="build for every CPU family and pack one tarball")
    parser.add_argument("--jobs", type=int, metavar="N", help="parallel compile jobs (default: by cores and memory)")
    parser.add_argument("--verbose", action="store_true", help="show the whole output of CMake and Ninja")


def plan(args: argparse.Namespace) -> Plan:
    """Decide everything before anything is touched. Raises SetupError."""
    patched = not args.upstream
    flavours: dict[tuple[bool, bool], paths.Flavour] = {
        (True, False): "patched",
        (False, False): "upstream",
        (True, True): "patched-archive",
        (False, True): "upstream-archive",
    }
    flavour = flavours[patched, bool(args.archive)]
    before = info.read(paths.build(flavour) / "bin")
    # Without a word on it, what was built before stays built: no flip when the GPU is not visible for once.
    with_cuda = args.cuda if args.cuda is not None else bool(before.get("cuda")) or cuda.gpu_visible()
    if args.cuda is None and with_cuda and cuda.nvcc() is None:
        print(
            "a GPU is visible but nvcc is not: building for CPU only. Install the CUDA toolkit to use the GPU",
            flush=True,
        )
        with_cuda = False
    archs = (args.arch or str(before.get("cuda_architectures") or cuda.architectures())) if with_cuda else ""
    flags = [
        "-DCMAKE_BUILD_TYPE=Release",
        "-DBUILD_SHARED_LIBS=ON",
        "-DGGML_NATIVE=OFF",
        "-DGGML_BACKEND_DL=ON",
        "-DGGML_RPC=ON",
        "-DLLAMA_OPENSSL=OFF",
        "-DLLAMA_BUILD_UI=OFF",
        "-DLLAMA_USE_PREBUILT_UI=OFF",
        "-DLLAMA_BUILD_NUMBER=0",
        f"-DLLAMA_BUILD_COMMIT={sdist.read_upstream().commit}",
        f"-DGGML_CUDA={'ON' if with_cuda else 'OFF'}",
        *(["-DGGML_CPU_ALL_VARIANTS=ON"] if args.archive else toolchain.cpu_flags()),
    ]
    return Plan(
        flavour=flavour,
        patched=patched,
        all_variants=bool(args.archive),
        cuda=with_cuda,
        server=bool(args.server or before.get("server")),
        flags=(*flags, *([f"-DCMAKE_CUDA_ARCHITECTURES={archs}"] if with_cuda else [])),
        jobs=args.jobs or toolchain.jobs(),
        key=input_key(patched, flags, archs),
    )


def input_key(patched: bool, flags: list[str], archs: str = "") -> str:
    """Hash of everything a build is made from: pin, patch queue, our sources, options."""
    native = paths.native()
    files = [native / "UPSTREAM", native / "CMakeLists.txt", *sorted((native / "src").glob("*"))]
    if patched:
        files += [series.folder() / "series", *(series.folder() / name for name in series.names())]
    digest = hashlib.sha256(json.dumps([patched, flags, archs]).encode())
    for file in files:
        digest.update(file.name.encode() + b"\0" + (file.read_bytes() if file.is_file() else b"missing") + b"\0")
    return digest.hexdigest()


def up_to_date(wanted: Plan) -> bool:
    built = info.read(wanted.bin)
    complete = (wanted.bin / "libllamamg.so").is_file() and (
        not wanted.server or (wanted.bin / "llama-server").is_file()
    )
    return built.get("key") == wanted.key and complete


def build(wanted: Plan, *, verbose: bool = False) -> Path:
    """Build what is missing and return the folder of libraries. Raises SetupError, PatchError."""
    upstream = sdist.read_upstream()
    with _lock():
        sdist.ensure_binding(upstream)
        if up_to_date(wanted):
            return wanted.bin
        compilers = toolchain.compilers()
        pristine = paths.source("upstream")
        if not (pristine / ".llamamg-sdist").is_file():
            sdist.unpack(sdist.fetch(upstream), upstream, pristine)
        patches = series.read() if wanted.patched else []
        if wanted.patched:
            tree.sync(pristine, wanted.source, patches)
        wanted.build.mkdir(parents=True, exist_ok=True)
        # An interrupted build must not look finished.
        (wanted.bin / info.FILE).unlink(missing_ok=True)
        facts = info.collect(wanted, upstream, patches, compilers)
        literal = wanted.build / "mg_build_info.inc"
        literal.write_text(info.literal(facts))
        ninja.configure(wanted.build, _cmake_flags(wanted, literal), verbose=verbose)
        ninja.compile(wanted.build, wanted.targets, wanted.jobs, label=wanted.flavour, verbose=verbose)
        info.write(wanted.bin, facts)
    return wanted.bin


def _cmake_flags(wanted: Plan, literal: Path) -> list[str]:
    tools = "ON" if wanted.server else "OFF"
    flags = [flag for flag in wanted.flags if not flag.startswith("-DCMAKE_CUDA_ARCHITECTURES=")]
    if wanted.cuda:
        archs = next(flag for flag in wanted.flags if flag.startswith("-DCMAKE_CUDA_ARCHITECTURES="))
        flags += cuda.cmake_flags(archs.partition("=")[2])
    else:
        # CMake remembers: a build folder that once had CUDA must forget where it was.
        flags.append("-DLLAMAMG_RPATH=")
    return [
        *flags,
        f"-DLLAMAMG_TREE={wanted.source}",
        f"-DLLAMAMG_BUILD_INFO={literal}",
        *(f"-DLLAMA_BUILD_{part}={tools}" for part in ("COMMON", "TOOLS", "SERVER")),
        *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("TESTS", "EXAMPLES", "APP", "MTMD")),
    ]


@contextmanager
def _lock() -> Iterator[None]:
    """One build at a time per home: two would write the same tree."""
    paths.home().mkdir(parents=True, exist_ok=True)
    with (paths.home() / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print("waiting for another `llamamg build` to finish ...", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run(args: argparse.Namespace) -> int:
    """`llamamg build`. Returns the exit status; failures are sentences on stderr."""
    # Ninja must not outlive us when a service manager or CI stops the build.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        wanted = plan(args)
        fresh = up_to_date(wanted)
        folder = build(wanted, verbose=bool(args.verbose))
        print(f"{'up to date' if fresh else 'built'}: {folder}")
        if args.archive:
            print(f"packed: {archive.pack(folder, info.read(folder), paths.home() / 'archive')}")
    except (SetupError, PatchError) as error:
        print(f"llamamg build: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nllamamg build: interrupted; run it again to go on where it stopped", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="llamamg build", description=__doc__)
    add_arguments(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    return run(parse(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
