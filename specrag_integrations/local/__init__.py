"""Models on this machine: a drafter and a verifier behind two llama.cpp servers (extra `local`).

Importing this package starts nothing and imports nothing heavy.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specrag_integrations.local.pair import EmbeddedPair

__all__ = ["DRAFTER", "VERIFIER", "EmbeddedPair"]

DRAFTER = "qwen2.5-coder-0.5b-instruct"
"""The weights that draft unless others are named."""
VERIFIER = "qwen2.5-coder-1.5b-instruct"
"""The weights that verify unless others are named."""


def __getattr__(name: str) -> Any:
    """Import `EmbeddedPair` when it is first asked for."""
    if name != "EmbeddedPair":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from specrag_integrations.local.pair import EmbeddedPair

    return EmbeddedPair
