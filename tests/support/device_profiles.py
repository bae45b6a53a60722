"""Simulated devices with costs as they were measured: families of models on an H200, and slower machines."""

from __future__ import annotations

from dataclasses import replace

from support.pipelined_device import PipelinedDevice

LLAMA_1B = PipelinedDevice(
    ((1, 0.0012), (32, 0.0017), (64, 0.0020), (256, 0.0032)),
    launch=0.0012,
    build=0.001,
    join=0.0006,
    encode=0.002,
    token=3.4e-6,
    weights=0.001,
    drop=0.0003,
)
LLAMA_8B = PipelinedDevice(
    ((1, 0.0049), (32, 0.0062), (64, 0.0075)),
    launch=0.002,
    build=0.0035,
    join=0.004,
    encode=0.0045,
    token=25e-6,
    weights=0.003,
    drop=0.0015,
)
LLAMA_8B_PACKED = PipelinedDevice(
    ((1, 0.0045), (32, 0.0075), (64, 0.0105)),
    launch=0.002,
    build=0.0035,
    join=0.004,
    encode=0.0055,
    token=20e-6,
    weights=0.022,
    drop=0.0015,
)
"""A pass unpacks all weights, however few tokens it has."""
QWEN3_4B = PipelinedDevice(
    ((1, 0.0039), (32, 0.0056), (64, 0.0084)),
    launch=0.0022,
    build=0.004,
    join=0.0045,
    encode=0.005,
    token=18e-6,
    weights=0.002,
    drop=0.0015,
)
MIXTURE = PipelinedDevice(
    ((1, 0.0025), (32, 0.0073), (64, 0.009)),
    launch=0.0018,
    build=0.004,
    join=0.004,
    encode=0.012,
    token=28e-6,
    weights=0.0117,
    drop=0.0015,
)
GEMMA3_1B = PipelinedDevice(
    ((1, 0.0019), (32, 0.003), (64, 0.004)),
    launch=0.0018,
    build=0.004,
    join=0.004,
    encode=0.0045,
    token=5.2e-6,
    weights=0.001,
    drop=0.001,
)
LFM2_1B = PipelinedDevice(
    ((1, 0.001), (32, 0.0016), (64, 0.0022)),
    launch=0.001,
    build=0.003,
    join=0.003,
    encode=0.003,
    token=5e-6,
    weights=0.001,
    drop=0.001,
)

H200 = {
    "llama 1b": LLAMA_1B,
    "llama 8b": LLAMA_8B,
    "llama 8b in 4 bits": LLAMA_8B_PACKED,
    "qwen3 4b": QWEN3_4B,
    "mixture": MIXTURE,
    "gemma3 1b": GEMMA3_1B,
    "lfm2 1b": LFM2_1B,
}

MAC = PipelinedDevice(
    ((1, 0.025), (8, 0.032), (32, 0.06), (64, 0.1)),
    launch=0.003,
    build=0.003,
    join=0.001,
    encode=0.003,
    token=0.002,
    weights=0.02,
)
"""A laptop that reads 500 tokens a second."""

CPU = PipelinedDevice(
    ((1, 0.035), (4, 0.09), (16, 0.25), (64, 0.9)),
    launch=0.001,
    build=0.001,
    join=0.001,
    encode=0.001,
    token=0.008,
    weights=0.03,
    spans=False,
)
"""Two cores."""


def badly_calibrated(device: PipelinedDevice) -> PipelinedDevice:
    """As a load found it that had the time for one row only, and measured too little."""
    return replace(device, calibrated_rows=(1,), mistaken=0.66)
