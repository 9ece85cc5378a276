"""Checks the QSA kernels (built from qsa_standalone.cu) against float64, then times them. Needs a GPU and cupy.

nvcc -arch=native -std=c++17 -O3 -use_fast_math -extended-lambda -I../../native/src -Xcompiler -fPIC -shared \\
    qsa_standalone.cu -o libqsa.so
python check.py ./libqsa.so [--small] [--no-time] [--no-check] [--json FILE]
compute-sanitizer --tool memcheck --kernel-name kns=qsa python check.py ./libqsa.so --small
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from typing import Any

import cupy as cp
import formats as fm
import numpy as np

RESULTS: dict[str, Any] = {"checks": [], "times": []}
LIB: Any = None
RNG = cp.random.default_rng(1)
HOST = np.random.default_rng(1)
ROWS = 128  # tokens that share the selection workspace
P, N, Z, F = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_float


def load(path: str) -> None:
    global LIB
    LIB = ctypes.CDLL(path)
    LIB.qsa_attn.argtypes = [P, Z, Z, P, Z, P, Z, P, P, P, P] + [N] * 10 + [F, N, P]
    LIB.qsa_pool.argtypes = [P, Z, N, P, P, P] + [N] * 5 + [F, F, P]
    LIB.qsa_select.argtypes = [P, Z, Z, P, P, P, P] + [N] * 9 + [P]


def must(rc: int) -> None:
    if rc:
        raise RuntimeError(f"kernel launch failed: {rc}")


def stream() -> int:
    return cp.cuda.get_current_stream().ptr


def note(name: str, ok: bool, **figures: Any) -> None:
    RESULTS["checks"].append({"name": name, "ok": bool(ok), **figures})
    text = " ".join(f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in figures.items())
    print(f"{'ok  ' if ok else 'FAIL'} {name} {text}", flush=True)


def rel(out: Any, ref: Any) -> float:
    return float(cp.linalg.norm(out.astype(cp.float64) - ref) / cp.linalg.norm(ref))


def worst(out: Any, ref: Any) -> float:
    """Largest error of a token [T, ...] over its largest value: what tests/native/test_qsa_ops.py bounds."""
    error, size = abs(out.astype(cp.float64) - ref).reshape(len(ref), -1), abs(ref).reshape(len(ref), -1)
    return float((error.max(axis=1) / size.max(axis=1)).max())


def n_split_of(hkv: int, t: int) -> int:
    return max(1, min(33, -(-264 // (hkv * t))))


# ---- ATTN ----


class Attn:
    def __init__(
        self,
        d: int,
        h: int,
        hkv: int,
        kt: int,
        vt: int,
        kv_size: int,
        n_stream: int,
        r: int,
        ntop: int,
        force_cc: int = 0,
    ) -> None:
        self.d, self.h, self.hkv, self.kt, self.vt = d, h, hkv, kt, vt
        self.kv_size, self.n_stream, self.r, self.ntop, self.force_cc = kv_size, n_stream, r, ntop, force_cc
        self.k = fm.random_rows(cp, kt, kv_size * n_stream, d * hkv, RNG)
        self.v = fm.random_rows(cp, vt, kv_size * n_stream, d * hkv, RNG)
        self.scale = d**-0.5

    def tokens(self, idx: Any, shared: float = 0.0) -> None:
        """Tokens at global cells idx (host array), random lists (`shared`: part kept from the token before)."""
        self.t = len(idx)
        self.idx_host = np.asarray(idx, dtype=np.int64)
        self.idx = cp.asarray(self.idx_host)
        self.list_host = np.full((self.t, self.ntop), -1, dtype=np.int32)
        last: Any = None
        for i, x in enumerate(self.idx_host):
            n = (int(x) % self.kv_size + 1) // self.r
            if n <= self.ntop:
                self.list_host[i, :n] = np.arange(n)
                continue
            if last is not None and shared:
                keep = HOST.choice(last, int(shared * self.ntop), replace=False, shuffle=False)
                rest = np.setdiff1d(HOST.choice(n, 2 * self.ntop, replace=False, shuffle=False), keep)
                pick = np.concatenate([keep, HOST.permutation(rest)[: self.ntop - len(keep)]])
            else:
                pick = HOST.choice(n, self.ntop, replace=False, shuffle=False)
            last = pick
            self.list_host[i] = np.sort(pick)
        self.list = cp.asarray(self.list_host)
        # as beside a gate; twice the unit size, for weights that differ
        self.q = 2 * RNG.standard_normal((self.t, self.h, 2, self.d), dtype=cp.float32)[:, :, 0]
        self.n_split = n_split_of(self.hkv, self.t)
        rows = self.t * self.h
        self.out = cp.full((self.t, self.h, self.d), cp.nan, dtype=cp.float32)
        self.part = cp.full((self.n_split * rows * (self.d + 2),), cp.nan, dtype=cp.float32)

    def run(self) -> None:
        must(
            LIB.qsa_attn(
                self.q.data.ptr,
                self.q.strides[1] // 4,
                self.q.strides[0] // 4,
                self.k.data.ptr,
                self.k.shape[1],
                self.v.data.ptr,
                self.v.shape[1],
                self.idx.data.ptr,
                self.list.data.ptr,
                self.out.data.ptr,
                self.part.data.ptr,
                self.kt,
                self.vt,
                self.t,
                self.h,
                self.hkv,
                self.d,
                self.ntop,
                self.r.bit_length() - 1,
                self.n_split,
                self.kv_size,
                self.scale,
                self.force_cc,
                stream(),
            )
        )

    def reference(self) -> Any:
        out = cp.empty((self.t, self.h, self.d), dtype=cp.float64)
        for i, x in enumerate(self.idx_host):
            c = int(x) % self.kv_size
            n = (c + 1) // self.r
            blocks = self.list_host[i][self.list_host[i] >= 0]
            cells = (blocks[:, None] * self.r + np.arange(self.r)).reshape(-1)
            cells = np.concatenate([cells, np.arange(n * self.r, c + 1)]) + (int(x) - c)
            rows = cp.asarray(cells)
            k = fm.values(cp, self.kt, self.k[rows]).reshape(-1, self.hkv, self.d)
            v = fm.values(cp, self.vt, self.v[rows]).reshape(-1, self.hkv, self.d)
            q = self.q[i].astype(cp.float64).reshape(self.hkv, -1, self.d)
            s = cp.einsum("ghd,cgd->ghc", q, k) * self.scale
            p = cp.exp(s - s.max(axis=2, keepdims=True))
            p /= p.sum(axis=2, keepdims=True)
            out[i] = cp.einsum("ghc,cgd->ghd", p, v).reshape(self.h, self.d)
        return out


def edge_cells(kv_size: int, n_stream: int, r: int, ntop: int, n: int) -> Any:
    """Positions that hit every tail, the first selection, and streams of different depth."""
    c = [0, 1, 2, 3, r - 1, r, ntop * r - 1, ntop * r, ntop * r + r - 2, ntop * r + r - 1, ntop * r + r, kv_size - 1]
    c += list(HOST.integers(0, kv_size, 144))
    c = [x for x in c if x < kv_size]
    HOST.shuffle(c)
    return np.array([x + kv_size * HOST.integers(0, n_stream) for x in c[:n]], dtype=np.int64)


def check_attn(small: bool) -> None:
    direct = [(fm.Q8_0, fm.Q8_0), (fm.F16, fm.F16), (fm.BF16, fm.BF16)]
    others = [(t, t) for t in (fm.F32, fm.Q5_1, fm.Q5_0, fm.Q4_1, fm.Q4_0, fm.IQ4_NL)]
    mixed = [(fm.Q8_0, fm.F16), (fm.F16, fm.Q4_0), (fm.Q8_0, fm.Q5_1)]
    shapes = [(256, 24, 2), (64, 4, 2), (128, 8, 2), (128, 40, 2)]
    for d, h, hkv in shapes:
        for kt, vt in direct + others + mixed:
            for force_cc in (0, 750):
                if small and (d == 128 or (d, kt) == (256, fm.F32)):
                    continue
                ntop = 16 if small else 512 if d == 256 else 64
                kv_size = 512 if small else 8192
                x = Attn(d, h, hkv, kt, vt, kv_size, 3, 4, ntop, force_cc)
                norm, most, same = 0.0, 0.0, True
                for n in (3,) if small else (1, 9, 76):
                    x.tokens(edge_cells(kv_size, 3, 4, ntop, n))
                    x.run()
                    first = x.out.copy()
                    x.out.fill(cp.nan)
                    x.part.fill(cp.nan)
                    x.run()
                    same &= bool((first.view(cp.uint32) == x.out.view(cp.uint32)).all())
                    if bool(cp.isnan(x.out).any()):
                        most = float("nan")
                        break
                    ref = x.reference()
                    norm, most = max(norm, rel(x.out, ref)), max(most, worst(x.out, ref))
                name = f"attn D={d} H={h}/{hkv} {fm.NAMES[kt]}/{fm.NAMES[vt]} {'sm75' if force_cc else 'mma'}"
                note(name, most < 1e-3 and same, worst=most, rel=norm, same_bits=same)
    for r, ntop in ((2, 1024), (8, 256), (16, 128), (4, 1024)):
        if small:
            ntop = 16
        x = Attn(256, 24, 2, fm.Q8_0, fm.Q8_0, 512 if small else 8192, 2, r, ntop)
        x.tokens(edge_cells(x.kv_size, 2, r, ntop, 20))
        x.run()
        err = worst(x.out, x.reference())
        note(f"attn r={r} ntop={ntop}", err < 1e-3, worst=err)
    # a token alone and inside a batch: cut differently, nearly the same numbers
    x = Attn(256, 24, 2, fm.Q8_0, fm.Q8_0, 512 if small else 8192, 2, 4, 16 if small else 512)
    x.tokens(edge_cells(x.kv_size, 2, 4, x.ntop, 70))
    x.run()
    alone = Attn.__new__(Attn)
    alone.__dict__.update(x.__dict__)
    most = 0.0
    for i in range(0, x.t, 7):
        alone.t, alone.n_split = 1, n_split_of(2, 1)
        alone.q, alone.idx, alone.list = x.q[i : i + 1], x.idx[i : i + 1], x.list[i : i + 1]
        alone.out = cp.full((1, x.h, x.d), cp.nan, dtype=cp.float32)
        alone.part = cp.full((33 * x.h * (x.d + 2),), cp.nan, dtype=cp.float32)
        alone.run()
        most = max(most, worst(alone.out, x.out[i : i + 1].astype(cp.float64)))
    note("attn T=1 against T=70", most < 1e-3, worst=most)


# ---- POOL ----


def pool_reference(x: Any, r: int, gamma: Any, pos: Any, n_rot: int, base: float) -> Any:
    d = x.shape[1]
    y = x.reshape(-1, r, d).mean(axis=1)
    y = y / cp.sqrt((y * y).mean(axis=1, keepdims=True) + 1e-6) * gamma.astype(cp.float64)
    half = n_rot // 2
    theta = pos[:, None].astype(cp.float64) * base ** (-2.0 * cp.arange(half) / n_rot)
    a, b = y[:, :half].copy(), y[:, half:n_rot].copy()
    y[:, :half] = a * cp.cos(theta) - b * cp.sin(theta)
    y[:, half:n_rot] = a * cp.sin(theta) + b * cp.cos(theta)
    return y


def check_pool(small: bool) -> None:
    for d in (128, 64, 256):
        for kind in fm.NAMES:
            for r, kv_size in ((4, 512), (2, 512)) if small else ((4, 4096), (16, 4096), (4, 262144)):
                if kv_size == 262144 and (kind not in (fm.F16, fm.Q8_0) or d != 128):
                    continue
                n_stream = 3 if kv_size < 262144 else 1
                raw = fm.random_rows(cp, kind, kv_size * n_stream, d, RNG)
                gamma = 1 + 0.1 * RNG.standard_normal((d,), dtype=cp.float32)
                nb = kv_size // r
                pooled = cp.full((nb * n_stream, d), cp.nan, dtype=cp.float32)
                ranges = [(2, 5, nb), (0, 0, 7), (1, 9, 9)] if n_stream == 3 else [(0, 0, nb)]
                dev = cp.asarray(np.array([(*x, 0) for x in ranges], dtype=np.int32))
                must(
                    LIB.qsa_pool(
                        raw.data.ptr,
                        raw.shape[1],
                        kind,
                        pooled.data.ptr,
                        gamma.data.ptr,
                        dev.data.ptr,
                        len(ranges),
                        d,
                        r.bit_length() - 1,
                        kv_size,
                        64,
                        1e-6,
                        1e7,
                        stream(),
                    )
                )
                written = cp.zeros(nb * n_stream, dtype=bool)
                most = 0.0
                for s, lo, hi in ranges:
                    written[s * nb + lo : s * nb + hi] = True
                    if lo >= hi:
                        continue
                    x = fm.values(cp, kind, raw[s * kv_size + lo * r : s * kv_size + hi * r])
                    ref = pool_reference(x, r, gamma, cp.arange(lo, hi) * r, 64, 1e7)
                    most = max(most, rel(pooled[s * nb + lo : s * nb + hi], ref))
                clean = bool((cp.isnan(pooled).any(axis=1) == ~written).all())
                # at 262144 an F32 angle itself is only good to 0.016 rad
                limit = 3e-5 if kv_size < 5000 else 5e-3
                note(
                    f"pool d={d} r={r} {fm.NAMES[kind]} kv={kv_size}",
                    clean and most < limit,
                    rel=most,
                    only_its_rows=clean,
                )


# ---- SELECT ----


class Select:
    force_cc = 0

    def __init__(self, d: int, h: int, kv_size: int, n_stream: int, ntop: int, r: int = 4) -> None:
        self.d, self.h, self.kv_size, self.n_stream, self.ntop, self.r = d, h, kv_size, n_stream, ntop, r
        self.nb = kv_size // r
        self.pooled = RNG.standard_normal((self.nb * n_stream, d), dtype=cp.float32)

    def tokens(self, idx: Any) -> None:
        self.idx_host = np.asarray(idx, dtype=np.int64)
        self.t = len(self.idx_host)
        self.idx = cp.asarray(self.idx_host)
        self.q = RNG.standard_normal((self.t, self.h, 2, self.d), dtype=cp.float32)[:, :, 0]  # as beside a gate
        self.rows = min(self.t, ROWS)
        self.list = cp.full((self.t, self.ntop), -7, dtype=cp.int32)
        self.keys = cp.full((self.rows * (self.nb + 2048),), 0xFFFFFFFF, dtype=cp.uint32)

    def run(self, what: int = 3) -> None:
        must(
            LIB.qsa_select(
                self.q.data.ptr,
                self.q.strides[1] // 4,
                self.q.strides[0] // 4,
                self.pooled.data.ptr,
                self.idx.data.ptr,
                self.list.data.ptr,
                self.keys.data.ptr,
                self.d,
                self.h,
                self.t,
                self.ntop,
                self.r.bit_length() - 1,
                self.kv_size,
                self.rows,
                what,
                self.force_cc,
                stream(),
            )
        )

    def compare(self) -> tuple[int, int, int]:
        """(tokens whose list is wrong, blocks swapped within 1e-5 of the edge, blocks swapped elsewhere)."""
        lists = self.list.get()
        bad = near = far = 0
        for i, x in enumerate(self.idx_host):
            c = int(x) % self.kv_size
            n = (c + 1) // self.r
            got = lists[i]
            if n <= self.ntop:
                want = np.concatenate([np.arange(n), np.full(self.ntop - n, -1)])
                bad += not np.array_equal(got, want)
                continue
            b0 = (int(x) - c) // self.r
            dots = self.q[i].astype(cp.float64) @ self.pooled[b0 : b0 + n].astype(cp.float64).T
            s = cp.maximum(dots, 0).sum(axis=0).get()
            order = np.lexsort((np.arange(n), -s))[: self.ntop]
            if got.min() < 0 or got.max() >= n or (np.diff(got) <= 0).any():
                bad += 1
                continue
            edge = s[order[-1]]
            swapped = np.setxor1d(got, order)
            close = np.abs(s[swapped] - edge) <= 1e-5 * abs(edge)
            near += int(close.sum())
            far += int((~close).sum())
        return bad, near, far


def check_select(small: bool) -> None:
    big = 512 if small else 65536
    ntop = 16 if small else 512
    for d, h in ((128, 4), (64, 2), (64, 3), (128, 1), (64, 4)):
        x = Select(d, h, big, 3, ntop)
        for n in (1, 20) if small else (1, 5, 16, 17, 70, 150):
            x.tokens(edge_cells(big, 3, 4, ntop, n))
            x.run()
            bad, near, far = x.compare()
            note(f"select d={d} h={h} T={n} random", bad == 0 and far == 0, bad=bad, near_edge=near, wrong=far)
            lists = x.list.copy()
            x.keys.fill(0xFFFFFFFF)
            x.run()
            note(f"select d={d} h={h} T={n} twice", bool((lists == x.list).all()))
            x.force_cc = 750
            x.list.fill(-7)
            x.run()
            note(f"select d={d} h={h} T={n} equals sm75", bool((lists == x.list).all()))
            x.force_cc = 0
            # every token alone: the other kernel, the same bits
            alone = Select.__new__(Select)
            alone.__dict__.update(x.__dict__)
            same = True
            for i in range(n):
                alone.idx, alone.q, alone.t, alone.rows = x.idx[i : i + 1], x.q[i : i + 1], 1, 1
                alone.list = cp.full((1, ntop), -7, dtype=cp.int32)
                alone.run()
                same &= bool((alone.list[0] == lists[i]).all())
            note(f"select d={d} h={h} T={n} equals T=1", same)
    # adversarial keys: exact in F32, so not one block may differ
    for kind in ("integers", "equal", "negative", "huge", "two values", "inf"):
        for n, size in ((1, big), (33, big)) if small else ((1, big), (33, big), (9, 262144)):
            x = Select(128, 4, size, 2, ntop)
            x.tokens(edge_cells(size, 2, 4, ntop, n))
            x.q = RNG.integers(-3, 4, x.q.shape).astype(cp.float32)  # contiguous
            if kind == "integers":
                x.pooled = RNG.integers(-3, 4, x.pooled.shape).astype(cp.float32)
            elif kind == "equal":
                x.pooled[:] = x.pooled[0].round()
            elif kind == "negative":
                x.q = abs(x.q)
                x.pooled = -abs(RNG.integers(0, 4, x.pooled.shape)).astype(cp.float32)
            elif kind == "huge":
                x.pooled = RNG.integers(0, 2, x.pooled.shape).astype(cp.float32)
                x.q = abs(x.q)
                x.pooled[::997] = 1e30
            elif kind == "two values":
                x.pooled[:] = (cp.arange(len(x.pooled)) % 3 == 0)[:, None]
                x.q = abs(x.q)
            else:
                x.q = abs(x.q) + 1
                x.pooled = RNG.integers(0, 2, x.pooled.shape).astype(cp.float32)
                x.pooled[::1001, 5] = cp.inf
            x.run()
            if kind == "inf":  # infinities tie among themselves: lower blocks first
                lists = x.list.get()
                ok = True
                for i, idx in enumerate(x.idx_host):
                    c = int(idx) % x.kv_size
                    m = (c + 1) // 4
                    b0 = (int(idx) - c) // 4
                    infs = np.flatnonzero(np.arange(b0, b0 + m) % 1001 == 0)
                    ok &= m <= ntop or set(infs[:ntop]) <= set(lists[i])
                note(f"select {kind} T={n} cells {size}", ok)
                continue
            bad, near, far = x.compare()
            note(f"select {kind} T={n} cells {size}", bad == near == far == 0, bad=bad, near_edge=near, wrong=far)
    if small:
        x = Select(64, 2, 512, 2, 3)  # so few that there are more groups than listed blocks
        for n in (4, 20):
            x.tokens(edge_cells(512, 2, 4, 3, n))
            x.run()
            bad, near, far = x.compare()
            note(f"select by groups T={n}", bad == 0 and far == 0, bad=bad, near_edge=near, wrong=far)
        return
    x = Select(128, 4, 262144, 2, 512)
    x.tokens(np.array([262143, 262142 + 262144, 2047, 2050, 2051, 2052, 2055, 260000]))
    x.run()
    bad, near, far = x.compare()
    note("select 65536 blocks T=8", bad == 0 and far == 0, bad=bad, near_edge=near, wrong=far)
    x.tokens(np.arange(262144 - 140, 262144))
    x.run()
    bad, near, far = x.compare()
    note("select 65536 blocks T=140", bad == 0 and far == 0, bad=bad, near_edge=near, wrong=far)
    for r, kv in ((2, 8192), (8, 65536), (16, 65536)):
        x = Select(64, 2, kv, 2, 128, r)
        x.tokens(edge_cells(kv, 2, r, 128, 40))
        x.run()
        bad, near, far = x.compare()
        note(f"select r={r}", bad == 0 and far == 0, bad=bad, near_edge=near, wrong=far)


# ---- graphs ----


def check_graph(small: bool) -> None:
    """Layers of SELECT and ATTN captured one behind the other, as in a model: replays give the bits of plain launches."""
    kv_size, ntop = (512, 16) if small else (65536, 512)
    for t in (1, 5, 20):
        layers = []
        for _ in range(3):
            pair = Select(128, 4, kv_size, 2, ntop), Attn(256, 24, 2, fm.Q8_0, fm.Q8_0, kv_size, 2, 4, ntop)
            for x in pair:
                x.tokens(kv_size - 1 - np.arange(t) * 3)
            pair[1].list = pair[0].list  # what SELECT of this layer writes
            layers += pair
        for x in layers:
            x.run()
        cp.cuda.Device().synchronize()
        wanted = [(x.list if isinstance(x, Select) else x.out).copy() for x in layers]
        s = cp.cuda.Stream(non_blocking=True)
        with s:
            s.begin_capture()
            for x in layers:
                x.run()
            graph = s.end_capture()
        same = True
        for _ in range(5):
            for x in layers:
                (x.list if isinstance(x, Select) else x.out).fill(0)
            cp.cuda.Device().synchronize()
            graph.launch(s)
            s.synchronize()
            for x, y in zip(layers, wanted, strict=True):
                got = x.list if isinstance(x, Select) else x.out
                same &= bool((got.view(cp.uint32) == y.view(cp.uint32)).all())
        note(f"graph of 3 layers T={t}", same)


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("library")
    ap.add_argument("--small", action="store_true", help="tiny sizes, for compute-sanitizer")
    ap.add_argument("--no-time", action="store_true", help="checks only")
    ap.add_argument("--no-check", action="store_true", help="times only")
    ap.add_argument("--json", help="write all figures to this file")
    args = ap.parse_args()
    load(args.library)
    if args.small:
        cp.cuda.set_allocator(None)  # one allocation per array, so that memcheck sees its ends
    if not args.no_check:
        for check in (check_graph, check_attn, check_pool, check_select):
            try:
                check(args.small)
            except Exception as e:  # the other kernels are still worth a check
                note(f"{check.__name__} stopped: {e!r}", False)
    if not args.no_time and not args.small:
        import timing

        timing.run(sys.modules[__name__], RESULTS)
    if args.json:
        with open(args.json, "w") as f:
            json.dump(RESULTS, f, indent=1)
    n_bad = sum(not c["ok"] for c in RESULTS["checks"])
    print(f"{len(RESULTS['checks'])} checks, {n_bad} failed")
    return n_bad > 0


if __name__ == "__main__":
    sys.exit(main())
