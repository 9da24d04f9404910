"""churn.py MIB: cyclic garbage, large objects, subprocess and multiprocessing; prints a digest of everything read back."""
import gc
import hashlib
import multiprocessing
import subprocess
import sys
import zlib


class Node:
    """One link of a ring: only the cyclic collector can free it."""

    __slots__ = ("number", "text", "table", "next")

    def __init__(self, number):
        self.number = number
        self.text = f"node {number} " * 8
        self.table = {number + i: str(number * i) for i in range(4)}
        self.next = None

    def right(self):
        return self.text == f"node {self.number} " * 8 and all(
            self.table[self.number + i] == str(self.number * i) for i in range(4)
        )


def ring(first, count):
    nodes = [Node(first + i) for i in range(count)]
    for node, follower in zip(nodes, nodes[1:] + nodes[:1]):
        node.next = follower
    return nodes[0]


def walk(start, count):
    node, total = start, 0
    for _ in range(count):
        if not node.right():
            sys.exit(f"MISMATCH in node {node.number}: {node.text!r} {node.table!r}")
        total += node.number
        node = node.next
    if node is not start:
        sys.exit("MISMATCH: the ring is open")
    return total


def block(number, size=1 << 20):
    seed = hashlib.sha256(str(number).encode()).digest()
    return bytearray(seed * (size // len(seed)))


BLOCKS = []


def check_block(number):
    """Runs in a forked worker: reads the parent's block through copy-on-write, and spoils its own copy."""
    good = BLOCKS[number] == block(number)
    BLOCKS[number][:] = b"x" * len(BLOCKS[number])
    return number if good else -1


def main():
    mib = int(sys.argv[1])
    digest = hashlib.sha256()
    BLOCKS.extend(block(i) for i in range(mib // 2))
    rings = []
    for generation in range(4):
        rings.append(ring(generation * 1_000_000, mib * 100))
        if len(rings) > 2:
            rings.pop(0)
        digest.update(str([walk(r, mib * 100) for r in rings]).encode())
        gc.collect()
    # It lives long enough to be seen.
    child = subprocess.run(
        [sys.executable, "-c", "import sys,time,zlib; print(zlib.crc32(sys.stdin.buffer.read())); time.sleep(1)"],
        input=bytes(BLOCKS[0]), capture_output=True, check=True,
    )
    if int(child.stdout) != zlib.crc32(BLOCKS[0]):
        sys.exit("MISMATCH in what the subprocess read")
    with multiprocessing.get_context("fork").Pool(2) as pool:
        if pool.map(check_block, range(len(BLOCKS))) != list(range(len(BLOCKS))):
            sys.exit("MISMATCH in a worker of the pool")
    for number, found in enumerate(BLOCKS):
        if found != block(number):
            sys.exit(f"MISMATCH in block {number}")
        digest.update(found)
    print("churn.py ok", digest.hexdigest())


if __name__ == "__main__":
    main()
