"""Tests of a whole executor and of a server on a device: on a GPU with `make gpu`; what a CPU can do of it is
done there, in Triton's interpreter (`tests/model/cuda/where.py`)."""

from __future__ import annotations

from tests.model.cuda.where import interpret

interpret()
