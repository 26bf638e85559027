"""Which splits of a model there can be, where ranks run and where they meet."""

import socket
from io import BytesIO
from pathlib import Path

import msgspec
import pytest
import torch
from torch.distributed import DistStoreError

from checkpoints import make_tiny
from llmserve.runtime import ranks
from llmserve.runtime.child import ChildInit, Reporter
from llmserve.runtime.config import ConfigError, ServerArgs
from llmserve.runtime.distributed.errors import RankLost
from llmserve.runtime.distributed.groups import make_store
from llmserve.runtime.models.configs import ModelConfig
from llmserve.runtime.models.hub import resolve
from llmserve.runtime.ports import PortArgs
from llmserve.runtime.scheduler import process


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """4 heads, 2 KV heads, an MLP of 96, 3 layers."""
    return resolve(str(make_tiny(tmp_path_factory.mktemp("model")))).config


def args(**options: object) -> ServerArgs:
    return ServerArgs.validated(model="m", **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tp_size": 3}, "what works is 1, 2, 4"),
        ({"tp_size": 8}, "4 heads, 2 KV heads"),
        ({"pp_size": 4}, "--pp-size 4: the model has 3 layers"),
    ],
)
def test_splits_that_the_model_does_not_allow(config: ModelConfig, options: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ranks.check_split(args(**options), config)


def test_splits_that_it_allows(config: ModelConfig) -> None:
    for tp_size in (1, 2, 4):
        ranks.check_split(args(tp_size=tp_size, pp_size=3, device="cpu"), config)


def test_a_norm_over_all_heads_cannot_be_split(config: ModelConfig) -> None:
    olmo2 = msgspec.structs.replace(config, qk_norm="projection")
    ranks.check_split(args(pp_size=3), olmo2)
    with pytest.raises(ConfigError, match="use --tp-size 1, and --pp-size up to 3"):
        ranks.check_split(args(tp_size=2), olmo2)


def test_what_transformers_runs_can_only_be_replicated(config: ModelConfig) -> None:
    other = msgspec.structs.replace(config, implementation="transformers")
    ranks.check_split(args(dp_size=2), other)
    with pytest.raises(ConfigError, match="--dp-size works"):
        ranks.check_split(args(pp_size=2), other)


def test_every_cuda_rank_needs_a_device(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "visible_devices", lambda: 3)
    ranks.check_split(args(tp_size=2, device="cuda"), config)
    ranks.check_split(args(tp_size=2, dp_size=2, device="cpu"), config)
    with pytest.raises(ConfigError, match="4 ranks on this node need a CUDA device each and there are 3: up to 3"):
        ranks.check_split(args(tp_size=2, dp_size=2, device="cuda"), config)
    with pytest.raises(ConfigError, match="there are 0: none works; with --device cpu"):
        ranks.check_devices(1, 0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"node_rank": 1}, "--node-rank 1: with --nnodes 1 it is between 0 and 0"),
        ({"dist_init_addr": "h:1"}, "the ranks of one node need none"),
        ({"nnodes": 2, "tp_size": 2}, "give --dist-init-addr HOST:PORT"),
        ({"nnodes": 2, "tp_size": 2, "dist_init_addr": "h"}, "it has no port"),
        ({"nnodes": 2, "tp_size": 2, "dist_init_addr": "h:x"}, "expected HOST:PORT"),
        ({"nnodes": 2, "tp_size": 2, "dist_init_addr": ":1"}, "expected HOST:PORT"),
        ({"nnodes": 2, "tp_size": 2, "dist_init_addr": "h:1", "nccl_port": 2}, "--nccl-port says 2"),
        ({"nnodes": 2, "tp_size": 3, "dist_init_addr": "h:1"}, "what works is 1, 3"),
        ({"nnodes": 2, "tp_size": 2, "dp_size": 2, "dist_init_addr": "h:1"}, "replicas lie on the node of the front"),
        ({"nccl_port": 65535, "dp_size": 2}, "each of --dp-size replicas needs one"),
    ],
)
def test_layouts_over_nodes_that_cannot_be(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        args(**options)


def test_ranks_are_laid_out_stage_by_stage_over_nodes() -> None:
    options = {"tp_size": 2, "pp_size": 2, "nnodes": 2, "dist_init_addr": "h:1"}
    assert ranks.places(args(**options)) == [(0, 0, 0), (0, 0, 1)]
    assert ranks.places(args(**options, node_rank=1)) == [(0, 1, 0), (0, 1, 1)]
    assert ranks.places(args(dp_size=2, pp_size=2)) == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]


