"""Which attention backend a worker uses."""

from llmserve.runtime.attention.base import AttentionBackend, PageGeometry
from llmserve.runtime.attention.reference import ReferenceAttention
from llmserve.runtime.config import ConfigError


def make_attention(name: str, geometry: PageGeometry, num_pages: int) -> AttentionBackend:
    """The backend of an --attention-backend option with its pool. Raises ConfigError when it cannot run here."""
    if name in ("auto", "reference"):
        return ReferenceAttention(geometry, num_pages)
    raise ConfigError(f"--attention-backend {name} cannot run on {geometry.device}")
