#!/bin/sh
# Measurements on a machine without a network, from what gpu_pack.sh packed, with a synthetic model.
# usage: benches/gpu_run.sh PACK OUT      OUT gets results.tgz (a machine's folder of benches/results), lines.jsonl and run.log
# STEPS (default grid) of: kernels depth small mixed gate spec grid. Each keeps its result when it is done; TOTAL seconds (default 560) bound all.
# Other variables: PRESET, EXPERTS, JOBS, WORK (scratch, room for the model; what is there already is used again), FLAGS (of the
# servers); of the grid SIDES, SLOTS, DEPTHS (`fit`: the deepest that the time left allows), REPEATS, MINUTES, N_PREDICT;
# DEPTH_FLAGS, SMALL_ARGS, MIXED_SIDES, MIXED_FLAGS; GATE_ARGS (sizes and policies), GATE_FLAGS (slots and context are its own). With ROWS set (by multi_gpu.sh), benches.multi_gpu measures these instead.
set -eu
began=$(date +%s)
root=$(cd "$(dirname "$0")/.." && pwd)
[ $# -eq 2 ] || { sed -n '2,7s/^# //p' "$0" >&2; exit 2; }
mkdir -p "$2"
pack=$(cd "$1" && pwd) out=$(cd "$2" && pwd)
work=${WORK:-$(mktemp -d)} preset=${PRESET:-full} python=${PYTHON:-python3}
flags=${FLAGS:--ngl 99 -fa on -ctk q8_0 -ctv q8_0 -b 2048 -ub 512 -c 1310720 -np 5 -t 8}
made="llamamg synth --preset $preset${EXPERTS:+ --experts $EXPERTS}, seed 1"
say() { echo "[$(date +%T)] $*"; }
left() { echo $((${TOTAL:-560} + began - $(date +%s))); }
step() { # a measurement, ended in time; what it kept is packed at once
  name=$1 && shift
  [ "$(left)" -gt 20 ] || { say "$name: no time left"; failed=1; return; }
  say "$name, $(left) s left"
  timeout -k 10 -s INT "$(left)" "$python" -m "benches.$name" --results "$work/results" "$@" || { say "$name: status $?"; failed=1; }
  [ ! -d "$work/results" ] || tar czf "$out/results.tgz" -C "$work/results" .
}
sides() { for side in "$@"; do printf -- '--side %s ' "$side"; done; }
deepest() { # thousands of tokens for each of five sessions on two sides at 3000 t/s, in steps of five
  k=$(((${1} - 30) * 3 / 10 / 5 * 5)); [ $k -gt 10 ] || k=10; [ $k -lt 50 ] || k=50; echo "${k}k"
}
exec 3>&1
{
  failed=0
  say unpacking
  mkdir -p "$work/site"
  if [ ! -f "$work/unpacked" ]; then
    xz -dc "$pack/pack.tar.xz" | tar xf - -C "$work"
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$work/site" "$pack"/wheels/*.whl
    : >"$work/unpacked"
  fi
  for part in plugins benches native; do ln -sfn "$root/$part" "$work/site/llamamg_$part"; done
  PYTHONPATH=$work/site:$root${PYTHONPATH:+:$PYTHONPATH}
  LLAMAMG_HOME=$work/builds
  LLAMAMG_COMMIT=${LLAMAMG_COMMIT:-$(cat "$work/COMMIT")} # of the code, where it is not what was packed from
  # A CUDA build finds cuBLAS in Python's wheels when the system has none.
  cuda=$("$python" -c 'import glob, sysconfig; print(":".join(glob.glob(sysconfig.get_path("purelib") + "/nvidia/*/lib")))')
  LD_LIBRARY_PATH=$cuda${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  export PYTHONPATH LLAMAMG_HOME LLAMAMG_COMMIT LD_LIBRARY_PATH PYTHONUNBUFFERED=1
  cd "$root"
  "$python" -m llamamg doctor || say "doctor is not content"
  say "writing the model"
  vocab=; [ "$preset" = full ] && vocab="--vocab $work/ggml-vocab-qwen35.gguf"
  # shellcheck disable=SC2086
  [ -f "$work/model-is-whole" ] || "$python" -m llamamg synth "$work/$preset.gguf" --force --preset "$preset" \
    ${EXPERTS:+--experts "$EXPERTS"} --jobs "${JOBS:-$(nproc)}" ${vocab:-${VOCAB:+--vocab "$VOCAB"}} 2>&1 | tail -n 1
  [ -f "$work/$preset.gguf" ] || { say "no model"; exit 1; }
  : >"$work/model-is-whole"
  [ -z "${ROWS:-}" ] || STEPS=rows
  for name in ${STEPS:-grid}; do
    # shellcheck disable=SC2046,SC2086
    case $name in
      kernels) step kernels --device "${KERNELS:-cuda}" ;;
      spec) step spec --cells "${SPEC_CELLS:-forced,never}" --depth "${SPEC_DEPTH:-20000}" --tokens 256 --pairs "${SPEC_PAIRS:-5}" \
        --history 0 --synthetic "$made" -m "$work/$preset.gguf" $flags -np 1 -c 40960 --enable only:spec,qsa ${SPEC_FLAGS:-} ;;
      depth) step qsa_depth -m "$work/$preset.gguf" --synthetic "$made" --scratch "$work" --lines "$out/lines.jsonl" ${DEPTH_FLAGS:-} ;;
      small) say "small, $(left) s left"
        timeout -s INT "$(left)" "$python" -m benches.small_graphs -m "$work/$preset.gguf" ${SMALL_ARGS:--ngl 99 -t 8 --kind q8_0 --qsa 1 --depth 20000 \
          --chunks 0,1,2,16,32,64,128,256,512 --steps 20} --json "$out/small_graphs.json" || failed=1 ;;
      gate)
        step gate --so-far "$out/gate.txt" --synthetic "$made" -m "$work/$preset.gguf" \
          ${GATE_FLAGS:--ngl 99 -fa on -ctk q8_0 -ctv q8_0 -b 2048 -ub 512 -t 8} \
          ${GATE_ARGS:---depth 20000 --prompt 60000 --solo 20000 --short 200 --contexts both --then 4+2 --seconds 24 --alone 300 \
            --block 1024 --policy itl-ratio=2.8,min-share=0.32 --policy itl-target-ms=60 --policy off@6 \
            --separate-policy itl-ratio=1.9,min-share=0.32 --separate-policy itl-ratio=4.8,min-share=0.68} ;;
      mixed) step mixed $(sides ${MIXED_SIDES:-ours off upstream}) --synthetic "$made" ${MIXED_FLAGS:-} -m "$work/$preset.gguf" $flags ;;
      grid)
        depths=${DEPTHS:-5k,50k,150k}; [ "$depths" != fit ] || depths=$(deepest "$(left)")
        step grid $(sides ${SIDES:-off upstream}) --together --slots "${SLOTS:-1,5}" --depths "$depths" --repeats "${REPEATS:-2}" \
          --minutes "${MINUTES:-$(left | awk '{ print $1 / 60 }')}" --n-predict "${N_PREDICT:-128}" --synthetic "$made" \
          -m "$work/$preset.gguf" $flags ;;
      rows)
        say measuring
        "$python" -m benches.multi_gpu --rows "$ROWS" --out "$out" --elapsed "$(($(date +%s) - began))" ${MINUTES:+--minutes "$MINUTES"} \
          --results "$work/results" --synthetic "$made" ${MULTI_ARGS:-} -m "$work/$preset.gguf" $flags || failed=$? ;;
    esac
  done
  say "done ($failed), $(left) s left"
  echo "$failed" >"$work/status"
} 2>&1 | tee "$out/run.log" >&3
exit "$(cat "$work/status" 2>/dev/null || echo 1)"
