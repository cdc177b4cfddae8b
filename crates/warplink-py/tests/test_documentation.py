"""The programs of the documentation run as they stand."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("torch")

DOCUMENTS = pathlib.Path(__file__).parents[3] / "docs"

#: For each page: what a block has that is a whole program, and what each of its programs prints.
PAGES = {
    "pytorch": ("destroy_process_group()", ["tensor([1., 1., 1., 1.])", "", ""]),
    "jax": ("Job.from_env()", ["rank 1: "]),
}


def programs(page):
    """The blocks of the page that are whole programs."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCUMENTS / f"{page}.md").read_text(), re.DOTALL)
    return [block for block in blocks if "import" in block and PAGES[page][0] in block]


@pytest.mark.parametrize(("page", "number"), [(page, number) for page in PAGES for number in range(len(PAGES[page][1]))])
def test_the_programs_of_the_pages_run(page, number, tmp_path):
    if page == "jax":
        pytest.importorskip("jax")
    prints = PAGES[page][1]
    assert len(programs(page)) == len(prints)
    file = tmp_path / "program.py"
    file.write_text(programs(page)[number])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(file)]
    environment = {**os.environ, "WARPLINK_DEVICE": "host", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert prints[number] in done.stdout
