#!/usr/bin/env bash
# Real packages of vLLM on the CPU platform, a part for each release and each way that it can be configured. Half an hour
# on two cores.
#   bash tests/integration/vllm_on_cpu.sh SOURCES OUT [PART...]
# SOURCES: a folder of unpacked source packages, vllm-0.26.0 and so on. OUT: the record's file. PART: these alone, such
# as simple-0.26.0. python3 is one that has torch, pytest and what vLLM imports, and finds kvswap built without CUDA.
set -uo pipefail
sources=$(realpath "$1") out=$2
[ ! -d "$out" ] || { echo "$out is a folder; OUT is the record's file" >&2; exit 2; }
shift 2
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export HF_HUB_OFFLINE=1 HOME=$work
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # more of torch's threads spin: beside other work ten times as slow
ranks="--ranks 2 --spec KVSwapTieringOffloadingSpec"

# Name, releases, options of vllm_package.py.
table() {
  cat <<TABLE
block-first;0.26.0 0.30.0 0.31.0 0.32.0 0.33.0;--block-first
block-first-ranks;0.33.0;--block-first $ranks
block-first-sync-loads;0.33.0;--block-first --sync-loads
overlap-block-first;0.26.0 0.30.0 0.31.0 0.32.0 0.33.0;--overlap --block-first --async-scheduling
overlap-block-first-ranks;0.33.0;--overlap --block-first --async-scheduling $ranks
codec;0.26.0 0.33.0;--codec exact --gpu-blocks 600
codec-block-first;0.26.0 0.33.0;--codec exact --gpu-blocks 600 --block-first --overlap --async-scheduling
codec-hybrid;0.26.0 0.33.0;--codec exact --gpu-blocks 1200 --hybrid
codec-mla;0.26.0 0.33.0;--codec exact --gpu-blocks 600 --mla
codec-overlap-ranks;0.26.0 0.30.0 0.31.0 0.32.0 0.33.0;--codec exact --gpu-blocks 600 --overlap --async-scheduling $ranks
hybrid;0.26.0 0.33.0;--hybrid
lend;0.30.0 0.31.0 0.32.0 0.33.0;--lend --gpu-blocks 200 --spec KVSwapTieringOffloadingSpec
lend-codec;0.30.0;--lend --codec mxfp8 --gpu-blocks 300 --spec KVSwapTieringOffloadingSpec
lend-codec-ranks;0.33.0;--lend --codec exact --gpu-blocks 300 $ranks
lend-ranks;0.33.0;--lend --gpu-blocks 120 $ranks
mla;0.26.0;--mla
mla-ranks;0.33.0;--mla $ranks
mla-share;0.30.0 0.33.0;--mla --share $ranks
mla-share-codec;0.30.0 0.33.0;--mla --share --codec exact --gpu-blocks 600 $ranks
mla-share-sleep;0.33.0;--mla --share --sleep $ranks
overlap;0.26.0;--overlap
overlap-async;0.33.0;--overlap --async-scheduling
overlap-async-hybrid;0.26.0;--overlap --async-scheduling --hybrid
overlap-async-hybrid-fail;0.33.0;--overlap --async-scheduling --hybrid --policy fail
overlap-async-ranks;0.33.0;--overlap --async-scheduling $ranks
own-tests;0.26.0 0.33.0;
package;0.26.0 0.33.0;
ranks;0.26.0 0.33.0;$ranks
ranks-sleep;0.26.0 0.33.0;--sleep $ranks
replicas;0.30.0 0.33.0;--replicas
replicas-codec;0.33.0;--replicas --codec exact
replicas-lend;0.33.0;--replicas --lend
replicas-lend-codec;0.33.0;--replicas --lend --codec exact --ranks 2
replicas-ranks;0.33.0;--replicas --ranks 2
simple;0.26.0 0.33.0;--simple
sleep;0.26.0 0.33.0;--sleep
stock;0.33.0;--stock
sync-loads;0.33.0;--sync-loads
tiering;0.33.0;--spec KVSwapTieringOffloadingSpec
TABLE
}

wanted=" $* "
status=0 ran=0
: >"$out"
while IFS=';' read -r name releases options; do
  for release in $releases; do
    part=$name-$release
    [ $# = 0 ] || [[ $wanted == *" $part "* ]] || continue
    ran=$((ran + 1))
    program=vllm_package.py
    [ "$name" = own-tests ] && program=vllm_own_tests.py
    echo "== $part" >>"$out"
    # shellcheck disable=SC2086  (options are words)
    timeout 400 python3 -P -W ignore "$here/$program" "$sources/vllm-$release" $options >"$work/log" 2>"$work/errors" </dev/null
    code=$?
    grep -vE '^(INFO|WARNING|FAILED|=+ short test summary)' "$work/log" | cat -s >>"$out"
    [ $code = 0 ] || { tail -n 20 "$work/errors" >>"$out"; echo "exit status $code" >>"$out"; status=1; }
    echo >>"$out"
    echo "$part: exit status $code after $SECONDS s"
  done
done < <(table)
[ $# = 0 ] || [ $ran = $# ] || { echo "of $# parts that were asked for, $ran are in the table above" >&2; exit 2; }
exit $status
