#!/usr/bin/env bash
# Builds gms and lets Python work on 400 MiB while 64 MiB of it may stay resident; the rest lives in an agent that
# gms starts itself. gms prints its summary at the end.
set -euo pipefail
cd "$(dirname "$0")/.."
bash tests/setup.sh demo
cargo build --release --locked --quiet -p gms-pager --bin gms

program='
import hashlib
blocks = [bytearray(hashlib.sha256(b"%d" % i).digest() * 32768) for i in range(400)]
print(f"python: filled {len(blocks)} MiB, now reading it back in another order", flush=True)
wrong = sum(blocks[i] != hashlib.sha256(b"%d" % i).digest() * 32768 for i in sorted(range(400), key=lambda i: i * 7919 % 400))
print(f"python: {len(blocks) - wrong} blocks of {len(blocks)} are right", flush=True)
raise SystemExit(wrong > 0)
'
echo '$ gms run --local 64M -- python3 -c ...' >&2
exec target/release/gms run --local 64M -- python3 -c "$program"
