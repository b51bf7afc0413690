"""Speculative RAG in LangChain."""
