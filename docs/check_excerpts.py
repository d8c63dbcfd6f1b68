#!/usr/bin/env python3
"""Checks that code in the documents is what the files say.

    check_excerpts.py ROOT DOCUMENT...

A ```cpp or ```cmake block must follow a line <!-- path/of/the/file -->, the path relative to ROOT, and hold consecutive lines of that file; common indentation
does not count. A line "// ..." stands for lines left out. <!-- path (whole) --> demands the whole file. Exit code 1 when a block differs.
"""
import pathlib
import re
import sys
import textwrap

BLOCK = re.compile(r"(?:^<!-- (?P<path>\S+?)(?P<whole> \(whole\))? -->\n)?^```(?:cpp|cmake)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def pieces(code):
    """The block, cut where lines are left out."""
    return [piece for piece in re.split(r"^[ ]*// \.\.\.\n", code, flags=re.MULTILINE) if piece.strip()]


def find(piece, lines, start):
    """Index of the line after the first place at or after `start` where the piece stands, or None."""
    wanted = textwrap.dedent(piece).strip("\n").split("\n")
    for first in range(start, len(lines) - len(wanted) + 1):
        if textwrap.dedent("\n".join(lines[first : first + len(wanted)])).split("\n") == wanted:
            return first + len(wanted)
    return None


def problem(root, path, whole, code):
    if path is None:
        return "no <!-- file --> before it"
    file = root / path
    if not file.is_file():
        return f"there is no file {path}"
    text = file.read_text()
    if whole:
        return None if code == text else f"differs from {path}"
    at = 0
    for piece in pieces(code):
        at = find(piece, text.splitlines(), at)
        if at is None:
            return f"not in {path}: {piece.strip().splitlines()[0]}"
    return None


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    root = pathlib.Path(sys.argv[1])
    failures = blocks = 0
    for name in sys.argv[2:]:
        document = pathlib.Path(name).read_text()
        for block in BLOCK.finditer(document):
            blocks += 1
            what = problem(root, block["path"], block["whole"], block["code"])
            if what:
                failures += 1
                print(f"{name}:{document.count(chr(10), 0, block.start()) + 1}: {what}")
    print(f"{blocks} blocks, {failures} differ")
    sys.exit(failures != 0)


if __name__ == "__main__":
    main()
