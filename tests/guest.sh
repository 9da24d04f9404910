#!/usr/bin/env bash
# Runs gms's tests in a guest: Debian 13 with its own kernel and systemd, so with cgroup v2 as on a real machine, under qemu's emulation (no
# KVM needed). As root; Debian packages mmdebstrap, qemu-system-x86, and what tests/setup.sh wants.
#
#   guest.sh                    the usual tests; exit status 0 if all passed
#   guest.sh NAME[:TEST]...     only these files of tests (`tests/uses`), of these only tests with TEST in their names; also what is left out
#   guest.sh --list             what there is, what is left out and why
#   guest.sh --userland [CMD..] runs CMD (.ci/run) in the guest's userland, but on this machine's kernel: fast. gms runs there in namespaces of its own
#
# The guest's root is made once by mmdebstrap from the mirror that this machine's apt has for Debian, and gets its packages from
# tests/setup.sh. gms and its tests are compiled in that root, on this machine's kernel and with its Rust: in the guest it would take hours.
# What reads sources only (format, lints, tests/tidy) `--userland` runs; documentation has no tests. In the guest one test runs at a time.
#
# GMS_GUEST_DIR      where root, images and logs are kept (target/guest; 12 GB)
# GMS_GUEST_MEMORY   memory of the guest in MiB (6144)
# GMS_GUEST_CPUS     its CPUs (2)
# GMS_GUEST_EACH     seconds until one file of tests is ended (1800)
# GMS_GUEST_LIMIT    seconds until the guest is ended (14400)
# GMS_TESTS_SLOW     how many times slower than a machine the guest is: deadlines of tests are as many times longer (10)
set -euo pipefail
cd "$(dirname "$0")/.."
repo=$PWD
dir=$(realpath -m "${GMS_GUEST_DIR:-target/guest}")
memory=${GMS_GUEST_MEMORY:-6144}
cpus=${GMS_GUEST_CPUS:-2}
each=${GMS_GUEST_EACH:-1800}
limit=${GMS_GUEST_LIMIT:-14400}
slow=${GMS_TESTS_SLOW:-10}
release=trixie
root=$dir/root

