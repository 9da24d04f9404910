# Python's own objects first, then numpy's arrays; all numbers are whole, so that every machine gets the same ones.
import hashlib
import sys

import numpy

mib = int(sys.argv[1])
digest = hashlib.blake2b()

count = mib * 1000
records = {i * 7919 % count: ("key %d" % i, [i, i * i]) for i in range(count)}
groups = {}
for key, (name, numbers) in records.items():
    groups.setdefault(key % 1024, []).append(numbers[0])
digest.update(repr([sum(group) for _, group in sorted(groups.items())]).encode())
digest.update(str(sum(value[1][1] for key, value in records.items() if key % 3)).encode())

count = mib * 24 * 1024 // 1024 * 1024
random = numpy.random.default_rng(1)
values = random.integers(0, 1000, count).astype(numpy.float64)
digest.update(numpy.sort(values)[::1000].tobytes())
gathered = values[random.permutation(count)]
digest.update(numpy.cumsum(gathered)[::1000].tobytes())
matrix = values.reshape(-1, 1024)
digest.update((matrix.T @ matrix[:, :8]).tobytes())
digest.update((matrix * matrix).sum(axis=0).tobytes())
digest.update(str(sum(len(value[0]) for value in records.values())).encode())
print(digest.hexdigest())
