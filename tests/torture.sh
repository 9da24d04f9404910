#!/usr/bin/env bash
# Runs the torture suite N times (10), each time with another seed; stops at the first failure, which says how to replay it. The seeds
# are FIRST, FIRST + 1 and so on; FIRST is the time by default. `torture.sh [N [FIRST]]`
set -euo pipefail
cd "$(dirname "$0")/.."
runs=${1:-10}
first=${2:-$(date +%s)}
for seed in $(seq "$first" $((first + runs - 1))); do
  start=$SECONDS
  GMS_TORTURE_SEED=$seed bash tests/run.sh -p gms-tests --test torture
  printf 'torture: seed %s passed in %s s\n' "$seed" $((SECONDS - start)) >&2
done