say() { printf 'guest: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# What runs only when it is named: NAME, TEST (all: *), why.
left_out() {
  cat <<'END'
bench/quick * figures of benchmarks mean nothing under emulation, and each takes minutes
tests/torture * four minutes on a machine, an hour in the guest
agent/hostile * compares figures beside attacks, within the time-outs of links
tests/tidy * reads sources only, with cargo and git: part of --userland
tests/attach with_50_percent_resident the same with 25 percent runs
tests/memory with_50_percent_resident the same with 25 percent runs
tests/programs with_50_percent_resident the same with 25 percent runs
tests/redis with_50_percent_resident the same with 25 percent runs
END
}

# ---- the root

need() { command -v "$1" >/dev/null 2>&1 || [ -x "/usr/sbin/$1" ] || die "$1 is missing: apt-get install $2"; }

# The mirror of this machine's own Debian.
mirror() {
  apt-get indextargets --format '$(REPO_URI) $(CREATED_BY) $(ORIGIN)' 2>/dev/null | sed -n 's|/* Packages Debian$||p' | head -n 1
}

make_root() {
  [ ! -e "$dir/root.made" ] || return 0
  local from
  need mmdebstrap mmdebstrap
  from=$(mirror)
  say "making Debian's $release in $root"
  rm -rf "$root"
  mmdebstrap --quiet --variant=minbase --include=systemd-sysv,dbus,udev,linux-image-amd64,ca-certificates \
    "$release" "$root" ${from:+"$from"} >"$dir/root.log" 2>&1 </dev/null || die "mmdebstrap failed: see $dir/root.log"
  set_up_root
  touch "$dir/root.made"
}

# What a machine has from its installer, and the unit that runs the tests.
set_up_root() {
  echo guest >"$root/etc/hostname"
  printf '127.0.0.1 localhost guest\n::1 localhost\n' >"$root/etc/hosts"
  printf 'LABEL=root / ext4 defaults 0 1\nLABEL=gms /gms ext4 defaults 0 2\n' >"$root/etc/fstab"
  mkdir -p "$root/gms"
  cat >"$root/etc/systemd/system/gms-tests.service" <<'END'
[Unit]
Description=Tests of gms
RequiresMountsFor=/gms
[Service]
Type=oneshot
ExecStart=/bin/bash /gms/run
ExecStopPost=systemctl poweroff --force --no-block
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS1
TasksMax=infinity
OOMPolicy=continue
[Install]
WantedBy=multi-user.target
END
  in_root net bash tests/setup.sh packages
  # Nobody logs in there, and no timer disturbs.
  in_root net systemctl mask --quiet serial-getty@ttyS0.service getty@tty1.service apt-daily.timer apt-daily-upgrade.timer fstrim.timer
  in_root net systemctl enable --quiet gms-tests.service
}

# Runs a command in the root, in the repository, with mounts and processes of its own: with this machine's network (`net`), or with one of its own.
in_root() { # net|alone, command...
  local spaces=(--mount --pid) sysroot common
  [ "$1" = net ] || spaces+=(--net)
  sysroot=$(rustc --print sysroot)
  common=$(realpath "$(git rev-parse --git-common-dir)")
  mkdir -p "$dir/target" target
  unshare "${spaces[@]}" --fork --kill-child --propagation private bash -euc '
    root=$1 repo=$2 target=$3 sysroot=$4 common=$5 cargo=$6 rustup=$7 network=$8
    shift 8
    show() { mkdir -p "$root$1" && mount --bind "$1" "$root$1" && mount -o remount,bind,ro "$root$1"; }
    mount --bind "$root" "$root"
    mount -t proc proc "$root/proc"
    mount -t tmpfs tmpfs "$root/tmp"
    mount --rbind /dev "$root/dev"
    if [ "$network" = net ]; then
      cp /etc/resolv.conf "$root/etc/resolv.conf"
    else
      # A view of /sys for the network of its own, and the only cgroups that Debian 13 has.
      mount -t sysfs sysfs "$root/sys"
      mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
      ip link set lo up
    fi
    for path in "$sysroot" "$cargo" "$rustup" "$common" "$repo"; do [ ! -d "$path" ] || show "$path"; done
    mount --bind "$target" "$root$repo/target"
    inside="cd \"\$1\"; shift; exec \"\$@\""
    # Not by chroot: the kernel lets nobody make user namespaces in one.
    cd "$root"
    pivot_root . .
    umount --lazy .
    cd /
    exec /usr/bin/env -i HOME=/tmp TMPDIR=/var/tmp LANG=C.UTF-8 PATH="$sysroot/bin:/usr/sbin:/usr/bin:/sbin:/bin" \
      CARGO_HOME="$cargo" RUSTUP_HOME="$rustup" CARGO_NET_OFFLINE=true bash -c "$inside" in_root "$repo" "$@"
  ' in_root "$root" "$repo" "$dir/target" "$sysroot" "$common" "${CARGO_HOME:-$HOME/.cargo}" "${RUSTUP_HOME:-$HOME/.rustup}" "$@"
}

# ---- gms and its tests

# What is built inside has no network.
fetch() { local tree; for tree in . transport/fuzz; do (cd "$tree" && cargo fetch --locked --quiet); done; }

compile() {
  fetch
  in_root alone bash -euc '
    bash tests/setup.sh
    cargo build --release --workspace --bins --locked --quiet
    cargo test --release --workspace --locked --no-run --quiet --message-format=json >target/tests.json'
}

# The executables of the tests: name, folder in which cargo runs it, file. Built by `compile`.
executables() {
  python3 - "$repo" "$dir/target/tests.json" <<'END' | sort
import json, os, sys
for line in open(sys.argv[2]):
    found = json.loads(line)
    if found.get("reason") == "compiler-artifact" and found["profile"]["test"] and found["executable"]:
        folder = os.path.dirname(found["manifest_path"])
        kind = found["target"]["kind"][0]
        kind = "" if kind == "test" else kind + "-"
        print(os.path.relpath(folder, sys.argv[1]) + "/" + kind + found["target"]["name"], folder, found["executable"], sep="\t")
END
}

# What to run: the line of `executables`, and arguments.
plan() { # NAME[:TEST]...
  local name folder file wanted test why args
  while IFS=$'\t' read -r name folder file; do
    if [ $# = 0 ]; then
      args=()
      while read -r wanted test why; do
        [ "$wanted" != "$name" ] || args+=(--skip "$test")
      done < <(left_out)
      [ "${args[*]}" = '--skip *' ] || printf '%s\t%s\t%s\t%s\n' "$name" "$folder" "$file" "${args[*]}"
    else
      for wanted; do
        [ "${wanted%%:*}" != "$name" ] || printf '%s\t%s\t%s\t%s\n' "$name" "$folder" "$file" "$([ "$wanted" = "$name" ] || echo "${wanted#*:}")"
      done
    fi
  done < <(executables)
}

# ---- the guest

# What the guest's service runs. On the terminal it answers to: `guest: ended NAME STATUS SECONDS` for each, `guest: over` at the end.
runner() {
  cat <<'END'
exec </dev/null
. /gms/settings
say() { printf '\nguest: %s\n' "$*"; }
mkdir -p "$repo"
mount --bind /gms/tree "$repo"
# Debian 13 has /tmp in memory, from which nothing can be read directly: a test would skip that.
export CI=true GMS_TORTURE_SEED=11 HOME=/root LANG=C.UTF-8 TMPDIR=/var/tmp
cd "$repo"
. /etc/os-release
say "$PRETTY_NAME, Linux $(uname -r), $(nproc) CPUs, cgroups: $(findmnt -n -o FSTYPE /sys/fs/cgroup), up for $(cut -d ' ' -f 1 /proc/uptime) s"
target/release/gms doctor || true
while IFS=$'\t' read -r name folder file args; do
  say "begins $name $args"
  began=$SECONDS
  cd "$folder"
  # One at a time: what hangs is known by its name.
  timeout --kill-after=60 "$each" "$file" --test-threads=1 --color=never $args
  say "ended $name $? $((SECONDS - began))"
done </gms/plan
say over
END
}

# The file systems of the guest. A file beside an image says that it is whole.
make_images() { # NAME[:TEST]...
  local stage=$dir/stage name
  if [ ! -e "$dir/root.ext4" ]; then
    say "making the image of the root"
    rm -f "$dir/root.ext4.new"
    mke2fs -q -t ext4 -L root -d "$root" "$dir/root.ext4.new" 8G
    mv "$dir/root.ext4.new" "$dir/root.ext4"
  fi
  rm -rf "$stage"
  mkdir -p "$stage/tree/target/release/deps" "$stage/tree/target/tmp"
  runner >"$stage/run"
  printf 'repo=%q\neach=%q\nexport GMS_TESTS_SLOW=%q\n' "$repo" "$each" "$slow" >"$stage/settings"
  plan "$@" >"$stage/plan"
  [ -s "$stage/plan" ] || die "there are no such tests: see guest.sh --list"
  git ls-files -z --cached --others --exclude-standard | xargs -0 cp -p --parents -t "$stage/tree"
  for name in gms gms-agent gms-bench gms-unpaged; do
    cp -l "$dir/target/release/$name" "$dir/target/release/$name.d" "$stage/tree/target/release"
  done
  cut -f 3 "$stage/plan" | sort -u | while read -r name; do
    cp -l "$dir/target/${name#"$repo/target/"}" "$stage/tree/target/release/deps"
  done
  # Programs that tests have compiled in the root need not be compiled again in the guest.
  [ ! -d "$dir/target/release/gms-tests" ] || cp -a "$dir/target/release/gms-tests" "$stage/tree/target/release"
  rm -f "$dir/gms.ext4"
  mke2fs -q -t ext4 -L gms -d "$stage" "$dir/gms.ext4" 8G
}

boot() {
  local log=$dir/tests.log pid status=0
  : >"$log"
  # The root stays as it is: what the guest changes there goes to a file that is gone at once.
  TMPDIR=$dir timeout "$limit" qemu-system-x86_64 -nodefaults -display none -no-reboot -cpu max,la57=off -accel tcg,thread=multi \
    -smp "$cpus" -m "${memory}M" -kernel "$root/vmlinuz" -initrd "$root/initrd.img" \
    -append "root=LABEL=root rw console=ttyS0 quiet panic=-1 tsc=reliable mitigations=off systemd.show_status=no" \
    -drive "file=$dir/root.ext4,format=raw,if=virtio,snapshot=on" -drive "file=$dir/gms.ext4,format=raw,if=virtio,cache=unsafe" \
    -object rng-random,id=rng,filename=/dev/urandom -device virtio-rng-pci,rng=rng \
    -serial "file:$dir/console.log" -serial "file:$log" </dev/null >"$dir/qemu.log" 2>&1 &
  pid=$!
  tail -n +1 -f --pid=$pid "$log" | sed -u 's/\r$//' || true
  wait $pid || status=$?
  [ $status = 0 ] || say "qemu ended with status $status: see $dir/qemu.log and $dir/console.log"
}

# What the log says, in short; whether all that was planned has passed.
summary() {
  local log=$dir/tests.log name status seconds planned ended=0 failed=0
  planned=$(wc -l <"$dir/stage/plan")
  printf '\n== summary\n'
  while read -r _ _ name status seconds; do
    ended=$((ended + 1))
    [ "$status" = 0 ] || failed=$((failed + 1))
    printf '%-40s %-6s %6s s\n' "$name" "$([ "$status" = 0 ] && echo ok || echo FAILED)" "$seconds"
  done < <(tr -d '\r' <"$log" | grep -a '^guest: ended ')
  tr -d '\r' <"$log" | awk '/^test result: / { passed += $4; failed += $6 } END { printf "%d tests passed, %d failed\n", passed, failed }'
  tr -d '\r' <"$log" | grep -aoE '^test .* FAILED$|SKIPPED, .*' | sort -u || true
  [ $failed = 0 ] && [ "$ended" = "$planned" ] && grep -aq '^guest: over' "$log"
}

# ---- main

usage() { sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; }

case ${1:-} in
  --help | -h)
    usage
    exit 0
    ;;
esac
[ "$(id -u)" = 0 ] || die "needs root"
mkdir -p "$dir"
make_root
case ${1:-} in
  --userland)
    shift
    [ $# != 0 ] || set -- bash .ci/run
    fetch
    in_root alone "$@"
    exit
    ;;
esac
compile
if [ "${1:-}" = --list ]; then
  executables | cut -f 1
  printf '\nleft out:\n'
  left_out
  exit
fi
need qemu-system-x86_64 qemu-system-x86
need mke2fs e2fsprogs
make_images "$@"
[ $# != 0 ] || left_out | sed 's/^/left out: /'
boot
summary
