"""The command line: `python -m tilewave transcribe talk.flac` and, installed, `tilewave transcribe talk.flac`."""

import os
import sys

from . import _library


def main() -> None:
    program = _library.program()
    os.execv(program, ["tilewave", *sys.argv[1:]])


if __name__ == "__main__":
    main()
