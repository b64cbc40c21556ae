"""What a day's stations measured, against constants that are the same each day."""
import os
import sys
import zlib

date, = sys.argv[1:]
year, month, day = date.split("-")
constants = [open(os.path.join("constants", name), "rb").read() for name in sorted(os.listdir("constants"))]
directory = os.path.join("daily", year, month, day)
sums = []
for name in sorted(os.listdir(directory)):
    with open(os.path.join(directory, name), "rb") as file:
        sums.append(zlib.crc32(file.read(), len(constants)))
print(date, len(sums))
