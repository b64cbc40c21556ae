"""A data loader: every file once, in an order of its own each time, by four workers."""
import hashlib
import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor

root, = sys.argv[1:]
paths = [os.path.join(at, name) for at, _, names in os.walk(root) for name in names]
random.shuffle(paths)


def load(path):
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).digest()


with ThreadPoolExecutor(4) as workers:
    print(len(list(workers.map(load, paths))))
