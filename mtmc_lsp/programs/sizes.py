"""Sizes and dtypes as people use them, among them sizes that are no multiple of a tile."""

from __future__ import annotations

DTYPES = ("f32", "f32", "f32", "bf16", "bf16", "f16")
"""Repeated by frequency."""
BATCH = (1, 2, 4, 8, 8, 16, 16, 32, 64)
ROWS = (256, 512, 1000, 1024, 2048, 3000, 4096, 6000, 8192, 16384, 32768)
"""Tokens or samples in one dimension."""
SEQUENCE = (77, 128, 197, 256, 257, 384, 512, 577, 1000, 1024, 1500, 2048)
WIDTH = (64, 128, 192, 256, 320, 384, 512, 640, 768, 896, 1024, 1152, 1280, 1536, 2048, 2304, 2560, 3072, 4096, 5120)
"""Hidden sizes of models."""
ANY_WIDTH = (*WIDTH, 100, 300, 1000, 1001, 3000, 10000)
VOCABULARY = (1000, 8192, 21843, 30522, 32000, 32768, 50257, 50304, 65536)
CLASSES = (2, 10, 21, 80, 91, 100, 365, 1000)
CHANNELS = (16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512)
"""All multiples of 8."""
GROUPS = (4, 8)
"""Numbers of groups that divide each of CHANNELS."""
IMAGE = (7, 14, 16, 20, 28, 32, 40, 56, 64, 75, 80, 96, 112, 128)
LARGE_IMAGE = (128, 160, 224, 256, 300, 384, 512)
SIGNAL = (400, 512, 1000, 1024, 2048, 4000, 8000, 16000)
"""Lengths of one-dimensional signals."""
HEADS = (4, 6, 8, 12, 16, 20, 32)
HEAD_WIDTH = (32, 40, 64, 64, 80, 96, 128, 128)
EXPERTS = (8, 16, 60, 64, 128, 256)
PARAMETERS = (1_000_000, 2_359_296, 4_194_304, 10_000_000, 16_777_216, 25_000_000)
"""Elements of one flat optimizer state."""
MAX_ELEMENTS = 1 << 26
"""Of one argument."""
MAX_INTERMEDIATE_ELEMENTS = 1 << 27
"""Of one value that a program computes, such as attention scores."""

CONSTRUCTOR_NAMES = {
    "B": "batch",
    "C": "channels",
    "D": "dim",
    "E": "num_experts",
    "F": "features",
    "G": "groups",
    "H": "height",
    "I": "hidden",
    "K": "in_features",
    "L": "length",
    "M": "out_features",
    "N": "rows",
    "O": "out_channels",
    "R": "rank",
    "S": "seq_len",
    "T": "steps",
    "V": "vocab_size",
    "W": "width",
}
"""The argument of a module's constructor that has a named size."""
