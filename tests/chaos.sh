#!/usr/bin/env bash
# Agents fail under programs whose pages they have: for so many seconds (600) in each of two tests, as the seed (the time) says. Tells the seed and each
# step. By odd seeds redis has parity and the other test copies, by even ones the other way round. `chaos.sh [SECONDS [SEED]]`
set -euo pipefail
cd "$(dirname "$0")/.."
export GMS_CHAOS_SECONDS=${1:-600} GMS_CHAOS_SEED=${2:-$(date +%s)}
printf 'chaos: %s s with seed %s\n' "$GMS_CHAOS_SECONDS" "$GMS_CHAOS_SEED" >&2
bash tests/run.sh -p gms-tests --test chaos
