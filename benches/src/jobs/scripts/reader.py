"""Reads what a list names, in its order."""
import sys

with open(sys.argv[1]) as names:
    for name in names.read().split():
        with open(name, "rb") as file:
            file.read()
