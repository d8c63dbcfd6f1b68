"""The package itself: which library it loads, what it says where there is none, and what importing it costs."""

import ast
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
    for name in set(tilewave.__all__) - {"nn", "sdpa", *tilewave._SDPA}:  # which need PyTorch
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


def test_the_command_line():
    def run(*arguments):
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run([sys.executable, "-m", "tilewave", *arguments], env=environment, capture_output=True, text=True)

    try:
        _library.program()
    except ImportError as error:
        pytest.skip(str(error))
    assert run("--version").stdout.split()[-1] == tilewave.__version__
    result = run("transcribe", str(ROOT.parent / "assets/samples/digits-1.wav"))
    assert (result.returncode, result.stdout.strip()) == (0, "six seven nine one"), result.stderr
    assert run("nothing").returncode == 2


def test_type_checkers_are_told_every_name():
    """These names are imported at first use, which type checkers do not see."""
    (block,) = (
        node
        for node in ast.parse(pathlib.Path(tilewave.__file__).read_text()).body
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    )
    told = {alias.asname for node in block.body for alias in node.names}
    assert told == {*tilewave._MODULES, *tilewave._SDPA, *tilewave._PLACES}
    assert (ROOT / "tilewave/py.typed").exists()


USER = """
from pathlib import Path

import tilewave
from tilewave import Transcriber, check_contents, ops
from tilewave.flash_attn import flash_attn_func
from tilewave.transcriber import Transcript

transcriber = Transcriber(Path("digits"), device="cpu", progress=lambda done, size: None)
transcript: Transcript = transcriber("a.wav", on_text=lambda text: False)
words: list[str] = transcript.text.split()
ends: list[float] = [segment.end for segment in transcript.segments]
with check_contents():
    y = ops.softmax([1.0])
reveal_type(transcriber)
transcriber("a.wav", max_new_tokens="many")
tilewave.Transcribers
"""


def test_type_checkers_see_the_package(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(USER)
    result = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), str(tmp_path / "user.py")],
        env={**os.environ, "MYPYPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    lines = [line.split("user.py:")[1] for line in result.stdout.splitlines() if "user.py:" in line]
    assert len(lines) == 3, result.stdout
    assert 'Revealed type is "tilewave.transcriber.Transcriber"' in lines[0]
    assert 'Argument "max_new_tokens"' in lines[1]
    assert 'has no attribute "Transcribers"' in lines[2]
