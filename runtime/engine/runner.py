"""Makes a worker: device and dtype, the model with its weights, a KV pool that fits, and a warm-up."""

import functools
import logging
from collections.abc import Callable

import msgspec
import torch

from llmserve.runtime.attention.base import AttentionBackend, PageGeometry
from llmserve.runtime.attention.native import NativeAttention
from llmserve.runtime.attention.select import make_attention, page_size
from llmserve.runtime.config import ConfigError, ServerArgs
from llmserve.runtime.distributed.collectives import least, total
from llmserve.runtime.distributed.groups import Topology
from llmserve.runtime.engine.batch import PlanRow, SampleSpec, StepPlan, WorkerInfo, int32_bytes
from llmserve.runtime.engine.leader import Leader
from llmserve.runtime.engine.memory import pool_tokens
from llmserve.runtime.engine.ranks import Rank
from llmserve.runtime.engine.swap import ModelSwap
from llmserve.runtime.engine.weights import load_weights, weight_bytes
from llmserve.runtime.engine.worker import TpModelWorker
from llmserve.runtime.messages import SamplingParams
from llmserve.runtime.models.configs import ModelConfig
from llmserve.runtime.models.decoder import Decoder
from llmserve.runtime.models.hub import Checkpoint
from llmserve.runtime.models.native_decoder import NativeDecoder, runs_natively
from llmserve.runtime.models.registry import CausalLM, build_model
from llmserve.runtime.ops import native
from llmserve.runtime.ranks import check_devices, places, threads_of

log = logging.getLogger(__name__)

Progress = Callable[[str, float, float, str], None]
"""Called with (stage, done, total, unit)."""


def create_worker(args: ServerArgs, checkpoint: Checkpoint, progress: Progress, index: int = 0) -> TpModelWorker:
    """Loads `checkpoint` and makes it ready to run steps. Raises ConfigError when the options do not fit here.

    `index` numbers the ranks of this machine, for their devices.
    """
    device = choose_device(args, index)
    model, attention, info = build_parts(args, checkpoint, progress, device, Topology())
    worker = TpModelWorker(model, attention, info, device)
    worker.swap = ModelSwap(worker, checkpoint)
    warm_up(worker, progress)
    return worker


def create_rank(args: ServerArgs, checkpoint: Checkpoint, progress: Progress, topology: Topology, index: int) -> Rank:
    """As create_worker, for this rank's part of a model on several ranks, all of which must call it. It is not warmed
    up yet, because a step takes all of them.
    """
    device = choose_device(args, index)
    parts = build_parts(args, checkpoint, progress, device, topology)
    threads = functools.cache(functools.partial(threads_of, args))
    return Rank(*parts, device, topology, threads)


