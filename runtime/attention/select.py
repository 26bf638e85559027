"""Which attention backend a worker uses."""

from llmserve.runtime.attention.base import AttentionBackend, PageGeometry
from llmserve.runtime.attention.native import NativeAttention, unsupported
from llmserve.runtime.attention.reference import ReferenceAttention
from llmserve.runtime.config import ConfigError


def make_attention(name: str, geometry: PageGeometry, num_pages: int, num_heads: int) -> AttentionBackend:
    """The backend of an --attention-backend option with its pool. Raises ConfigError when it cannot run here."""
    if name == "reference":
        return ReferenceAttention(geometry, num_pages)
    reason = unsupported(geometry)
    if reason is None:
        return NativeAttention(geometry, num_pages, num_heads)
    if name == "native":
        raise ConfigError(f"--attention-backend native: {reason}; use --attention-backend reference")
    return ReferenceAttention(geometry, num_pages)
