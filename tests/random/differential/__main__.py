"""Random operations over the whole public API against a model in NumPy.

    python3 tests/random/differential --seed 7 --seconds 60
    python3 tests/random/differential --operations 1000000 --device cuda:0
    python3 tests/random/differential --seed 7 --round 123          # one round again
    python3 tests/random/differential --soak --seconds 7200   # and whether memory, descriptors and threads stay flat

Prints its seed; on a difference also the round, the operation and the last operations. Exit status 1: a difference, or
with --soak something that grows.
"""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # conftest.py
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from differential.program import main

if __name__ == "__main__":
    sys.exit(main())
