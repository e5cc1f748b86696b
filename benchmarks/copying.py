"""The floor of any exchange of models: copying their bytes."""

import time

import numpy as np

_MOST_BUFFER_BYTES = 1 << 30
"""Far above any cache; more would only cost memory."""


def copy_seconds(num_bytes: int, repeats: int) -> list[float]:
    """Return the seconds in which one thread copies so many bytes once, after a warm-up.

    Source and target are as large as what is copied, up to 1 GiB; above it they are used again.
    """
    size = min(num_bytes, _MOST_BUFFER_BYTES)
    source, target = (np.ones(size, np.uint8) for _ in range(2))
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        for at in range(0, num_bytes, size):
            part = min(size, num_bytes - at)
            np.copyto(target[:part], source[:part])
        seconds.append(time.perf_counter() - began)
    return seconds[1:]
