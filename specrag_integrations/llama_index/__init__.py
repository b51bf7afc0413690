"""LlamaIndex: speculative RAG as a query engine, or as the synthesizer of the engine you have.

All logic stays in the core. `SpeculativeSynthesizer` turns nodes into passages, and an answer into
a response; `SpeculativeQueryEngine` is a `RetrieverQueryEngine` with such a synthesizer;
`EndpointLLM` is an `Endpoint` as LlamaIndex sees it, and `LLMChat` an LLM as the core sees it.
"""

from __future__ import annotations

from specrag_integrations.errors import MissingDependencyError

try:
    import llama_index.core  # noqa: F401 - named where it is missing
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "llama_index":
        raise
    raise MissingDependencyError("llama-index-core", "llama-index") from error

from specrag_integrations.llama_index.chat import LLMChat
from specrag_integrations.llama_index.llms import EndpointLLM
from specrag_integrations.llama_index.query_engine import SpeculativeQueryEngine
from specrag_integrations.llama_index.synthesizer import SpeculativeSynthesizer

__all__ = ["EndpointLLM", "LLMChat", "SpeculativeQueryEngine", "SpeculativeSynthesizer"]
