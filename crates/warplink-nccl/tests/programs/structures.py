"""Structures of NCCL's headers that only some calls take."""

import ctypes
from ctypes import c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p


class Team(ctypes.Structure):
    _fields_ = [("ranks", c_int), ("rank", c_int), ("stride", c_int)]


class Header(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("magic", c_uint), ("version", c_uint), ("rest", ctypes.c_ubyte * 240)]


def header(bytes_=256):
    return Header(bytes_, 0xCAFEBEEF, 22907)


class CallConfig(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("extensions", c_void_p),
        ("blocks", c_int * 4),
        ("algorithms", c_char_p),
        ("must_follow", c_int),
        ("policy", c_int),
        ("tag", c_uint64),
        ("launched", c_void_p),
    ]


def simulation(magic=0x74685283):
    return Header(24, magic, 22907)
