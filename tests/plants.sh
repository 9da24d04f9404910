#!/usr/bin/env bash
# Whether the tests can fail: plants each change of tests/plants/*.patch in a copy of the tree, builds gms there, and runs the tests which
# the patch says it is caught by ("Caught by: FILE TEST", FILE in tests/tests). With the change each of them must fail, without it pass.
# `plants.sh NAME...` tries some. What torture is to find, it must find with one of the seeds 1 to GMS_TORTURE_SEEDS (10), and find nothing without.
# A patch that no longer applies is an error: renew it for the code as it is.
set -euo pipefail
cd "$(dirname "$0")/.."
seeds=${GMS_TORTURE_SEEDS:-10}
unset GMS_TORTURE_SEED GMS_TORTURE_SEEDS
out=$PWD/target/plants
tree=$out/tree
export CARGO_TARGET_DIR=$out/target CARGO_INCREMENTAL=1

say() { printf 'plants: %s\n' "$*" >&2; }

# The tree as it is. Only what differs is copied, so that only that is compiled again.
copy_tree() {
  local file
  mkdir -p "$tree"
  git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
    cmp -s "$file" "$tree/$file" || { mkdir -p "$tree/$(dirname "$file")" && cp "$file" "$tree/$file"; }
  done
  (cd "$tree" && find . -type f -printf '%P\0') | while IFS= read -r -d '' file; do
    [ -e "$file" ] || rm "$tree/$file"
  done
}

build() { (cd "$tree" && cargo build --release --locked --quiet -p gms-pager -p gms-agent --bins); }

caught_by() { sed -n 's/^Caught by: //p' "tests/plants/$1.patch"; } # plant

# Whether FILE's TEST fails: all that its name stands for. With torture, by which seed.
fails() { # file, test, log
  local seed
  for seed in $(if [ "$1" = torture ]; then seq "$seeds"; else echo 1; fi); do
    if ! (cd "$tree" && GMS_TORTURE_SEED=$seed cargo test --release --locked --quiet -p gms-tests --test "$1" -- "$2") >"$3" 2>&1 </dev/null; then
      grep -q '^test result: FAILED' "$3" || { cat "$3" >&2; say "$1 $2: did not run"; exit 1; }
      grep -q '^test result: FAILED. 0 passed' "$3" && return 0
      say "$1 $2: a part of it passes"
      return 1
    fi
    grep -q '^test result: ok. [1-9]' "$3" || { say "$1 $2: there is no such test"; exit 1; }
  done
  return 1
}

plant() { # name
  local file test missed=0
  # `set -e` does not hold here, where the result is asked for.
  patch -d "$tree" -p1 --forward --batch --fuzz=0 --quiet <"tests/plants/$1.patch" || { say "$1: does not apply"; exit 1; }
  build || { say "$1: does not compile"; exit 1; }
  while read -r file test; do
    if fails "$file" "$test" "$out/$1.log"; then
      say "$1: caught by $file $test: $(grep -m1 -A1 'panicked at ' "$out/$1.log" | tail -1 | cut -c1-150)"
    else
      say "$1: NOT CAUGHT by $file $test"
      missed=1
    fi
  done < <(caught_by "$1")
  patch -d "$tree" -p1 --reverse --batch --fuzz=0 --quiet <"tests/plants/$1.patch" || exit 1
  return $missed
}

names=("$@")
[ $# != 0 ] || mapfile -t names < <(cd tests/plants && printf '%s\n' *.patch | sed 's/\.patch$//')
copy_tree
build
while read -r file test; do
  ! fails "$file" "$test" "$out/clean.log" || { cat "$out/clean.log" >&2; say "$file $test: fails without a plant too"; exit 1; }
done < <(for name in "${names[@]}"; do caught_by "$name"; done | sort -u)
status=0
for name in "${names[@]}"; do
  plant "$name" || status=1
done
[ $status != 0 ] || say "${#names[@]} plants, each caught by every test that it names"
exit $status
