"""Speculative RAG in LlamaIndex."""
