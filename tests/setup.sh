#!/usr/bin/env bash
# Installs what is missing to run the demo (`setup.sh demo`) or to build and test gms (`setup.sh`). Says nothing when
# nothing is missing. Debian and Ubuntu; elsewhere it names what to install. Rust and the kernel it does not install:
# where they are missing or too old it says what is needed and how to get it. `setup.sh packages` does not look at them.
set -euo pipefail
cd "$(dirname "$0")/.."

need=() # packages to install; "libclang" and "libpython-testsuite" stand for this release's
why=()  # what was missing, for people without apt or root

# Whether version $1 is at least $2.
at_least() { [ "$(printf '%s\n' "$1" "$2" | sort -V | head -n 1)" = "$2" ]; }

need_rust() {
  local least pinned found
  least=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
  pinned=$(sed -n 's/^channel = "\(.*\)"/\1/p' rust-toolchain.toml)
  found=$(cargo --version 2>/dev/null | cut -d ' ' -f 2) || found=
  [ -n "$found" ] && at_least "$found" "$least" && return
  cat >&2 <<END
setup.sh: gms needs Rust $least or later (CI builds with $pinned); ${found:+here is only }${found:-there is no cargo here that runs}.
  rustup fetches what rust-toolchain.toml names at the first build. To get it: apt-get install rustup (Debian 13,
  Ubuntu 24.04), or https://rustup.rs (everywhere). A cargo of the distribution's own must not come first in PATH.
END
  return 1
}

need_kernel() {
  local least
  # The same number as of `gms doctor`.
  least=$(sed -n 's/^const KERNEL_MIN.* = (\([0-9]*\), \([0-9]*\));/\1.\2/p' pager/src/commands/doctor.rs)
  [ -n "$least" ] || { echo "setup.sh: pager/src/commands/doctor.rs does not say which kernel is needed" >&2; return 1; }
  at_least "$(uname -r)" "$least" && return
  cat >&2 <<END
setup.sh: gms needs Linux $least or later on x86-64 (UFFDIO_MOVE); here runs $(uname -r).
  Debian 13 and Ubuntu 24.04 have one. Debian 12: apt-get install linux-image-amd64 from bookworm-backports, and boot it.
  Ubuntu 22.04: apt-get install linux-generic-hwe-22.04, and boot it. \`gms doctor\` tells what else is missing.
END
  # Whoever lets privileged tests be skipped has some that need no such kernel.
  [ "${GMS_TESTS_SKIP_PRIVILEGED:-}" = 1 ]
}

want() { # command, package
  command -v "$1" >/dev/null 2>&1 || [ -x "/usr/sbin/$1" ] || { need+=("$2"); why+=("$1"); }
}

want_to_build() {
  want gcc gcc
  [ -e /usr/include/stdio.h ] || { need+=(libc6-dev); why+=(stdio.h); }
  [ -e /usr/include/linux/userfaultfd.h ] || { need+=(linux-libc-dev); why+=(linux/userfaultfd.h); }
  # bindgen, which the userfaultfd crate builds with, loads libclang.
  compgen -G '/usr/lib/*/libclang[-.][0-9s]*so*' >/dev/null || compgen -G '/usr/lib*/llvm*/lib*/libclang[-.][0-9s]*so*' >/dev/null ||
    compgen -G '/usr/lib64/libclang[-.][0-9s]*so*' >/dev/null || [ -n "${LIBCLANG_PATH:-}" ] ||
    { need+=(libclang); why+=(libclang); }
}

# The newest libclang runtime that this release has; 14 is Debian 12's.
libclang_package() {
  local version
  for version in 20 19 18 17 16 15; do
    apt-cache show "libclang1-$version" >/dev/null 2>&1 && break
    version=14
  done
  echo "libclang1-$version"
}

# That of the python3 which this release has: python3 itself may be still to come.
python_tests_package() { apt-cache depends python3 | sed -n 's/^ *Depends: \(python3\.[0-9]*\)$/lib\1-testsuite/p' | head -n 1; }

packages() {
  local package
  for package in "${need[@]}"; do
    case $package in
      libclang) libclang_package ;;
      libpython-testsuite) python_tests_package ;;
      *) echo "$package" ;;
    esac
  done | sort -u
}

want_to_test() {
  want git git
  want go golang-go
  want javac default-jdk-headless
  want java default-jre-headless
  want redis-server redis-server
  want redis-benchmark redis-tools
  want sqlite3 sqlite3
  /usr/bin/python3 -c 'import numpy' >/dev/null 2>&1 || { need+=(python3-numpy); why+=(numpy); }
  want ip iproute2
  want tc iproute2
  want nft nftables
  want ps procps
  want setpriv util-linux
  want unshare util-linux
  want patch patch
  # Tests of other projects that run under torture.
  want stress-ng stress-ng
  compgen -G '/usr/lib/python3.*/test/test_gc.py' >/dev/null ||
    { need+=(libpython-testsuite); why+=("tests of python3"); }
  compgen -G '/usr/lib/go*/src/runtime/chan_test.go' >/dev/null || compgen -G '/usr/share/go*/src/runtime/chan_test.go' >/dev/null ||
    { need+=(golang-src); why+=("tests of go"); }
  want capsh libcap2-bin
  want setcap libcap2-bin
  want musl-gcc musl-tools
  want sha256sum coreutils
  want promtool prometheus
}

if [ "${1:-}" != packages ]; then
  status=0
  need_rust || status=1
  need_kernel || status=1
  [ $status = 0 ] || exit 1
fi

want_to_build
want python3 python3
[ "${1:-all}" = demo ] || want_to_test
[ ${#need[@]} -gt 0 ] || exit 0

if ! command -v apt-get >/dev/null 2>&1; then
  echo "setup.sh: missing: ${why[*]}; there is no apt-get here, so install them with this system's own tools" >&2
  exit 1
fi
if [ "$(id -u)" != 0 ]; then
  echo "setup.sh: missing: ${why[*]}; run as root: apt-get install $(packages | tr '\n' ' ')" >&2
  exit 1
fi

export DEBIAN_FRONTEND=noninteractive
# Packages must not start their services: the tests run servers of their own. Our rule goes when we do.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod 755 "$policy"
  trap 'rm -f "$policy"' EXIT
fi
redis_was_here=$(command -v redis-server || true)
prometheus_was_here=$(command -v prometheus || true)
log=$(mktemp)
echo "setup.sh: installing ${need[*]}" >&2
install() { packages | xargs apt-get install -y -q --no-install-recommends; }
if ! { apt-get update -q && install; } </dev/null >"$log" 2>&1; then
  tail -n 20 "$log" >&2
  echo "setup.sh: apt-get failed, see above; full log in $log" >&2
  exit 1
fi
rm -f "$log"
# Nor at the next start of this machine, or of a guest from this root. Containers have no systemctl.
[ -n "$redis_was_here" ] || systemctl disable --quiet redis-server >/dev/null 2>&1 || true
[ -n "$prometheus_was_here" ] || systemctl disable --quiet prometheus >/dev/null 2>&1 || true
