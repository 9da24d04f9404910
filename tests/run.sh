#!/usr/bin/env bash
# Installs what is missing, builds gms, and runs all tests. Arguments go to `cargo test` (a test's name, -p CRATE ...).
set -euo pipefail
cd "$(dirname "$0")/.."
bash tests/setup.sh
# One profile and one set of packages in both commands, so that nothing is compiled twice.
cargo build --release --workspace --bins --locked --quiet
exec cargo test --release --workspace --locked --no-fail-fast --quiet "$@" </dev/null
