"""The programs of the documentation run as they stand, those of a page one after another on the same ranks."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("torch")

DOCUMENTS = pathlib.Path(__file__).parents[3] / "docs"

#: For each page: what a block has that is a whole program, how many there are, and what they print.
PAGES = {
    "pytorch": ("destroy_process_group()", 3, "tensor([1., 1., 1., 1.])"),
    "jax": ("Job.from_env()", 1, "rank 1: "),
}


def programs(page):
    """The blocks of the page that are whole programs."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCUMENTS / f"{page}.md").read_text(), re.DOTALL)
    return [block for block in blocks if "import" in block and PAGES[page][0] in block]


@pytest.mark.parametrize("page", PAGES)
def test_the_programs_of_the_page_run(page, tmp_path):
    if page == "jax":
        pytest.importorskip("jax")
    _, count, prints = PAGES[page]
    assert len(programs(page)) == count
    for number, program in enumerate(programs(page)):
        (tmp_path / f"program{number}.py").write_text(program)
    file = tmp_path / "all.py"
    file.write_text(f"import runpy\nfor number in range({count}):\n    runpy.run_path(f'{tmp_path}/program{{number}}.py')\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(file)]
    environment = {**os.environ, "WARPLINK_DEVICE": "host", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert prints in done.stdout