def test_stages_that_wait_leave_their_cores_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks.machine, "cores", lambda: 8)
    four = args(pp_size=4)
    assert [ranks.threads_of(four, steps) for steps in (1, 2, 3, 4, 5)] == [8, 4, 2, 2, 2]
    assert ranks.threads_of(args(tp_size=2, pp_size=2), 1) == 4
    assert ranks.threads_of(args(pp_size=2, dp_size=2), 1) == 4, "the other replica has its own"
    assert ranks.threads_of(args(pp_size=2, threads=1), 1) == 1
    one_stage_here = args(tp_size=2, pp_size=2, nnodes=2, dist_init_addr="h:1")
    assert ranks.threads_of(one_stage_here, 1) == ranks.threads_of(one_stage_here, 2) == 4
    half_a_stage_here = args(tp_size=2, nnodes=2, dist_init_addr="h:1")
    assert ranks.threads_of(half_a_stage_here, 1) == 8


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks.machine, "cores", lambda: 8)
    assert ranks.threads_of(args()) == 8
    assert ranks.threads_of(args(tp_size=3)) == 2
    assert ranks.threads_of(args(tp_size=4, dp_size=4)) == 1
    assert ranks.threads_of(args(tp_size=3, threads=5)) == 5


def test_where_ranks_meet() -> None:
    assert ranks.rendezvous(args(tp_size=2), "/run/x", 1) == "file:///run/x/ranks-1"
    assert ranks.rendezvous(args(tp_size=2, nccl_port=4000, dp_size=2), "/run/x", 1) == "tcp://127.0.0.1:4001/run/x"
    nodes = {"tp_size": 2, "nnodes": 2}
    assert ranks.rendezvous(args(**nodes, dist_init_addr="h:5"), "/run/x", 0) == "tcp://h:5"
    assert ranks.rendezvous(args(**nodes, dist_init_addr="h", nccl_port=6), "/run/x", 0) == "tcp://h:6"
    assert ranks.rendezvous(args(**nodes, dist_init_addr="[::1]:5"), "/run/x", 0) == "tcp://[::1]:5"


def test_ranks_of_another_launch_that_come_to_the_same_port_are_not_met() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    first = make_store(f"tcp://127.0.0.1:{port}/run/one", 0, 1)
    first.set("key", "value")
    assert make_store(f"tcp://127.0.0.1:{port}/run/one", 1, 1).check(["key"])
    assert not make_store(f"tcp://127.0.0.1:{port}/run/two", 1, 1).check(["key"])


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}: Address already in use"):
            ranks.check_ports(args(tp_size=2, nccl_port=port))
    ranks.check_ports(args(tp_size=2, nccl_port=port))


def test_the_first_node_needs_an_address_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"a..b:1025 cannot be reached: this is no name of a host"):
        ranks.check_ports(args(tp_size=2, nnodes=2, dist_init_addr="a..b:1025"))
    monkeypatch.setattr(ranks, "local_address", lambda host, port: "127.0.0.1")  # there is a way to it
    with pytest.raises(ConfigError, match=r"240.0.0.1 port 1025: Cannot assign .*; give an address of node 0"):
        ranks.check_ports(args(tp_size=2, nnodes=2, dist_init_addr="240.0.0.1:1025"))


@pytest.mark.parametrize("function", ["make_store", "init_topology"])
def test_ranks_that_do_not_come_are_missed(function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch's own words, without its stack, and ours."""

    def give_up(*arguments: object) -> None:
        raise DistStoreError("wait timeout after 600000ms, keys: /0/1\nException raised from ...")

    nodes = args(tp_size=2, nnodes=2, dist_init_addr="h:1")
    checkpoint = resolve(str(make_tiny(tmp_path)))
    init = ChildInit(role="", args=nodes, ports=PortArgs.init_new(tmp_path), directory="", checkpoint=checkpoint)
    monkeypatch.setattr(process, "make_store", lambda *arguments: None)
    monkeypatch.setattr(process, function, give_up)
    with pytest.raises(RankLost, match=r"not all met \(wait timeout after 600000ms, keys: /0/1\); launch all 2 nodes"):
        process.join(init, Reporter(BytesIO()), torch.device("cpu"))


def test_traffic_of_one_node_stays_on_its_loopback(tmp_path: Path) -> None:
    name = ranks.interface_of("127.0.0.1")
    assert ranks.network_environment(args(tp_size=2)) == {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    assert name.startswith("lo")
    assert ranks.interface_of("203.0.113.9") == ""