def warm_up(worker: TpModelWorker | Leader, progress: Progress) -> None:
    """Runs a prefill and a decode in the first pages, to load kernels and allocate buffers before the first request."""
    progress("warm-up", 0, 1, "")
    prompt = min(4, worker.info.max_model_len - 1)
    pages = int32_bytes(list(range(prompt // worker.info.page_size + 1)))
    for start, end in ((0, prompt), (prompt, prompt + 1)):
        if start < end:
            drawn = SampleSpec(params=SamplingParams(temperature=0.0), seed=0, position=end)
            row = PlanRow(token_ids=int32_bytes([0] * (end - start)), start=start, pages=pages, sample=drawn)
            worker.submit(StepPlan(rows=(row,))).result()
    progress("warm-up", 1, 1, "")


def build_parts(
    args: ServerArgs, checkpoint: Checkpoint, progress: Progress, device: torch.device, topology: Topology
) -> tuple[CausalLM, AttentionBackend, WorkerInfo]:
    """This rank's layers with their weights, its attention backend with the KV pool, and the WorkerInfo. All ranks must
    call it: the pool has as many pages as the rank with the least memory can hold.
    """
    if device.type == "cpu":
        threads = threads_of(args)
        torch.set_num_threads(threads)
        native.set_threads(threads)
    config = checkpoint.config
    name = config.dtype if args.dtype == "auto" else args.dtype
    if args.dtype == "auto" and name == "float16" and device.type == "cpu":
        name = "bfloat16"  # no kernel takes float16 there: a decode would take more than twice as long
    dtype: torch.dtype = getattr(torch, name)

    longest = longest_sequence(args, config)

    model = build_model(config, dtype, device, longest, topology)
    load_weights(model, checkpoint, lambda done, total: progress("weights", done, total, "bytes"), topology)

    geometry = PageGeometry(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=config.head_dim,
        page_size=page_size(args.attention_backend, args.page_size, device),
        dtype=dtype,
        device=device,
    )
    info = plan_pool(args, config, geometry, longest, weight_bytes(model), topology)
    progress("kv pool", info.num_pages * info.page_size, info.num_pages * info.page_size, "tokens")
    heads = config.num_heads // topology.tp.size
    softcap = config.attention_softcap is not None
    attention = make_attention(args.attention_backend, geometry, info.num_pages, heads, softcap)
    log.info(
        "model ready device=%s dtype=%s attention=%s kv_tokens=%d kv_bytes=%d",
        device,
        dtype,
        type(attention).__name__,
        info.num_pages * info.page_size,
        attention.pool.nbytes,
    )
    in_effect: dict[str, str | int] = {
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "attention_backend": attention.name,
    }
    if device.type == "cpu":
        in_effect["threads"] = threads_of(args)
    info = msgspec.structs.replace(info, in_effect=in_effect)
    if isinstance(model, Decoder) and isinstance(attention, NativeAttention) and runs_natively(model):
        return NativeDecoder(model, attention), attention, info
    return model, attention, info


def choose_device(args: ServerArgs, index: int) -> torch.device:
    """The device of rank `index` of this machine. A CUDA device becomes the current one of this thread.

    Raises ConfigError when there are fewer devices than ranks.
    """
    present = torch.cuda.is_available()
    if args.device == "cpu" or (args.device == "auto" and not present):
        return torch.device("cpu")
    if not present:
        raise ConfigError("--device cuda: torch finds no CUDA device; use --device cpu, or a CUDA build of torch")
    check_devices(len(places(args)), torch.cuda.device_count())
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def longest_sequence(args: ServerArgs, config: ModelConfig) -> int:
    """The longest sequence in tokens: --max-model-len, else the model's limit. Raises ConfigError above that."""
    if args.max_model_len is not None and args.max_model_len > config.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {args.max_model_len}: the model allows {config.max_position_embeddings} positions at most"
        )
    return args.max_model_len or config.max_position_embeddings


def plan_pool(
    args: ServerArgs,
    config: ModelConfig,
    geometry: PageGeometry,
    longest: int,
    weight_bytes: int,
    topology: Topology,
) -> WorkerInfo:
    """Sizes the KV pool, which limits a sequence too. Raises ConfigError when --max-model-len does not fit into it."""
    ranks_here = len(places(args)) if geometry.device.type == "cpu" else 1  # they share the memory
    num_pages = pool_tokens(args, longest, geometry, ranks_here) // geometry.page_size
    num_pages = least(num_pages, topology.weights, geometry.device)
    tokens = num_pages * geometry.page_size
    if args.max_model_len is not None and args.max_model_len > tokens:
        raise ConfigError(
            f"--max-model-len {args.max_model_len} does not fit into a KV pool of {tokens} tokens; "
            "lower it, or raise --max-total-tokens"
        )
    return WorkerInfo(
        vocab_size=config.vocab_size,
        max_model_len=min(longest, tokens),
        hidden_size=config.hidden_size,
        eos_token_ids=config.eos_token_ids,
        num_pages=num_pages,
        page_size=geometry.page_size,
        bytes_per_page=total(geometry.bytes_per_page, topology.weights, geometry.device),
        weight_bytes=weight_bytes,
    )
