"""The package tilewave: the one in python/ beside this folder, else an installed one."""

import os
import pathlib
import sys

import records


def load(library=None):
    """tilewave.ops, and the path of the library that it calls. `library`: the libtilewave.so to call (None: what the package finds). ImportError says what is
    missing."""
    if library is not None:
        os.environ["TILEWAVE_LIBRARY"] = str(library.resolve())
    beside = records.ROOT / "python"
    if (beside / "tilewave").is_dir():
        sys.path.insert(0, str(beside))
    from tilewave import _library, ops

    return ops, pathlib.Path(_library.library()._name)
