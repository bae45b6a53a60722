"""Try MLX out in a process of its own, for `millstream doctor`: prints a line of JSON after each stage.

A crash, a hang or an exception ends the process, and the last line says how far it came.
"""

from __future__ import annotations

import json
from typing import Any

from millstream.backend.environment import load_blas


def stage(done: str, /, **facts: Any) -> None:
    print(json.dumps({"stage": done} | facts), flush=True)


def main() -> None:
    stage("start")
    stage("blas", blas=load_blas())
    import mlx.core as mx

    stage("import", version=getattr(mx, "__version__", None), file=mx.__file__)
    from millstream.backend.device import current_device

    device = current_device()
    info = {} if device.is_cpu else mx.device_info()
    working_set = info.get("max_recommended_working_set_size")
    stage("device", kind=device.kind, name=device.name, memory=device.memory_bytes, working_set=working_set)
    ones = mx.ones((64, 64))
    stage("compute", right=(ones @ ones).sum().item() == 64.0**3)


if __name__ == "__main__":
    main()
