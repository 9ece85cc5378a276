"""Load one native build: libllama through llama_cpp's low-level API, libllamamg through cffi."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from llamamg import paths
from llamamg.abi import Abi

LogCallback = Callable[[int, str], None]
LAUNCH_QUEUES = "CUDA_SCALE_LAUNCH_QUEUES"


class LibraryNotFound(RuntimeError):
    """No usable native build; the message says how to get one."""


@dataclass(frozen=True)
class Library:
    """One loaded build. There is one per process: libllama cannot be unloaded."""

    dir: Path
    build_info: dict[str, Any]
    mg: Abi
    llama: ModuleType
    patched: bool
    _keep: list[Any] = field(default_factory=list, repr=False)


_loaded: Library | None = None


def current() -> Library | None:
    """The build this process has loaded."""
    return _loaded


def find(build: Path | None = None) -> Path:
    """The folder of libraries to use: the argument, $LLAMAMG_BUILD, else the patched build. Raises LibraryNotFound."""
    wanted = build or (Path(os.environ["LLAMAMG_BUILD"]) if os.environ.get("LLAMAMG_BUILD") else None)
    if wanted is None:
        folder = paths.build("patched") / "bin"
        if not (folder / "libllamamg.so").is_file():
            raise LibraryNotFound(
                f"no native library in {folder}: run `llamamg build` (or `make serve` in a checkout) to build it"
            )
        return folder
    for folder in (wanted, wanted / "bin", wanted / "build" / "bin", wanted / "lib"):
        if (folder / "libllamamg.so").is_file():
            return folder.resolve()
    raise LibraryNotFound(
        f"{wanted} holds no libllamamg.so: pass a folder written by `llamamg build` or unpacked from its archive"
    )


def load(build: Path | None = None, *, log: LogCallback | None = None) -> Library:
    """Load a build, its backends and libllamamg; later calls return the same Library.

    `log` receives (level, text) of every native log line and takes the interpreter lock each time, decoding included:
    leave it out in a server. Without it warnings and errors go to stderr natively; change that with `mg.set_log`.
    Raises LibraryNotFound when there is no build, RuntimeError when another build is loaded already.
    """
    global _loaded
    folder = find(build)
    if _loaded is not None:
        if _loaded.dir != folder:
            raise RuntimeError(
                f"{_loaded.dir} is loaded already; one process can use one build, start another for {folder}"
            )
        return _loaded
    _lengthen_launch_queues()
    # libllamamg pulls in libllama and ggml by $ORIGIN; it comes first so that our log sink sees the backends load.
    mg = Abi(folder / "libllamamg.so")
    mg.set_log("warn")
    ggml = ctypes.CDLL(str(folder / "libggml.so"))
    ggml.ggml_backend_load_all_from_path.argtypes = [ctypes.c_char_p]
    ggml.ggml_backend_load_all_from_path.restype = None
    ggml.ggml_backend_load_all_from_path(str(folder).encode())
    llama = _import_llama_cpp(folder)
    if hasattr(mg.lib, "mg_fatal_install"):  # libraries from before it end with a backtrace
        mg.lib.mg_fatal_install()
    # Importing llama_cpp installs a Python log callback: every native log line would take the interpreter lock.
    mg.set_log("warn")
    keep: list[Any] = []
    if log is not None:
        keep.append(_install(llama, log))
    llama.llama_backend_init()
    info = mg.build_info()
    _loaded = Library(folder, info, mg, llama, bool(info.get("patched")), keep)
    return _loaded


def _lengthen_launch_queues() -> None:
    """Ask CUDA for launch queues four times as long, unless the user chose; it reads the variable once, at its start.

    A stage of a pipeline has more kernels than the usual queue of 1024 takes, so the host would be held up in one device's
    queue while the next device runs dry. Empty means CUDA's own length.
    """
    if not os.environ.setdefault(LAUNCH_QUEUES, "4x"):
        del os.environ[LAUNCH_QUEUES]


def _import_llama_cpp(folder: Path) -> ModuleType:
    loaded = sys.modules.get("llama_cpp.llama_cpp")
    if loaded is not None:
        origin = Path(getattr(loaded, "_base_path", folder)).resolve()
        if origin != folder.resolve():
            raise RuntimeError(
                f"llama_cpp was imported before with the library in {origin}; call llamamg.library.load first"
            )
        return loaded
    os.environ["LLAMA_CPP_LIB_PATH"] = str(folder)
    try:
        import llama_cpp.llama_cpp as module
    except ModuleNotFoundError as missing:
        raise LibraryNotFound(
            "the Python package llama-cpp-python is not installed: run `llamamg build`, which installs the pinned version"
        ) from missing
    return module  # type: ignore[no-any-return]


def _install(llama: ModuleType, log: LogCallback) -> Any:
    def forward(level: int, text: bytes, _user_data: object) -> None:
        log(level, text.decode("utf-8", "replace"))

    callback = llama.llama_log_callback(forward)
    llama.llama_log_set(callback, ctypes.c_void_p(0))
    return callback
