#!/usr/bin/env bash
# Installs what is missing to run the demo (`setup.sh demo`) or to build and test gms (`setup.sh`). Says nothing when
# nothing is missing. Debian and Ubuntu; elsewhere it names what to install.
set -euo pipefail

need=() # packages to install; "libclang" stands for the newest that there is
why=()  # what was missing, for people without apt or root

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
  want ps procps
  want stress-ng stress-ng
  want setpriv util-linux
  want unshare util-linux
  want patch patch
  # Tests of other projects that run under torture.
  want stress-ng stress-ng
  compgen -G '/usr/lib/python3.*/test/test_gc.py' >/dev/null ||
    { need+=("lib$(basename "$(readlink -f /usr/bin/python3)")-testsuite"); why+=("tests of python3"); }
  compgen -G '/usr/lib/go*/src/runtime/chan_test.go' >/dev/null || compgen -G '/usr/share/go*/src/runtime/chan_test.go' >/dev/null ||
    { need+=(golang-src); why+=("tests of go"); }
  want capsh libcap2-bin
  want setcap libcap2-bin
  want musl-gcc musl-tools
  want sha256sum coreutils
  want promtool prometheus
}

want_to_build
want python3 python3
[ "${1:-all}" = demo ] || want_to_test
[ ${#need[@]} -gt 0 ] || exit 0

if ! command -v apt-get >/dev/null 2>&1; then
  echo "setup.sh: missing: ${why[*]}; there is no apt-get here, so install them with this system's own tools" >&2
  exit 1
fi
if [ "$(id -u)" != 0 ]; then
  echo "setup.sh: missing: ${why[*]}; run as root: apt-get install ${need[*]/#libclang/$(libclang_package)}" >&2
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
install() {
  local packages=("${need[@]/#libclang/$(libclang_package)}")
  apt-get install -y -q --no-install-recommends "${packages[@]}"
}
if ! { apt-get update -q && install; } </dev/null >"$log" 2>&1; then
  tail -n 20 "$log" >&2
  echo "setup.sh: apt-get failed, see above; full log in $log" >&2
  exit 1
fi
rm -f "$log"
if [ -z "$redis_was_here" ] && [ -d /run/systemd/system ]; then
  systemctl disable --quiet redis-server >/dev/null 2>&1 || true
fi
if [ -z "$prometheus_was_here" ] && [ -d /run/systemd/system ]; then
  systemctl disable --quiet prometheus >/dev/null 2>&1 || true
fi
