"""Which attention backend a worker uses."""

import torch

from llmserve.runtime.attention import native, varlen
from llmserve.runtime.attention.base import AttentionBackend, PageGeometry
from llmserve.runtime.attention.native import NativeAttention
from llmserve.runtime.attention.reference import ReferenceAttention
from llmserve.runtime.attention.varlen import VarlenAttention
from llmserve.runtime.config import ConfigError


def page_size(name: str, wanted: int, device: torch.device) -> int:
    """Tokens in a page: what --page-size says, rounded up to what the backend of --attention-backend can take."""
    if device.type == "cuda" and name in ("auto", "varlen"):
        return -(-wanted // varlen.PAGE_MULTIPLE) * varlen.PAGE_MULTIPLE
    return wanted


def make_attention(
    name: str, geometry: PageGeometry, num_pages: int, num_heads: int, softcap: bool
) -> AttentionBackend:
    """The backend of an --attention-backend option with its pool. Raises ConfigError when it cannot run here.

    `num_heads` are this rank's query heads; `softcap`: the model bounds its attention scores.
    """
    reasons = {"native": native.unsupported(geometry), "varlen": varlen.unsupported(geometry, softcap)}
    if reason := reasons.get(name):
        raise ConfigError(f"--attention-backend {name}: {reason}; use --attention-backend reference")
    if name != "reference":
        if reasons["native"] is None:
            return NativeAttention(geometry, num_pages, num_heads)
        if reasons["varlen"] is None:
            return VarlenAttention(geometry, num_pages)
    return ReferenceAttention(geometry, num_pages)
