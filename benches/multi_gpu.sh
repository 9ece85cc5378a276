#!/bin/sh
# Everything several GPUs are measured with, on a machine without a network, from what gpu_pack.sh packed.
# usage: benches/multi_gpu.sh PACK OUT      OUT gets rows.jsonl (a line for each row, at once), results.tgz and run.log
# Variables: ROWS (names, or all), MINUTES (9), SOAK (seconds, 300), OURS (flags of ours, groups on and off alike), PIPELINE_ARGS
# (sizes of `llamamg bench pipeline`), GROUPS_ARGS (added to `llamamg bench groups`), GRID_DEPTHS, DONE (a rows.jsonl whose finished rows are
# left out), TINY=1 (sizes for the micro model), and gpu_run.sh's PRESET, EXPERTS, FLAGS, VOCAB, PYTHON, WORK.
# WORK is kept: a second call on the same machine finds builds and model there.
set -eu
[ $# -eq 2 ] || { sed -n '2,7s/^# //p' "$0" >&2; exit 2; }
ROWS=${ROWS:-all} MINUTES=${MINUTES:-9} WORK=${WORK:-${TMPDIR:-/tmp}/llamamg-multi-gpu}
FLAGS=${FLAGS:--ngl 99 -fa on -ctk q8_0 -ctv q8_0 -b 8192 -ub 512 -t 8}
MULTI_ARGS="--soak ${SOAK:-300}${DONE:+ --done $DONE}${TINY:+ --tiny}"
# More launches of a ubatch wait in the queue than the default has room for.
CUDA_SCALE_LAUNCH_QUEUES=${CUDA_SCALE_LAUNCH_QUEUES:-4x}
export ROWS MINUTES WORK FLAGS MULTI_ARGS CUDA_SCALE_LAUNCH_QUEUES
[ -z "${OURS:-}" ] || export MULTI_OURS="$OURS"
mkdir -p "$WORK"
exec "$(dirname "$0")/gpu_run.sh" "$1" "$2"
