"""The programs of the documentation run as they stand."""

import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("torch")

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "pytorch.md"


def programs():
    """The blocks of the page that are whole programs."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [block for block in blocks if "init_process_group" in block and "destroy" in block]


@pytest.mark.parametrize("number", range(3))
def test_the_programs_of_the_page_run(number, tmp_path):
    assert len(programs()) == 3
    file = tmp_path / "program.py"
    file.write_text(programs()[number])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert number != 0 or "tensor([1., 1., 1., 1.])" in done.stdout
