"""What was measured on: machine, commits, build, model, flags. And a results folder that is either whole or not there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

from llamamg import paths

# An installed copy has no business in its own package folder.
RESULTS = Path(__file__).resolve().parent / "results" if paths.checkout() else Path("llamamg-results")
ABSOLUTE = re.compile(r"(?<![\w./])(?<!:/)~?/(?:[\w.+@=-]+/)+")  # the folders of an absolute path; addresses stay
MAX_HASHED = 4 << 30  # bytes; a larger synthetic model is known by how it was generated
PACKAGES = ("llama_cpp_python", "numpy", "uvicorn", "uvloop", "httptools", "starlette", "orjson", "cffi", "pluggy")
ENVIRONMENT = re.compile(r"^(LLAMA|GGML|LLAMAMG|OMP|GOMP|CUDA|NVIDIA|NCCL|PYTHON)")


class ResultsError(RuntimeError):
    """The results cannot be written; the text says what to do."""


# -- what it ran on


def machine() -> dict[str, Any]:
    """CPU, memory, operating system and GPUs."""
    return {
        "cpu": _cpu_name(),
        "n_cpus": os.cpu_count(),
        "n_cpus_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(_memory_bytes() / 2**30, 1),
        "kernel": platform.release(),
        "system": platform.system(),
        "gpus": _gpus(),
        "gpu_links": _links(),
        **_survey(),
    }


def _survey() -> dict[str, Any]:
    """What `llamamg doctor --devices --json` found, from the file that $LLAMAMG_SURVEY names: measuring it takes the devices."""
    path = os.environ.get("LLAMAMG_SURVEY")
    if not path:
        return {}
    try:
        found = json.loads(Path(path).read_text())["survey"]
    except (OSError, ValueError, KeyError) as error:
        raise ResultsError(
            f"$LLAMAMG_SURVEY is {path}, which is no output of `llamamg doctor --devices --json` ({error}): write it anew, "
            "or unset the variable"
        ) from error
    return {"survey": scrubbed(found)}


def machine_name(facts: Mapping[str, Any]) -> str:
    """A folder name for a kind of machine: GPUs if it has any, else CPU and number of cores."""
    gpus = facts.get("gpus") or []
    text = f"{len(gpus)}x{gpus[0]['name']}" if gpus else f"{facts['cpu']}-{facts['n_cpus_usable']}c"
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def software() -> dict[str, Any]:
    """Our commit, Python and the packages that are on the path of a request."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = ""
    told = os.environ.get("LLAMAMG_COMMIT", "")  # a copy has no git, or one that knows an older state
    return {
        "commit": told or _git("rev-parse", "HEAD"),
        "dirty": not told and bool(_git("status", "--porcelain", "--untracked-files=no")),
        "python": platform.python_version(),
        "packages": versions,
        "environment": {k: scrubbed(v) for k, v in sorted(os.environ.items()) if ENVIRONMENT.match(k)},
    }


def build(folder: Path) -> dict[str, Any]:
    """BUILD_INFO.json of a build; paths left out. {} when it has none."""
    try:
        info = json.loads((folder / "BUILD_INFO.json").read_text())
    except (OSError, ValueError):
        return {}
    return dict(info) if isinstance(info, dict) else {}


def model(path: Path, synthetic: str | None = None) -> dict[str, Any]:
    """Name, size and hash of a model file; a large one that was generated has `synthetic`, its parameters, instead.

    $LLAMAMG_SYNTHETIC says how it was generated where the caller does not.
    """
    synthetic = synthetic or os.environ.get("LLAMAMG_SYNTHETIC") or None
    if synthetic is not None and path.stat().st_size > MAX_HASHED:
        return {"file": path.name, "bytes": path.stat().st_size, "synthetic": synthetic}
    with path.open("rb") as file:
        digest = _digest(file)
    found = {"file": path.name, "bytes": path.stat().st_size, "sha256": digest.hexdigest()}
    return found if synthetic is None else {**found, "synthetic": synthetic}


