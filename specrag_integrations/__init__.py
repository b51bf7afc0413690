"""Speculative RAG (Wang et al., ICLR 2025, arXiv 2407.08223) over OpenAI-compatible endpoints.

A small model drafts several answers in parallel, each from a different subset of the retrieved
passages; a large model verifies them by token log-probabilities; the best draft is the answer, or
ordinary RAG takes over when no draft deserves trust.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specrag_integrations.answers import Answer, Dissent, Refinement, Trace
    from specrag_integrations.confidence import Calibration
    from specrag_integrations.drafts import Draft, FailedDraft
    from specrag_integrations.endpoint import Endpoint
    from specrag_integrations.errors import (
        ConfigurationError,
        EndpointError,
        InputError,
        LogprobsUnavailableError,
        NoAnswerError,
        NoAnswerReason,
        SpecRAGError,
    )
    from specrag_integrations.local import EmbeddedPair
    from specrag_integrations.models import ChatModel, Message
    from specrag_integrations.passages import Passage
    from specrag_integrations.pipeline import SpeculativeRAG
    from specrag_integrations.scores import Score, Scoring
    from specrag_integrations.selection import (
        AnswerVote,
        BestScore,
        FallbackReason,
        Listwise,
        Selection,
        SinglePrompt,
    )
    from specrag_integrations.spans import SpanLogprob
    from specrag_integrations.standard import StandardRAG
    from specrag_integrations.subsets import (
        ByCluster,
        Disjoint,
        MultiPerspective,
        Random,
        RankStratified,
        Subset,
    )
    from specrag_integrations.usage import Price, Usage
    from specrag_integrations.verifier import Verifier

_HOME = {
    "answers": ("Answer", "Dissent", "Refinement", "Trace"),
    "confidence": ("Calibration",),
    "drafts": ("Draft", "FailedDraft"),
    "endpoint": ("Endpoint",),
    "errors": (
        "ConfigurationError",
        "EndpointError",
        "InputError",
        "LogprobsUnavailableError",
        "NoAnswerError",
        "NoAnswerReason",
        "SpecRAGError",
    ),
    "local": ("EmbeddedPair",),
    "models": ("ChatModel", "Message"),
    "passages": ("Passage",),
    "pipeline": ("SpeculativeRAG",),
    "scores": ("Score", "Scoring"),
    "selection": (
        "AnswerVote",
        "BestScore",
        "FallbackReason",
        "Listwise",
        "Selection",
        "SinglePrompt",
    ),
    "spans": ("SpanLogprob",),
    "standard": ("StandardRAG",),
    "subsets": (
        "ByCluster",
        "Disjoint",
        "MultiPerspective",
        "Random",
        "RankStratified",
        "Subset",
    ),
    "usage": ("Price", "Usage"),
    "verifier": ("Verifier",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "Answer",
    "AnswerVote",
    "BestScore",
    "ByCluster",
    "Calibration",
    "ChatModel",
    "ConfigurationError",
    "Disjoint",
    "Dissent",
    "Draft",
    "EmbeddedPair",
    "Endpoint",
    "EndpointError",
    "FailedDraft",
    "FallbackReason",
    "InputError",
    "Listwise",
    "LogprobsUnavailableError",
    "Message",
    "MultiPerspective",
    "NoAnswerError",
    "NoAnswerReason",
    "Passage",
    "Price",
    "Random",
    "RankStratified",
    "Refinement",
    "Score",
    "Scoring",
    "Selection",
    "SinglePrompt",
    "SpanLogprob",
    "SpecRAGError",
    "SpeculativeRAG",
    "StandardRAG",
    "Subset",
    "Trace",
    "Usage",
    "Verifier",
]


def __getattr__(name: str) -> Any:
    """Load a public name on first use, so that importing the package stays cheap."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
