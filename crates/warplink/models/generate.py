#!/usr/bin/env python3
"""Writes the hardware models that estimates are compared with, next to this file.

They hold figures that were measured on eight H200 one by one (docs/performance.md), and rough figures of a
machine without a GPU. Times of matrix multiplications come from a
formula here; a model that `warplink tune` has measured replaces these files. Where there is one of two
H200, h200-2.json, that of eight takes from it what does not depend on their number.
"""

import json
import pathlib

HERE = pathlib.Path(__file__).parent
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = [1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]


def significant(value):
    return float(f"{value:.4g}")


def curve(points, scale=1e-6):
    return [[int(size), significant(time * scale)] for size, time in points]


def tiles_in_waves(m, k, n, flops, tile, multiprocessors, floor, memory, size):
    """Seconds of a product whose tiles run on the multiprocessors in waves."""
    tiles = -(-m // tile[0]) * -(-n // tile[1])
    if tiles > multiprocessors:
        # After the first wave, tiles no longer end together; at the end, half of the device is idle
        # for the time of a tile, or less where the last wave is fuller.
        waves = tiles / multiprocessors
        waves = min(-(-tiles // multiprocessors), waves + 0.5)
    else:
        # Where few tiles leave much of the device idle, a library takes smaller ones, which read
        # more for each product.
        waves = 0.55 ** min((multiprocessors // tiles).bit_length() - 1, 3)
    wave = 2.0 * tile[0] * tile[1] * k * multiprocessors / flops
    moved = (m * k + k * n + m * n) * size / memory
    return floor + max(waves * wave, moved)


def grid(dtype, sizes, seconds):
    return {
        "dtype": dtype,
        "aligned": True,
        "m": sizes,
        "k": sizes,
        "n": sizes,
        "seconds": [significant(seconds(m, k, n)) for m in sizes for k in sizes for n in sizes],
    }


def monotone(formula):
    """The largest time of any smaller shape on the grid: fuller waves make some shapes faster."""
    known = {}
    for m in SIZES:
        for k in SIZES:
            for n in SIZES:
                before = [
                    known[shape]
                    for shape in (
                        (SIZES[max(SIZES.index(m) - 1, 0)], k, n),
                        (m, SIZES[max(SIZES.index(k) - 1, 0)], n),
                        (m, k, SIZES[max(SIZES.index(n) - 1, 0)]),
                    )
                    if shape in known
                ]
                known[m, k, n] = max([formula(m, k, n), *before])
    return lambda m, k, n: known[m, k, n]


def gpu_gemm(flops, flops_f32, multiprocessors, floor, memory):
    def formula(rate, size):
        return monotone(
            lambda m, k, n: tiles_in_waves(
                m, k, n, rate, (128, 256), multiprocessors, floor, memory, size
            )
        )

    return {
        "tile": [128, 256],
        "smallest_tile": [64, 64],
        "tail_filled": 0.5,
        "tile_sharers": 4.0,
        "grids": [
            grid("bf16", SIZES, formula(flops, 2)),
            grid("f16", SIZES, formula(flops, 2)),
            grid("f32", SIZES, formula(flops_f32, 4)),
        ],
    }


def h200():
    def collective(name, world, points):
        return {"name": name, "world": world, "times": curve(points)}

    two = [KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB]
    eight = [8 * KIB, 64 * KIB, 512 * KIB, 4 * MIB, 32 * MIB, 256 * MIB, 2 * GIB]
    return {
        "format": 1,
        "name": "8 x H200, NVSwitch",
        "device": {
            "kind": "cuda",
            "model": "H200",
            "ranks": 8,
            "topology": "NVSwitch, all pairs",
            "multiprocessors": 132,
            "shared": False,
        },
        "source": {
            "machine": "nodes of 2, 4 and 8 H200, driver 580, CUDA 13.0, NCCL 2.28.3",
            "date": "2026-11-21",
            "command": "models/generate.py",
            "notes": "rates and latencies measured one by one; times of matrix multiplications by a formula",
        },
        "uncertainty": 1.6,
        "memory": {
            "rate": 4.0e12,
            "sum_rate": 4.0e12,
            "kernel": 2.0e-6,
            "copy": curve([(4 * KIB, 2.0), (MIB, 3.0), (64 * MIB, 36.0), (GIB, 540.0)]),
            "copy_occupancy": 0.0,
            "sum_occupancy": 1.0,
        },
        "gemm": gpu_gemm(745e12, 54e12, 132, 2.0e-6, 4.0e12),
        "link": {
            "kernel_limit": 256 * KIB,
            "kernel_put": curve([(4 * KIB, 2.0), (16 * KIB, 2.33), (64 * KIB, 3.48), (256 * KIB, 8.1)]),
            "kernel_get": curve([(4 * KIB, 2.8), (16 * KIB, 3.0), (64 * KIB, 4.0), (256 * KIB, 9.1)]),
            "kernels": {
                "limit": 4 * MIB,
                "packet_limit": 256 * KIB,
                "packet_blocks": 64,
                "packet_threads": 128,
                "store_blocks": [[16 * KIB, 1], [64 * KIB, 4], [256 * KIB, 16], [MIB, 32], [4 * MIB, 64]],
            },
            "kernels_put": curve(
                [(KIB, 1.98), (4 * KIB, 2.03), (16 * KIB, 2.19), (64 * KIB, 2.48), (256 * KIB, 3.58),
                 (MIB, 6.27), (4 * MIB, 14.97)]
            ),
            "kernels_get": curve(
                [(4 * KIB, 3.35), (16 * KIB, 3.67), (64 * KIB, 3.9), (256 * KIB, 4.6), (MIB, 6.7), (4 * MIB, 15.5)]
            ),
            "put": curve(
                [(4 * KIB, 4.0), (64 * KIB, 5.7), (MIB, 8.2), (4 * MIB, 16.3), (16 * MIB, 49.2),
                 (64 * MIB, 174.0), (256 * MIB, 682.0), (GIB, 2711.0)]
            ),
            "get": curve(
                [(4 * KIB, 4.4), (64 * KIB, 6.1), (MIB, 8.9), (4 * MIB, 17.5), (16 * MIB, 48.8),
                 (64 * MIB, 175.0), (256 * MIB, 683.5), (GIB, 2712.0)]
            ),
            "put_ring": 388e9,
            "get_ring": 371e9,
            "put_rotated": 380e9,
            "get_rotated": 349e9,
            "stored": 355e9,
            "stored_exposed": 0.55,
        },
        "latency": {
            "word": 2.0e-6,
            "more_words": 0.6e-6,
            "kernel_word": 0.67e-6,
            "words_in_kernel": 4,
            "event": 1.5e-6,
            "launch": 2.5e-6,
            "room": 0.0,
            "captured_copy": 0.0,
            "collective": 0.0,
        },
        "host": {
            "matmul": 1.8e-6,
            "sum": 1.8e-6,
            "copy": 2.0e-6,
            "transfer": 3.7e-6,
            "word": 1.4e-6,
            "event": 0.3e-6,
            "collective": 8.0e-6,
            "graph": 6.0e-6,
        },
        "interference": {
            "matmul_beside_put": 0.98,
            "matmul_beside_get": 1.0,
            "copy_beside_matmul": 0.96,
        },
        "collectives": [
            collective("all_gather", 8, zip(eight, [10.7, 13.2, 13.7, 33.4, 111, 686, 5220])),
            collective("reduce_scatter", 8, zip(eight, [10.9, 11.9, 12.5, 32.0, 110, 714, 5365])),
            collective("all_to_all", 8, zip(eight, [8.6, 8.6, 11.1, 34.0, 114, 721, 5434])),
            collective("exchange", 8, zip(eight, [8.2, 9.7, 30.2, 39.3, 221, 756, 5867])),
            collective(
                "all_reduce", 8,
                [(KIB, 19.5), (64 * KIB, 23.4), (4 * MIB, 51.3), (64 * MIB, 359), (256 * MIB, 1356),
                 (GIB, 5237)],
            ),
            collective("all_gather", 2, zip(two, [5.41, 6.21, 6.70, 7.19, 11.1, 26.5, 45.5, 123, 435, 1680])),
            collective("reduce_scatter", 2, zip(two, [5.53, 6.04, 6.30, 7.10, 11.0, 24.0, 51.6, 165, 586, 2030])),
            collective("all_to_all", 2, zip(two, [6.37, 7.77, 8.00, 8.38, 13.5, 19.0, 38.0, 111, 387, 1491])),
            collective("exchange", 2, zip(two, [6.51, 7.96, 8.26, 10.1, 15.2, 24.9, 60.8, 203, 755, 2941])),
            collective("all_reduce", 2, zip(two, [5.98, 6.95, 7.24, 8.57, 15.5, 34.4, 72.0, 233, 841, 3242])),
        ],
    }


def with_measured(model):
    """Measurements on fewer of the same devices take precedence over a formula."""
    path = HERE / "h200-2.json"
    if path.exists():
        measured = json.loads(path.read_text())
        for part in ["memory", "gemm", "latency", "host", "interference", "lanes"]:
            model[part] = measured[part]
        for name in ["kernel_limit", "kernel_put", "kernel_get", "kernels", "kernels_put", "kernels_get", "put", "get"]:
            model["link"][name] = measured["link"][name]
        model["source"]["notes"] = "rates of eight at once measured one by one; the rest on two: " + (
            measured["source"]["command"]
        )
    return model


def host():
    sizes = [1, 16, 64, 256, 1024]

    def product(m, k, n):
        return 5e-6 + 2.0 * m * k * n / 30e9

    def copies(floor, rate):
        points = [64, 4 * KIB, 64 * KIB, MIB, 16 * MIB]
        return [[size, significant(floor + size / rate)] for size in points]

    def collective(name, floor, rate):
        return {"name": name, "world": 2, "times": copies(floor, rate)}

    copy = copies(3e-6, 5e9)
    return {
        "format": 1,
        "name": "processors of one machine",
        "device": {
            "kind": "host",
            "model": "",
            "ranks": 2,
            "topology": "shared memory",
            "multiprocessors": 2,
            "shared": True,
        },
        "source": {
            "machine": "a machine with two hardware threads",
            "date": "2026-11-22",
            "command": "models/generate.py",
            "notes": "rough figures: how they compare is what counts",
        },
        "uncertainty": 1.0,
        "memory": {
            "rate": 40e9,
            "sum_rate": 4e9,
            "kernel": 3e-6,
            "copy": copy,
            "copy_occupancy": 0.5,
            "sum_occupancy": 0.5,
        },
        "gemm": {
            "tile": [1 << 20, 1 << 20],
            "smallest_tile": [1 << 20, 1 << 20],
            "tail_filled": 0.5,
            "tile_sharers": 4.0,
            "grids": [grid(dtype, sizes, product) for dtype in ["f32", "f16", "bf16"]],
        },
        "link": {
            "kernel_limit": 0,
            "kernel_put": [],
            "kernel_get": [],
            # Kernels only where they are asked for: threads that wait for one another are no faster.
            "kernels": {
                "limit": 0,
                "packet_limit": 16 * KIB,
                "packet_blocks": 4,
                "packet_threads": 64,
                "store_blocks": [[16 * KIB, 1], [MIB, 4]],
            },
            "kernels_put": [],
            "kernels_get": [],
            "put": copy,
            "get": copy,
            "put_ring": 5e9,
            "get_ring": 5e9,
            "put_rotated": 5e9,
            "get_rotated": 5e9,
            "stored": 5e9,
            "stored_exposed": 1.0,
        },
        "latency": {
            "word": 5e-6,
            "more_words": 1e-6,
            "kernel_word": 1e-6,
            "words_in_kernel": 0,
            "event": 10e-6,
            "launch": 1e-6,
            "room": 0.0,
            "captured_copy": 0.0,
            "collective": 0.0,
        },
        "host": {
            "matmul": 0.3e-6,
            "sum": 0.3e-6,
            "copy": 0.2e-6,
            "transfer": 0.5e-6,
            "word": 0.2e-6,
            "event": 0.2e-6,
            "collective": 0.5e-6,
            "graph": 5e-6,
        },
        "interference": {
            "matmul_beside_put": 1.0,
            "matmul_beside_get": 1.0,
            "copy_beside_matmul": 1.0,
        },
        "collectives": [
            collective(name, 100e-6, 2.5e9)
            for name in ["all_gather", "reduce_scatter", "all_to_all", "exchange", "all_reduce"]
        ],
        # By `warplink tune`'s programs, optimized: 56 ns for a packet, 10 GB/s for a copy.
        "lanes": {
            "launch": 3e-6,
            "signal": 5e-6,
            "fence": 1e-6,
            "packet": 10e-6,
            "packet_round": 56e-9,
            "load": 2e-6,
            "peer_load": 3e-6,
            "block_threads": 1,
            "block_own": 20e9,
            "block_stored": 10e9,
            "block_loaded": 10e9,
            "stored": 10e9,
            "loaded": 10e9,
        },
    }


for name, make in [("h200-8", lambda: with_measured(h200())), ("host", host)]:
    (HERE / f"{name}.json").write_text(json.dumps(make(), separators=(",", ":")) + "\n")
