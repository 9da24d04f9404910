#!/usr/bin/env bash
# Installs what is missing, builds gms, and runs all tests: of the crates with overflow checks and debug assertions, then of the programs as they are
# shipped. Arguments go to `cargo test` (a test's name, -p CRATE ...), for which all is built as it is shipped.
set -euo pipefail
cd "$(dirname "$0")/.."
exec </dev/null
bash tests/setup.sh
# Many tests wait more than they compute; those that claim how long something takes run alone all the same (`Stage`).
export RUST_TEST_THREADS=${RUST_TEST_THREADS:-$((3 * $(nproc) / 2))}
crates=(gms-policy gms-transport gms-agent gms-pager)
which=("$@")
if [ $# = 0 ]; then
  cargo test --release --config .ci/checked.toml "${crates[@]/#/--package=}" --locked --no-fail-fast --quiet
  which=("${crates[@]/#/--exclude=}")
fi
# One profile, one set of packages and one of features in both commands, so that nothing is compiled twice: the simulation needs a network in memory, which
# is a module that the programs do not use.
cargo build --release --workspace --bins --features gms-transport/sim --locked --quiet
exec cargo test --release --workspace --locked --no-fail-fast --quiet "${which[@]}"
