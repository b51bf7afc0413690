"""Speculative RAG (Wang et al., ICLR 2025, arXiv 2407.08223) over OpenAI-compatible endpoints."""
