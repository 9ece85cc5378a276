#!/bin/sh
# The grid on a machine without a network, from what gpu_pack.sh packed: a synthetic model, ours without plugins against upstream.
# usage: benches/gpu_run.sh PACK OUT      OUT gets results.tgz (a machine's folder of benches/results) and run.log
# Variables: PRESET, EXPERTS, SLOTS, DEPTHS, REPEATS, MINUTES, N_PREDICT, FLAGS, SIDES, WORK (scratch, room for the model; what is
# there already is used again). With ROWS set (by multi_gpu.sh), benches.multi_gpu measures these instead of the grid.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
[ $# -eq 2 ] || { sed -n '2,6s/^# //p' "$0" >&2; exit 2; }
mkdir -p "$2"
pack=$(cd "$1" && pwd) out=$(cd "$2" && pwd)
work=${WORK:-$(mktemp -d)} preset=${PRESET:-full} python=${PYTHON:-python3}
flags=${FLAGS:--ngl 99 -fa on -ctk q8_0 -ctv q8_0 -b 2048 -ub 512 -c 1310720 -np 5 -t 8}
begin=$(date +%s)
say() { echo "[$(date +%T)] $*"; }
exec 3>&1
{
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
  LLAMAMG_COMMIT=$(cat "$work/COMMIT")
  # A CUDA build finds cuBLAS in Python's wheels when the system has none.
  cuda=$("$python" -c 'import glob, sysconfig; print(":".join(glob.glob(sysconfig.get_path("purelib") + "/nvidia/*/lib")))')
  LD_LIBRARY_PATH=$cuda${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  export PYTHONPATH LLAMAMG_HOME LLAMAMG_COMMIT LD_LIBRARY_PATH PYTHONUNBUFFERED=1
  cd "$root"
  "$python" -m llamamg doctor || say "doctor is not content"
  say "writing the model"
  vocab=; [ "$preset" = full ] && vocab="--vocab $work/ggml-vocab-qwen35.gguf"
  # shellcheck disable=SC2086
  [ -f "$work/model-is-whole" ] || "$python" -m llamamg synth "$work/$preset.gguf" --force --preset "$preset" ${EXPERTS:+--experts "$EXPERTS"} ${vocab:-${VOCAB:+--vocab "$VOCAB"}} 2>&1 | tail -n 1
  [ ! -f "$work/$preset.gguf" ] || : >"$work/model-is-whole"
  made="llamamg synth --preset $preset${EXPERTS:+ --experts $EXPERTS}, seed 1"
  say measuring
  set --
  for side in ${SIDES:-off upstream}; do set -- "$@" --side "$side"; done
  status=0
  # shellcheck disable=SC2086
  if [ -n "${ROWS:-}" ]; then
    "$python" -m benches.multi_gpu --rows "$ROWS" --out "$out" --elapsed "$(($(date +%s) - begin))" ${MINUTES:+--minutes "$MINUTES"} \
      --results "$work/results" --synthetic "$made" ${MULTI_ARGS:-} -m "$work/$preset.gguf" $flags || status=$?
  else "$python" -m benches.grid "$@" --together --slots "${SLOTS:-1,5}" --depths "${DEPTHS:-5k,50k,150k}" \
    --repeats "${REPEATS:-2}" --minutes "${MINUTES:-6.5}" --n-predict "${N_PREDICT:-128}" --results "$work/results" \
    --synthetic "$made" -m "$work/$preset.gguf" $flags || status=$?
  fi
  say "done ($status)"
  [ ! -d "$work/results" ] || [ -n "${ROWS:-}" ] || tar czf "$out/results.tgz" -C "$work/results" .
  echo "$status" >"$work/status"
} 2>&1 | tee "$out/run.log" >&3
exit "$(cat "$work/status" 2>/dev/null || echo 1)"
