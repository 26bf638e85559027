"""The GPUs of this machine, as nvidia-smi reports them."""

import shutil
import subprocess

from llmserve.cli.top.samples import GpuInfo

TIMEOUT_S = 5.0
NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=index,memory.used,memory.total,utilization.gpu,name",
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
        index, used, total, busy, name = (cell.strip() for cell in line.split(",", 4))
        found.append(
            GpuInfo(
                index=int(index),
                name=name,
                used_bytes=bytes_in(used),
                total_bytes=bytes_in(total),
                busy_percent=number_in(busy),
            )
        )
    return tuple(found)


def bytes_in(mib: str) -> int | None:
    number = number_in(mib)
    return None if number is None else number << 20


def number_in(cell: str) -> int | None:
    """None for "[N/A]", as of a device in parts (MIG) or with the memory of its host, and for "[Unknown Error]"."""
    return int(cell) if cell.isdecimal() else None