def everything(**more: Any) -> dict[str, Any]:
    """The record that every result carries; `more` has what only the bench knows (flags, build, model)."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "software": software(),
        "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else [],
        "command": [Path(sys.argv[0]).name, *without_paths(sys.argv[1:])],
        **more,
    }


def without_paths(arguments: Sequence[str]) -> list[str]:
    """A command line as it may be published: files by their name only."""
    return [Path(word).name if word.startswith(("/", "~")) else word for word in arguments]


def scrubbed(value: Any) -> Any:
    """The same text, list or dict as it may be published: absolute paths by their last part only."""
    if isinstance(value, str):
        return ABSOLUTE.sub("", value)
    if isinstance(value, Mapping):
        return {key: scrubbed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [scrubbed(item) for item in value]
    return value


# -- where it goes


class ResultFolder:
    """`with ResultFolder("serve-rate") as folder:` files written into `folder.path` appear under results only at the end.

    An exception, Ctrl-C included, leaves nothing behind.
    """

    def __init__(self, what: str, root: Path | None = None, name: str | None = None) -> None:
        self._root = (root or RESULTS) / (name or machine_name(machine()))
        self._what = what
        self.path = Path()  # while inside the with block
        self.final = Path()  # after it

    def __enter__(self) -> ResultFolder:
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            self.path = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=self._root))
        except OSError as error:
            raise ResultsError(
                f"results cannot be written to {self._root} ({error.strerror}); choose another folder with --results"
            ) from error
        return self

    def write(self, name: str, value: Any) -> None:
        """Write a value as JSON, without the folders of this machine."""
        (self.path / name).write_text(json.dumps(scrubbed(value), indent=1, allow_nan=False) + "\n")

    def text(self, name: str, text: str) -> None:
        """Write a text file."""
        (self.path / name).write_text(text)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            with contextlib.suppress(OSError):  # a machine that has other results keeps its folder
                self._root.rmdir()
            return
        self.path.chmod(0o755)
        day = datetime.now(timezone.utc).strftime("%Y-%m-%d")
        n = 1
        while True:
            self.final = self._root / (f"{day}-{self._what}" + (f"-{n}" if n > 1 else ""))
            try:
                self.path.rename(self.final)  # fails on a folder that is not empty, so nothing is overwritten
                return
            except OSError:
                if not self.final.exists():
                    raise
                n += 1


# -- small readers


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


def _gpus() -> list[dict[str, Any]]:
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        return [_gpu(pynvml, i, driver) for i in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, index: int, driver: Any) -> dict[str, Any]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(function: str, *arguments: Any) -> Any:
        try:
            value = getattr(nvml, function)(handle, *arguments)
        except nvml.NVMLError:
            return None
        return value.decode() if isinstance(value, bytes) else value

    memory = ask("nvmlDeviceGetMemoryInfo")
    return {
        "name": ask("nvmlDeviceGetName"),
        "driver": driver.decode() if isinstance(driver, bytes) else driver,
        "memory_gib": round(memory.total / 2**30, 1) if memory else None,
        "pcie_generation_max": ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        "pcie_width_max": ask("nvmlDeviceGetMaxPcieLinkWidth"),
        "pcie_generation": ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        "pcie_width": ask("nvmlDeviceGetCurrPcieLinkWidth"),
        "power_limit_w": (ask("nvmlDeviceGetPowerManagementLimit") or 0) / 1000,
    }


def _links() -> list[dict[str, Any]]:
    """How each two GPUs are connected: the nearest thing both hang on, and active NVLinks between them."""
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]

        pynvml.nvmlInit()
    except Exception:  # no package, no driver: nothing can be asked
        return []
    names = {0: "same board", 10: "PCIe switch", 20: "PCIe switches", 30: "host bridge", 40: "NUMA node", 50: "system"}
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        found = []
        for a, first in enumerate(handles):
            for b in range(a + 1, len(handles)):
                try:
                    level = pynvml.nvmlDeviceGetTopologyCommonAncestor(first, handles[b])
                except pynvml.NVMLError:
                    level = None
                found.append({"gpus": [a, b], "path": names.get(level), "nvlinks": _nvlinks(pynvml, first, handles[b])})
        return found
    finally:
        pynvml.nvmlShutdown()


def _nvlinks(nvml: Any, first: Any, second: Any) -> int | None:
    try:
        bus, n = nvml.nvmlDeviceGetPciInfo(second).busId, 0
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            if nvml.nvmlDeviceGetNvLinkState(first, link):
                n += nvml.nvmlDeviceGetNvLinkRemotePciInfo(first, link).busId == bus
        return n
    except nvml.NVMLError:
        return None


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _digest(file: Any) -> Any:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest


def free_port() -> int:
    """A TCP port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
