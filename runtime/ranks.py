"""The placement of ranks on nodes, the valid splits of a model, and the rendezvous of ranks. Imports no torch.

A replica has tp_size * pp_size ranks; rank = pp_rank * tp_size + tp_rank. The ranks of one replica may be on several
nodes, the same number on each; several replicas (dp) are all on one node. Communication between ranks is in
distributed/.
"""

import errno
import os
import socket
from pathlib import Path
from typing import NamedTuple

import psutil

from llmserve.runtime import machine
from llmserve.runtime.config import ConfigError, ServerArgs
from llmserve.runtime.models.configs import ModelConfig


class Place(NamedTuple):
    """The position of a scheduler process in the instance."""

    dp_rank: int
    pp_rank: int
    tp_rank: int

    @property
    def name(self) -> str:
        return f"scheduler-dp{self.dp_rank}-pp{self.pp_rank}-tp{self.tp_rank}"


def places(args: ServerArgs) -> list[Place]:
    """The ranks that run on this node, in order; the first rank of a replica is the one that schedules."""
    first, count = args.node_rank * ranks_per_node(args), ranks_per_node(args)
    return [
        Place(replica, rank // args.tp_size, rank % args.tp_size)
        for replica in range(args.dp_size)
        for rank in range(first, first + count)
    ]


def rank_name(args: ServerArgs, dp_rank: int, rank: int) -> str:
    """The name of a rank, with its node if there are several."""
    name = Place(dp_rank, rank // args.tp_size, rank % args.tp_size).name
    return name if args.nnodes == 1 else f"{name} on node {rank // ranks_per_node(args)}"


def ranks_per_node(args: ServerArgs) -> int:
    """Ranks of one replica on each node."""
    return args.tp_size * args.pp_size // args.nnodes


def alone(args: ServerArgs) -> bool:
    """Whether a single rank is all there is: no tensor, pipeline or data parallelism."""
    return args.tp_size * args.pp_size * args.dp_size == 1


def threads_of(args: ServerArgs, steps: int | None = None) -> int:
    """CPU threads of a rank: --threads, else an equal share of the cores that this process may use, at least one.

    While only `steps` steps are under way in the replica, the ranks of waiting stages leave their share to the others.
    """
    stages = max(1, ranks_per_node(args) // args.tp_size)
    busy = stages if steps is None else min(steps, stages)
    return args.threads or max(1, machine.cores() * stages // (len(places(args)) * busy))


# ---- what cannot be --------------------------------------------------------------------------------------------------


def check_split(args: ServerArgs, config: ModelConfig) -> None:
    """Raises ConfigError, naming the sizes that would work, when the model cannot be split like this."""
    tp_size, pp_size = args.tp_size, args.pp_size
    if tp_size * pp_size > 1 and config.implementation == "transformers":
        raise ConfigError(
            f"{config.architecture} runs through transformers' modules, which cannot be split: "
            "use --tp-size 1 --pp-size 1; --dp-size works"
        )
    if tp_size > 1 and config.qk_norm == "projection":
        raise ConfigError(
            f"--tp-size {tp_size}: {config.model_type} normalizes queries over all heads together, which cannot be "
            f"split by heads; use --tp-size 1, and --pp-size up to {config.num_layers}"
        )
    if not tensor_parallel(config, tp_size, pp_size):
        sizes = [n for n in range(1, config.num_heads + 1) if tensor_parallel(config, n, pp_size)]
        raise ConfigError(
            f"--tp-size {tp_size}: {config.num_heads} heads, {config.num_kv_heads} KV heads and an MLP of "
            f"{config.intermediate_size} cannot be shared so; what works is {', '.join(map(str, sizes))}"
        )
    if pp_size > config.num_layers:
        raise ConfigError(
            f"--pp-size {pp_size}: the model has {config.num_layers} layers, so at most {config.num_layers} stages"
        )
    if args.device == "cuda":
        check_devices(len(places(args)), visible_devices())


def tensor_parallel(config: ModelConfig, tp_size: int, pp_size: int) -> bool:
    """Whether `tp_size` ranks can share each layer. With more ranks than KV heads, neighbouring ranks hold the same
    head.
    """
    kv_heads = config.num_kv_heads
    return (
        config.num_heads % tp_size == 0
        and (kv_heads % tp_size == 0 or tp_size % kv_heads == 0)
        and config.intermediate_size % tp_size == 0
        and (pp_size == 1 or config.hidden_size % tp_size == 0)
    )


def check_devices(ranks: int, devices: int) -> None:
    """Raises ConfigError when this node has fewer CUDA devices than ranks."""
    if ranks > devices:
        fewer = f"up to {devices} work (--tp-size times --pp-size times --dp-size)" if devices else "none works"
        raise ConfigError(
            f"{ranks} ranks on this node need a CUDA device each and there are {devices}: {fewer}; with --device cpu "
            "ranks share the cores"
        )


def visible_devices() -> int:
    """The number of CUDA devices, from /dev and CUDA_VISIBLE_DEVICES, without initializing CUDA."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return present if chosen is None else min(present, len([name for name in chosen.split(",") if name.strip()]))


# ---- where they meet -------------------------------------------------------------------------------------------------


def rendezvous(args: ServerArgs, directory: str, dp_rank: int) -> str:
    """The URL of the store through which the ranks of a replica meet: see make_store in distributed/groups.py.

    On one node it is a file in the instance's private directory, which no other launch can take, or a loopback port
    with --nccl-port. Several nodes meet at --dist-init-addr.
    """
    if args.nnodes > 1:
        host, port = init_address(args)
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    if args.nccl_port is not None:
        return f"tcp://127.0.0.1:{args.nccl_port + dp_rank}{directory}"
    return f"file://{directory}/ranks-{dp_rank}"


def init_address(args: ServerArgs) -> tuple[str, int]:
    """Host and port of the rendezvous: --dist-init-addr, with --nccl-port where it has no port."""
    assert args.dist_init_addr is not None
    host, _, port = args.dist_init_addr.rpartition(":")
    if not host:
        host, port = args.dist_init_addr, str(args.nccl_port)
    return host.strip("[]"), int(port)


def check_ports(args: ServerArgs) -> None:
    """Raises ConfigError when a rendezvous port is taken, or its host is not this one.

    A port that is taken later is reported by the ranks.
    """
    if args.node_rank > 0 or (args.nnodes == 1 and args.nccl_port is None):
        return
    host, port = init_address(args) if args.nnodes > 1 else ("127.0.0.1", args.nccl_port or 0)
    local_address(host, port)
    for offset in range(args.dp_size):
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            socket.create_server((host, port + offset), family=family).close()
        except OSError as error:
            foreign = error.errno == errno.EADDRNOTAVAIL
            advice = "give an address of node 0" if foreign else "choose another port, or on one node none at all"
            fault = os.strerror(error.errno or 0)
            raise ConfigError(f"the ranks cannot meet at {host} port {port + offset}: {fault}; {advice}") from None


def network_environment(args: ServerArgs) -> dict[str, str]:
    """Variables that make gloo and NCCL use the loopback interface, or the one that leads to --dist-init-addr."""
    address = "127.0.0.1" if args.nnodes == 1 else local_address(*init_address(args))
    name = interface_of(address)
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"} if name else {}  # else eth1 is eth10 too


def local_address(host: str, port: int) -> str:
    """This machine's own address on the route to `host`. Raises ConfigError when there is no route."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that is invalid in DNS
        reason = getattr(error, "strerror", None) or "this is no name of a host"
        raise ConfigError(f"--dist-init-addr {host}:{port} cannot be reached: {reason}") from None


def interface_of(address: str) -> str:
    """The name of the network interface with this address; empty if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return name
    return ""
