#!/bin/sh
# Builds fuzz_files.c with libFuzzer and runs it: tests/random/fuzz/run.sh [SECONDS]. New inputs go to
# a folder of their own.
set -e
cd "$(dirname "$0")/../../.."
work=$(mktemp -d)
mkdir "$work/corpus"
clang -DFUZZING -std=c11 -D_GNU_SOURCE -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined -Icsrc \
  tests/random/fuzz/fuzz_files.c $(find csrc -name "*.c" -not -path "csrc/py/*") -pthread -ldl -o "$work/fuzz_files"
exec "$work/fuzz_files" -max_total_time="${1:-600}" -max_len=53249 -print_final_stats=1 "$work/corpus" tests/random/fuzz/corpus
