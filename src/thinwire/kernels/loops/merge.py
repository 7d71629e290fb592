"""Sums of sorted tables."""

from thinwire.kernels.loops.compiled import compiled


@compiled
def merge(keys, rows, keys_a, rows_a, keys_b, rows_b):
    a = b = count = 0
    while a < keys_a.size or b < keys_b.size:
        from_a = b == keys_b.size or (a < keys_a.size and keys_a[a] <= keys_b[b])
        key = keys_a[a] if from_a else keys_b[b]
        new = count == 0 or keys[count - 1] != key
        if new:
            keys[count] = key
            count += 1
        for j in range(rows.shape[1]):
            value = rows_a[a, j] if from_a else rows_b[b, j]
            rows[count - 1, j] = value if new else rows[count - 1, j] + value
        if from_a:
            a += 1
        else:
            b += 1
    return count
