"""Statistics of arrays: one after the other, each read whole."""
import sys
import numpy

for path in sys.argv[1:]:
    array = numpy.fromfile(path, dtype=numpy.float32)
    spread = numpy.percentile(array, [1, 50, 99])
    print(path, array.mean(), array.std(), spread)
