"""Selects the attention backend of a worker."""

import logging

import torch

from llmserve.runtime.attention import native, varlen
from llmserve.runtime.attention.base import AttentionBackend, PageGeometry
from llmserve.runtime.attention.native import NativeAttention
from llmserve.runtime.attention.reference import ReferenceAttention
from llmserve.runtime.attention.varlen import VarlenAttention
from llmserve.runtime.config import ConfigError

log = logging.getLogger(__name__)


def page_size(name: str, wanted: int, device: torch.device) -> int:
    """Tokens in a page: --page-size, rounded up to what the backend of --attention-backend supports."""
    if device.type == "cuda" and name in ("auto", "varlen"):
        return -(-wanted // varlen.PAGE_MULTIPLE) * varlen.PAGE_MULTIPLE
    return wanted


def make_attention(
    name: str, geometry: PageGeometry, num_pages: int, num_heads: int, softcap: bool
) -> AttentionBackend:
    """The backend of --attention-backend, with its pool. Raises ConfigError when it cannot run here.

    `num_heads` is the number of this rank's query heads, `softcap` whether the model limits attention scores.
    """
    reasons = {"native": native.unsupported(geometry), "varlen": varlen.unsupported(geometry, softcap)}
    if reason := reasons.get(name):
        raise ConfigError(f"--attention-backend {name}: {reason}; use --attention-backend auto")
    if name != "reference":
        if reasons["native"] is None:
            return NativeAttention(geometry, num_pages, num_heads)
        if reasons["varlen"] is None:
            return VarlenAttention(geometry, num_pages)
        reason = reasons["native" if geometry.device.type == "cpu" else "varlen"]
        log.warning("attention will be slow, by the reference backend reason=%s", reason)
    return ReferenceAttention(geometry, num_pages)
