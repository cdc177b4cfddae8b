#!/usr/bin/env python3
"""Draws what `scripts/torch_host_times.py` measured, as a picture for documents. Needs matplotlib.

    scripts/plot_torch_host_times.py torch_host_times.json docs/torch-host-times.svg
"""

import json
import sys

import matplotlib
import matplotlib.pyplot as plt

NAMES = {
    "nccl": "NCCL's backend",
    "gloo": "Gloo's backend",
    "symm_mem": "torch.ops.symm_mem",
    "warplink": "Warplink",
    "warplink direct": "Warplink, direct",
}
COLORS = {"warplink": "#1b7837", "warplink direct": "#7fbf7b"}
OTHERS = "#8c8c8c"


def size(sizes):
    """What a row was measured on: bytes, or m, k and n."""
    if isinstance(sizes, list):
        return ", ".join(map(str, sizes))
    return f"{sizes >> 20} MiB" if sizes >> 20 else f"{sizes >> 10} KiB"


def panel(axes, rows, title):
    """Bars of each row's contenders, from top to bottom."""
    contenders = list(dict.fromkeys(name for row in rows for name in row["host_us"]))
    height = 0.8 / len(contenders)
    for number, name in enumerate(contenders):
        places = [row - 0.4 + height * (number + 0.5) for row in range(len(rows))]
        values = [row["host_us"].get(name, 0) for row in rows]
        axes.barh(places, values, height, label=NAMES.get(name, name), color=COLORS.get(name, OTHERS))
    axes.set_yticks(range(len(rows)), [f"{row['call']}\n{size(row['sizes'])}" for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("µs until the call returns")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=len(contenders), frameon=False)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    with open(sys.argv[1]) as file:
        report = json.load(file)
    rows = [row for row in report["rows"] if row["host_us"]]
    collectives = [row for row in rows if not isinstance(row["sizes"], list)]
    fused = [row for row in rows if isinstance(row["sizes"], list)]
    # The same picture for the same figures.
    matplotlib.rcParams["svg.hashsalt"] = "warplink"
    figure, axes = plt.subplots(1, 2, figsize=(11, 6.5), layout="constrained")
    panel(axes[0], collectives, "collectives, by bytes")
    panel(axes[1], fused, "fused operations, by m, k, n")
    figure.suptitle(f"{report['ranks']} ranks, {report['gpus']} × {report['device']}, PyTorch {report['torch']}", fontsize=10)
    figure.savefig(sys.argv[2], metadata={"Date": None})


if __name__ == "__main__":
    main()
