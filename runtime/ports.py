"""PortArgs: the addresses of the five channels of one replica of an instance.

The sockets are files in the instance's directory (see instance.py). Nothing here opens one.
"""

from pathlib import Path

import msgspec

MAX_IPC_PATH_BYTES = 107
"""sizeof(sockaddr_un.sun_path) less its closing NUL."""


class PortArgs(msgspec.Struct, frozen=True, kw_only=True):
    """ZeroMQ addresses, named as in SGLang, and the rendezvous port of the ranks (0: none is needed)."""

    tokenizer_ipc_name: str
    scheduler_input_ipc_name: str
    detokenizer_ipc_name: str
    rpc_ipc_name: str
    metrics_ipc_name: str
    nccl_port: int = 0

    @staticmethod
    def init_new(directory: Path, dp_rank: int = 0, nccl_port: int = 0) -> "PortArgs":
        """The addresses of replica `dp_rank` of the instance in `directory`.

        All replicas share the sockets of the front and the detokenizer; each has input and RPC sockets of its own.
        Raises ValueError when a path is too long for a Unix socket.
        """
        suffix = f"-{dp_rank}" if dp_rank else ""
        names = {
            "tokenizer_ipc_name": "tokenizer.sock",
            "scheduler_input_ipc_name": f"scheduler{suffix}.sock",
            "detokenizer_ipc_name": "detokenizer.sock",
            "rpc_ipc_name": f"rpc{suffix}.sock",
            "metrics_ipc_name": "metrics.sock",
        }
        return PortArgs(**{field: ipc_address(directory / name) for field, name in names.items()}, nccl_port=nccl_port)


def replica_of(rpc_address: str) -> int:
    """The dp_rank in the address of a replica's RPC socket."""
    return int(rpc_address.removesuffix(".sock").rpartition("rpc")[2].removeprefix("-") or 0)


def ipc_address(path: Path) -> str:
    """The ZeroMQ address of a socket file. Raises ValueError when the path is too long for a Unix socket."""
    length = len(str(path).encode())
    if length > MAX_IPC_PATH_BYTES:
        raise ValueError(
            f"the socket path {path} has {length} bytes; a Unix socket allows {MAX_IPC_PATH_BYTES}: "
            "choose a shorter --name, or a shorter XDG_RUNTIME_DIR"
        )
    return f"ipc://{path}"
