"""The command ``warplink`` of the wheel: runs the program of that name, which Cargo installs."""

from __future__ import annotations

import os
import pathlib
import sys

_MISSING = (
    "warplink: the program is not installed next to this Python package; expected it in WARPLINK_COMMAND, PATH or "
    "~/.cargo/bin; help: cargo install --locked --path crates/warplink-cli, in a clone of Warplink"
)


def find() -> pathlib.Path | None:
    """The program, which is not this command; None where there is none."""
    named = os.environ.get("WARPLINK_COMMAND")
    if named is not None:
        return pathlib.Path(named)
    own = pathlib.Path(sys.argv[0]).resolve()
    folders = [*os.get_exec_path(), str(pathlib.Path.home() / ".cargo" / "bin")]
    for folder in folders:
        found = pathlib.Path(folder) / "warplink"
        # Commands of other environments are scripts, too.
        if found.resolve() != own and os.access(found, os.X_OK) and found.is_file() and not _is_script(found):
            return found
    return None


def main() -> None:
    """Becomes the program. Exits with 127 and a message where there is none."""
    program = find()
    if program is None:
        print(_MISSING, file=sys.stderr)
        raise SystemExit(127)
    try:
        os.execv(program, ["warplink", *sys.argv[1:]])
    except OSError as error:
        print(f"warplink: {program} cannot be run: {error}", file=sys.stderr)
        raise SystemExit(126) from None


def _is_script(path: pathlib.Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return True
