"""The package itself: which library it loads, what it says where there is none, and what importing it costs."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import tilewave
from tilewave import _library

ROOT = pathlib.Path(tilewave.__file__).resolve().parents[1]


def python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


CALL = "import numpy, tilewave; tilewave.ops.softmax(numpy.zeros((2, 2), 'f4'))"


def test_importing_takes_neither_numpy_nor_torch_nor_the_library():
    result = python(
        "import sys, tilewave; print([m for m in ('numpy', 'torch', 'transformers') if m in sys.modules], tilewave.__version__)",
        TILEWAVE_LIBRARY="/nonexistent/libtilewave.so",
    )
    assert result.stdout.split("\n")[0] == f"[] {tilewave.__version__}"


def test_every_public_name_is_there():
    for name in set(tilewave.__all__) - {"sdpa", *tilewave._SDPA}:  # which need PyTorch
        assert getattr(tilewave, name) is not None
    for name in tilewave.ops.__all__:
        assert getattr(tilewave.ops, name).__doc__
    with pytest.raises(AttributeError, match="nothing"):
        tilewave.nothing


def test_a_missing_library_is_named(tmp_path):
    result = python(CALL, TILEWAVE_LIBRARY=str(tmp_path))
    assert result.returncode == 1 and f"looked for {tmp_path}/libtilewave.so" in result.stdout and "TILEWAVE_LIBRARY" in result.stdout


def test_a_file_that_is_no_library_is_named(tmp_path):
    (tmp_path / "libtilewave.so").write_text("text")
    result = python(CALL, TILEWAVE_LIBRARY=str(tmp_path / "libtilewave.so"))
    assert result.returncode == 1 and f"{tmp_path}/libtilewave.so cannot be loaded" in result.stdout


def test_another_version_is_refused(tmp_path):
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    for code, message in (
        ('const char* tw_version(void) { return "9.9.9"; }', "is version 9.9.9, but this package is"),
        ("int nothing;", "is not version"),
    ):
        library = tmp_path / str(len(code)) / "libtilewave.so"
        library.parent.mkdir()
        subprocess.run([compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)], input=code, text=True, check=True)
        result = python(CALL, TILEWAVE_LIBRARY=str(library))
        assert result.returncode == 1 and f"{library} {message}" in result.stdout, result.stdout


def test_the_library_has_the_packages_version():
    assert _library.library().tw_version().decode() == tilewave.__version__
