#!/usr/bin/env bash
# Plants each bug of tests/plants/*.patch in a copy of the tree, builds gms there, and lets torture look for it: it must be found by
# one of the seeds, and without the bug the same tests must pass with all of them. `plants.sh NAME` tries one, GMS_TORTURE_SEEDS (10)
# says how many seeds. A patch that no longer applies is an error: renew it for the code as it is.
set -euo pipefail
cd "$(dirname "$0")/.."
seeds=${GMS_TORTURE_SEEDS:-10}
unset GMS_TORTURE_SEED GMS_TORTURE_SEEDS
# The programs that check every page; the other suites find the same bugs later.
suite=programs_find_every_page_right
out=$PWD/target/plants

say() { printf 'plants: %s\n' "$*" >&2; }

# gms of a copy of the tree with one bug. All plants share a target directory, so that dependencies are compiled once.
build() { # name
  rm -rf "$out/tree"
  mkdir -p "$out/tree"
  git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$out/tree"
  patch -d "$out/tree" -p1 --forward --fuzz=3 <"tests/plants/$1.patch" >&2
  # Dependencies are the same: what was compiled of them is taken along.
  [ -d "$out/target" ] || { mkdir -p "$out/target/release" && cp -a target/release/{deps,build,.fingerprint} "$out/target/release"; }
  (cd "$out/tree" && cargo build --release --locked --quiet --target-dir "$out/target" -p gms-pager --bin gms)
  cp "$out/target/release/gms" "$out/$1"
}

torture() { # gms, seed
  GMS_TORTURE_BINARY=$1 GMS_TORTURE_SEED=$2 \
    cargo test --release --locked --quiet -p gms-tests --test torture -- "$suite" </dev/null
}

find_bug() { # name
  local seed log=$out/$1.log
  build "$1"
  for seed in $(seq "$seeds"); do
    if ! torture "$out/$1" "$seed" >"$log" 2>&1; then
      grep -q 'replay: GMS_TORTURE_SEED' "$log" || { cat "$log" >&2; say "$1: torture did not run"; return 1; }
      say "$1: found by seed $seed: $(grep -m1 -oE '(ZERO PAGE|MISMATCH|workload killed|did not end).*' "$log" || echo "see $log")"
      return 0
    fi
  done
  say "$1: NOT FOUND by $seeds seeds"
  return 1
}

cargo build --release --workspace --bins --locked --quiet
status=0
for patch in tests/plants/*.patch; do
  name=$(basename "$patch" .patch)
  [ -z "${1:-}" ] || [ "$1" = "$name" ] || continue
  find_bug "$name" || status=1
done
for seed in $(seq "$seeds"); do
  log=$out/clean.log
  torture "$PWD/target/release/gms" "$seed" >"$log" 2>&1 || { cat "$log" >&2; say "fails without a plant too"; exit 1; }
done
[ $status != 0 ] || say "each plant was found, and nothing without one"
exit $status
