#!/bin/sh
# Pack what a measurement needs on a machine without a network: both builds, a few wheels, the binding, the vocabulary.
# usage: benches/gpu_pack.sh FOLDER [PATCHED_BIN UPSTREAM_BIN]      there, the repository and FOLDER are all that gpu_run.sh takes
# $WHEEL_PYTHON is the Python there (3.12); $WHEELS names what it lacks; $XZ_LEVEL (6) trades size for time. $PYTHON is one in which llamamg is installed.
set -eu
cd "$(dirname "$0")/.."
[ $# -ge 1 ] || { sed -n '2,4s/^# //p' "$0" >&2; exit 2; }
python=${PYTHON:-.venv/bin/python}
home=$("$python" -c 'from llamamg import paths; print(paths.home())')
out=$1 patched=${2:-$home/patched/build/bin} upstream=${3:-$home/upstream/build/bin}
[ -f "$patched/libllamamg.so" ] || { echo "no patched build in $patched: run llamamg build --cuda" >&2; exit 1; }
[ -x "$upstream/llama-server" ] || { echo "no llama-server in $upstream: run llamamg build --upstream --server --cuda" >&2; exit 1; }
mkdir -p "$out"; rm -rf "$out/wheels" "$out"/*.xz
stage=$(mktemp -d); trap 'rm -rf "$stage"' EXIT
mkdir -p "$stage/builds/patched/build/bin" "$stage/builds/upstream/build/bin" "$stage/site"
for flavour in patched upstream; do
  eval "from=\$$flavour"
  # Versioned names are links among themselves; they stay links, so every library is packed once.
  (cd "$from" && tar cf - $(ls | grep -E '^lib.*\.so(\.[0-9]+)*$|^BUILD_INFO.json$|^llama-server$')) | tar xf - -C "$stage/builds/$flavour/build/bin"
  find "$stage/builds/$flavour" -type f -name '*.so*' -exec strip --strip-unneeded {} + 2>/dev/null || true
done
strip "$stage/builds/upstream/build/bin/llama-server"
"$python" - "$stage/site" <<'PY'
import importlib.metadata, importlib.util, pathlib, shutil, sys
site = pathlib.Path(sys.argv[1])
folder = pathlib.Path(importlib.util.find_spec("llama_cpp").origin).parent
shutil.copytree(folder, site / "llama_cpp", ignore=shutil.ignore_patterns("__pycache__", "lib"))
for name in ("llama_cpp_python", "llamamg"):  # versions, and the entry points of the plugins
    for dist in list(importlib.metadata.distributions(name=name))[:1]:  # the one that is imported
        to = site / f"{name}-{dist.version}.dist-info"
        to.mkdir(exist_ok=True)
        for file in ("METADATA", "entry_points.txt"):
            if text := dist.read_text(file) or (dist.read_text("PKG-INFO") if file == "METADATA" else None):
                (to / file).write_text(text)
        if name == "llamamg":  # an editable install may be older than the plugins of this checkout
            try:
                import tomllib
            except ImportError:
                continue
            groups = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"].get("entry-points", {})
            lines = [[f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())] for group, entries in groups.items()]
            (to / "entry_points.txt").write_text("\n".join(sum(lines, [])) + "\n")
PY
vocab=$(find "$home"/*/src/models -name ggml-vocab-qwen35.gguf 2>/dev/null | head -n 1)
[ -n "$vocab" ] && cp "$vocab" "$stage/"
git rev-parse HEAD >"$stage/COMMIT"
# One stream with a dictionary larger than a build: what both builds share is stored once.
tar cf - -C "$stage" . | xz -T1 --lzma2="preset=${XZ_LEVEL:-6},dict=128MiB" >"$out/pack.tar.xz"
version=${WHEEL_PYTHON:-3.12}
# shellcheck disable=SC2086
"$python" -m pip --disable-pip-version-check download -q --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
  -d "$out/wheels" ${WHEELS:-cffi pycparser diskcache gguf orjson httptools starlette uvicorn}
du -sh "$out" >&2
