"""The GPUs of this machine, as nvidia-smi tells them."""

import shutil
import subprocess

from llmserve.cli.top.samples import GpuInfo

TIMEOUT_S = 5.0
NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=index,name,memory.used,memory.total,utilization.gpu",
    "--format=csv,noheader,nounits",
)


def are_here() -> bool:
    """Whether there may be some."""
    return shutil.which("nvidia-smi") is not None


def ask_nvidia_smi() -> tuple[GpuInfo, ...]:
    """The devices of this machine; none when it cannot be told."""
    try:
        done = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        return parse_gpus(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()


def parse_gpus(text: str) -> tuple[GpuInfo, ...]:
    """What nvidia-smi printed, a device a line; memory comes in MiB. Raises ValueError."""
    found = []
    for line in text.splitlines():
        index, name, used, total, busy = (cell.strip() for cell in line.split(","))
        found.append(
            GpuInfo(
                index=int(index),
                name=name,
                used_bytes=int(used) << 20,
                total_bytes=int(total) << 20,
                busy_percent=float(busy),
            )
        )
    return tuple(found)
